"""`dragoman usage`: shows the tokens that were used, their cost, and what is left of the budgets."""

import argparse
import asyncio
import time
import urllib.parse
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import UNSET

from dragoman.cli import admin_client
from dragoman.cli.common import Commands, add_command, format_table, load_config, print_progress
from dragoman.config.quantities import NANO, format_cost
from dragoman.config.sections import MEMORY, POSTGRES
from dragoman.config.settings import Settings
from dragoman.core.errors import BadRequest, ConfigError, StorageUnavailable
from dragoman.protocols.usage import (
    COLUMNS,
    DEFAULT_COLUMNS,
    DEFAULT_SINCE,
    BudgetEntry,
    UsageEntry,
    UsageQuery,
    UsageReport,
    day_of,
    decode_usage_query,
)

EXAMPLES = """\
examples:
  dragoman usage                                  of the last 30 days, by principal and model
  dragoman usage --since 7d --by day              of today and the six days before, by day
  dragoman usage --since 2027-01-01 --by key,principal,model,day --json
  dragoman usage --url http://127.0.0.1:8000      of this server

Days begin at midnight UTC. The server at --url or $DRAGOMAN_URL is asked, or that of the configuration. If that does
not run, the storage of the configuration is read. If the server requires a key, give one with the scope `admin`:
--api-key or $DRAGOMAN_API_KEY.
"""
COUNT_HEADS = ("requests", "prompt", "cached", "completion", "reasoning", "cost")


def add(commands: Commands) -> None:
    description = "Show the tokens that were used, their cost, and what is left of the budgets."
    parser = add_command(commands, "usage", "show used tokens, costs and budgets", description, EXAMPLES)
    add_report_flags(parser)
    columns_help = f"sum by these columns: {', '.join(COLUMNS)} ({','.join(DEFAULT_COLUMNS)})"
    parser.add_argument("--by", metavar="COLUMNS", default=",".join(DEFAULT_COLUMNS), help=columns_help)
    parser.set_defaults(run=run)


def add_report_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--since", metavar="DAYS|DATE", default=DEFAULT_SINCE, help=f"7d, or a date ({DEFAULT_SINCE})")
    parser.add_argument("--storage", metavar="ADDRESS", help="the storage to read if the server does not run")
    parser.add_argument("--json", action="store_true", help="print JSON")
    admin_client.add_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    report = find_report(arguments, arguments.by)
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
        return 0
    print(_format_usage(report))
    if report.budgets:
        print(f"\n{_format_budgets(report.budgets)}")
    return 0


def find_report(arguments: argparse.Namespace, by: str) -> UsageReport:
    fields, today = [("since", arguments.since), ("by", by)], day_of(time.time())
    try:
        query = decode_usage_query(fields, today)
    except BadRequest as error:
        raise ConfigError(f"--{error.message}") from error
    if arguments.storage is None and admin_client.names_url(arguments):
        return _ask(admin_client.from_arguments(arguments), fields)
    settings = load_config(arguments.config, arguments.storage).settings
    server = admin_client.from_settings(settings, arguments.api_key)
    if server.is_running():
        return _ask(server, fields)
    if arguments.api_key is not None:
        raise ConfigError("--api-key is for a running server: give its --url too")
    if settings.storage.address == MEMORY:
        raise ConfigError(f"{server.address} does not answer, and its storage is in memory")
    print_progress(f"{server.address} does not answer; reading its storage:")
    return _read(settings, query, today)


def _ask(server: admin_client.AdminClient, fields: Sequence[tuple[str, str]]) -> UsageReport:
    try:
        return msgspec.convert(server.get(f"/admin/usage?{urllib.parse.urlencode(fields)}"), UsageReport)
    except msgspec.ValidationError as error:
        raise server.unexpected_answer("a usage report") from error


def _read(settings: Settings, query: UsageQuery, today: int) -> UsageReport:
    # Imported here, like httpx in `admin_client`: asking a server needs none of it.
    from dragoman.server.auth.access import Authenticator
    from dragoman.server.usage_report import read_report
    from dragoman.storage.budgets import BudgetTable
    from dragoman.storage.database import Database

    address = settings.storage.address
    if not address.startswith(POSTGRES) and not Path(address).exists():
        raise ConfigError(f"there is no storage at {address} yet; it begins with the first request")
    authenticator, database = Authenticator(settings), Database(address)
    try:
        database.open()
        table = BudgetTable(settings.budgets)
        return asyncio.run(
            database.read(lambda connection: read_report(connection, query, table, authenticator, today))
        )
    except StorageUnavailable as error:
        raise ConfigError(error.message) from error
    finally:
        database.close()
        authenticator.close()


def _format_usage(report: UsageReport) -> str:
    if not report.data:
        return f"no requests since {report.since}"
    rows = [
        [
            *(str(getattr(entry, column)) or "-" for column in report.by),
            *counts(entry),
        ]
        for entry in report.data
    ]
    return format_table([[head.upper() for head in (*report.by, *COUNT_HEADS)], *rows])


def counts(entry: UsageEntry) -> list[str]:
    """The cells below `COUNT_HEADS`."""
    tokens = (entry.prompt_tokens, entry.cached_tokens, entry.completion_tokens, entry.reasoning_tokens)
    return [*map(str, (entry.requests, *tokens)), _format_money(entry.cost)]


def _format_budgets(budgets: Sequence[BudgetEntry]) -> str:
    heads = ["BUDGET OF", "PER", "LIMIT", "USED", "RESERVED", "REMAINING", "ACTION", "RESETS"]
    rows = []
    for budget in budgets:
        owner = budget.principal if budget.key is UNSET else f"key {budget.key or 'none'}"
        amounts = [budget.used, budget.reserved, budget.remaining]
        if budget.cost is not UNSET:
            shown = ["cost " + _format_money(budget.cost), *map(_format_money, amounts)]
        else:
            shown = [f"{budget.tokens} tokens", *(f"{amount:.0f}" for amount in amounts)]
        rows.append([str(owner), budget.per, *shown, budget.action, budget.begins_anew])
    return format_table([heads, *rows])


def _format_money(amount: float) -> str:
    return format_cost(round(amount * NANO))
