"""Handlers for usage reports: `/admin/usage`, and OpenAI's `/v1/organization/usage/completions`."""

import time
from functools import partial

from dragoman.protocols import usage as wire
from dragoman.server import usage_report
from dragoman.server.app import App
from dragoman.server.http_exchange import HttpExchange


async def usage(app: App, exchange: HttpExchange) -> None:
    today = wire.day_of(time.time())
    query = wire.decode_usage_query(exchange.query_pairs(), today)
    read = partial(usage_report.read_report, query=query, table=app.ledger.budgets, today=today)
    report = await app.read_usage(lambda connection, authenticator: read(connection, authenticator=authenticator))
    await exchange.response.send_json(report)


async def completions(app: App, exchange: HttpExchange) -> None:
    page = wire.decode_usage_page(exchange.query_pairs(), wire.day_of(time.time()))
    entries = await app.read_usage(lambda connection, _: usage_report.read_entries(connection, page.query))
    await exchange.response.send_json(wire.encode_usage_page(page, entries))
