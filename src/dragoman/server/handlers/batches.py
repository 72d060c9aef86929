"""Handlers for batches, in OpenAI's and in Anthropic's API.

Rules
1. A batch runs with the rights of the caller who created it. They are checked again for every line.
2. The body of Anthropic's create request is written to the storage while it arrives, one line for each of its requests.
3. The batches of another principal do not exist for a caller, nor those of the other API.
"""

from collections.abc import Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec

from dragoman.core.errors import BadRequest, NotFound, TooLarge, UnsupportedParameter, quote
from dragoman.protocols import batches as wire
from dragoman.protocols import json_body
from dragoman.protocols.batch_lines import AnthropicLines
from dragoman.protocols.batches import Api
from dragoman.protocols.files import PageQuery
from dragoman.protocols.item_scanner import ItemScanner
from dragoman.server.app import App
from dragoman.server.auth.callers import SavedCaller, scope_for_path
from dragoman.server.base_app import BaseApp
from dragoman.server.handlers.pages import read_page
from dragoman.server.http.bodies import run_in_body_thread
from dragoman.server.http.headers import check_media_type
from dragoman.server.http_exchange import HttpExchange
from dragoman.storage.batch_states import StoredBatch
from dragoman.storage.batches import SERVER_PRINCIPAL, NewBatch
from dragoman.storage.blob_streams import read_blob, write_blob
from dragoman.storage.blobs import Blob

PATH, ANTHROPIC_PATH = wire.PATHS["openai"], wire.PATHS["anthropic"]
CANCEL, RESULTS = "cancel", "results"
PURPOSE = "batch"
FIELD = "requests"
JSONL = b"application/x-jsonl"


async def create(app: App, exchange: HttpExchange) -> None:
    body = await exchange.read_body(app.settings.limits, json_body.parse)
    fields = json_body.convert(body, wire.CreateFields)
    _report_unknown(app, exchange, json_body.unknown_fields(body, wire.CreateFields))
    exchange.caller.check_route(scope_for_path(fields.endpoint))
    file = await app.files.find(exchange.record.principal, fields.input_file_id)
    if file is None:
        raise BadRequest(f"input_file_id: no file {quote(fields.input_file_id)}", param="input_file_id")
    if file.purpose != PURPOSE:
        message = f"input_file_id: the purpose of this file is {file.purpose}; upload it with the purpose {PURPOSE}"
        raise BadRequest(message, param="input_file_id")
    batch = await _add(
        app,
        exchange,
        Blob(file.digest, file.size),
        fields.completion_window,
        api="openai",
        endpoint=fields.endpoint,
        input_file=file.id,
        metadata=fields.metadata,
        output_seconds=fields.output_seconds,
    )
    await exchange.response.send_json(wire.encode_batch(batch))


async def create_anthropic(app: BaseApp, exchange: HttpExchange) -> None:
    headers, limits, most = exchange.headers, app.settings.limits, app.settings.storage.file_bytes
    check_media_type(headers.get(b"content-type", b""), b"origin" in headers)
    too_large = TooLarge(f"the body is larger than {most} bytes (`storage.file_bytes` of this server)")
    scanner, lines = ItemScanner(FIELD, limits.body_bytes), AnthropicLines(FIELD)
    async with write_blob(app.blobs) as sink:
        async with aclosing(exchange.stream_body(limits, most, too_large)) as pieces:
            async for piece in pieces:
                for item in scanner.feed(piece):
                    await sink.write(await _run(partial(lines.add, item), len(item)))
        fields = await run_in_body_thread(scanner.end)
        if not lines.count:
            raise BadRequest(f"{FIELD}: expected at least one request", param=FIELD)
        _report_unknown(app, exchange, [name for name, value in fields.items() if value is not None])
        blob = await sink.commit()
    batch = await _add(app, exchange, blob, api="anthropic", endpoint=wire.MESSAGES, total=lines.count)
    await exchange.response.send_json(wire.encode_anthropic_batch(batch))


async def _run(make: Callable[[], bytes], size: int) -> bytes:
    return await run_in_body_thread(make) if size > json_body.LARGE_BODY else make()


def _report_unknown(app: BaseApp, exchange: HttpExchange, unknown: Sequence[str]) -> None:
    if unknown and app.is_strict(exchange):
        raise UnsupportedParameter(f"{quote(unknown[0])}: unknown field", param=unknown[0])
    exchange.response.ignore(unknown)


async def _add(
    app: BaseApp, exchange: HttpExchange, blob: Blob, window: str = wire.DEFAULT_WINDOW, **fields: Any
) -> StoredBatch:
    caller, seconds = exchange.caller, wire.window_seconds(window)
    saved = msgspec.json.encode(SavedCaller.of(caller))
    return await app.batches.add(
        NewBatch(principal=caller.principal, caller=saved, window=window, seconds=seconds, blob=blob, **fields)
    )


async def list_batches(app: App, exchange: HttpExchange) -> None:
    page = await _page(app, exchange, "openai", wire.decode_query(exchange.query()))
    await exchange.response.send_json(wire.encode_batches(*page))


async def list_anthropic(app: App, exchange: HttpExchange) -> None:
    page = await _page(app, exchange, "anthropic", wire.decode_anthropic_query(exchange.query()))
    await exchange.response.send_json(wire.encode_anthropic_batches(*page))


async def _page(app: App, exchange: HttpExchange, api: Api, query: PageQuery) -> tuple[Sequence[StoredBatch], bool]:
    principal = exchange.record.principal
    list_after = partial(app.batches.list, principal, api, query.limit)
    return await read_page(query, "batch", partial(app.batches.find, principal, api), list_after)


async def show(app: App, exchange: HttpExchange) -> None:
    batch = await _find(app, exchange, "openai", _split(exchange, "openai"))
    await exchange.response.send_json(wire.encode_batch(batch))


async def show_anthropic(app: BaseApp, exchange: HttpExchange) -> None:
    """Send what is known of a batch, or its results."""
    batch_id, _, below = _split(exchange, "anthropic").partition("/")
    if below not in ("", RESULTS):
        raise exchange.not_found_error()
    batch = await _find(app, exchange, "anthropic", batch_id)
    if below:
        await _send_results(app, exchange, batch)
    else:
        await exchange.response.send_json(wire.encode_anthropic_batch(batch))


async def _send_results(app: BaseApp, exchange: HttpExchange, batch: StoredBatch) -> None:
    if not batch.has_ended:
        status = wire.processing_status(batch)
        raise NotFound(f"batch {quote(batch.id)} has no results yet; its processing_status is {status}")
    file = None if batch.output_file is None else await app.files.find(SERVER_PRINCIPAL, batch.output_file)
    if file is None:
        raise NotFound(f"the results of batch {quote(batch.id)} are not stored here any more")
    exchange.skip_body()
    async with read_blob(app.blobs, file.digest) as pieces:
        await exchange.response.send_pieces(None if exchange.method == "HEAD" else pieces, JSONL, file.size)


async def cancel(app: App, exchange: HttpExchange) -> None:
    batch = await _cancel(app, exchange, "openai")
    await exchange.response.send_json(wire.encode_batch(batch))


async def cancel_anthropic(app: App, exchange: HttpExchange) -> None:
    batch = await _cancel(app, exchange, "anthropic")
    await exchange.response.send_json(wire.encode_anthropic_batch(batch))


async def _cancel(app: App, exchange: HttpExchange, api: Api) -> StoredBatch:
    batch_id, _, below = _split(exchange, api).partition("/")
    if below != CANCEL:
        raise exchange.not_found_error()
    batch = await app.batches.cancel(exchange.record.principal, api, batch_id)
    if batch is None:
        raise _not_found(batch_id)
    return batch


async def delete_anthropic(app: App, exchange: HttpExchange) -> None:
    batch_id = _split(exchange, "anthropic")
    if not await app.batches.delete(exchange.record.principal, "anthropic", batch_id):
        raise _not_found(batch_id)
    await exchange.response.send_json(wire.encode_anthropic_deleted(batch_id))


async def _find(app: BaseApp, exchange: HttpExchange, api: Api, batch_id: str) -> StoredBatch:
    batch = await app.batches.find(exchange.record.principal, api, batch_id)
    if batch is None:
        raise _not_found(batch_id)
    return batch


def _split(exchange: HttpExchange, api: Api) -> str:
    return exchange.path.removeprefix(f"{wire.PATHS[api]}/")


def _not_found(batch_id: str) -> NotFound:
    return NotFound(f"batch {quote(batch_id)} is not stored here")
