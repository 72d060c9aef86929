"""Handlers for files, in OpenAI's and in Anthropic's API: upload, list, describe, download and delete.

Rules
1. The headers of a request choose the API, as they choose the format of errors.
2. The process that has the connection receives and sends contents, in pieces. Only the parent has the database.
3. The files of another principal do not exist for a caller.
"""

import time
from collections.abc import Sequence
from contextlib import aclosing
from functools import partial
from urllib.parse import quote as percent_encode

from dragoman.core.errors import NotFound, UnsupportedParameter, quote
from dragoman.protocols import files as wire
from dragoman.protocols import json_body
from dragoman.protocols.form_reader import FORM_BYTES, FormReader
from dragoman.protocols.registry import ANTHROPIC
from dragoman.server.app import App
from dragoman.server.base_app import BaseApp
from dragoman.server.handlers.pages import read_page
from dragoman.server.http_exchange import HttpExchange
from dragoman.storage.blob_streams import read_blob, write_blob
from dragoman.storage.files import NewFile, StoredFile

PATH = "/v1/files"
FIELD = "file"
CONTENT = "content"


async def create(app: BaseApp, exchange: HttpExchange) -> None:
    app.check_origin(exchange, "send forms")
    limits, most = app.settings.limits, app.settings.storage.file_bytes
    form = FormReader(exchange.headers.get(b"content-type", b""), FIELD, most, "storage.file_bytes")
    async with write_blob(app.blobs) as sink:
        async with aclosing(exchange.stream_body(limits, most + FORM_BYTES, form.too_large())) as pieces:
            async for piece in pieces:
                await sink.write(form.feed(piece))
        form.end()
        fields = _decode_fields(app, exchange, form)
        blob = await sink.commit()
    expires = None if fields.seconds is None else time.time() + fields.seconds
    new = NewFile(exchange.record.principal, form.file_name, fields.purpose, blob, expires, form.media_type)
    await _send(exchange, await app.files.add(new))


def _decode_fields(
    app: BaseApp, exchange: HttpExchange, form: FormReader
) -> wire.UploadFields | wire.AnthropicUploadFields:
    kind: type[wire.UploadFields | wire.AnthropicUploadFields]
    kind = wire.AnthropicUploadFields if _is_anthropic(exchange) else wire.UploadFields
    unknown = json_body.unknown_fields(form.fields, kind)
    if unknown and app.is_strict(exchange):
        raise UnsupportedParameter(f"{quote(unknown[0])}: unknown field", param=unknown[0])
    exchange.response.ignore(unknown)
    return json_body.convert(form.fields, kind, strict=False)


async def list_files(app: App, exchange: HttpExchange) -> None:
    if _is_anthropic(exchange):
        await _list_anthropic(app, exchange)
        return
    query = wire.decode_query(exchange.query())
    files, has_more = await _page(app, exchange, query)
    await exchange.response.send_json(wire.encode_files(files, has_more))


async def _list_anthropic(app: App, exchange: HttpExchange) -> None:
    ids = exchange.query_list("ids")
    if ids:
        principal = exchange.record.principal
        found = [await app.files.find(principal, file_id) for file_id in wire.check_ids(ids, exchange.query())]
        known = [file for file in found if file is not None]
        await exchange.response.send_json(wire.encode_anthropic_files(known, has_more=False))
        return
    query = wire.decode_anthropic_query(exchange.query())
    files, has_more = await _page(app, exchange, query)
    is_before = query.before is not None
    await exchange.response.send_json(wire.encode_anthropic_files(files, has_more, is_before=is_before))


async def _page(app: App, exchange: HttpExchange, query: wire.FileQuery) -> tuple[Sequence[StoredFile], bool]:
    principal = exchange.record.principal
    list_after = partial(app.files.list, principal, query.purpose, query.limit)
    return await read_page(query, "file", partial(app.files.find, principal), list_after)


async def show(app: BaseApp, exchange: HttpExchange) -> None:
    """Send what is known of a file, or its content."""
    file_id, _, below = _split(exchange).partition("/")
    if below not in ("", CONTENT):
        raise exchange.not_found_error()
    file = await app.files.find(exchange.record.principal, file_id)
    if file is None:
        raise _not_found(file_id)
    await (_send_content(app, exchange, file) if below else _send(exchange, file))


async def _send_content(app: BaseApp, exchange: HttpExchange, file: StoredFile) -> None:
    response = exchange.response
    name = percent_encode(file.name, safe="")
    response.extra_headers.append((b"content-disposition", f"attachment; filename*=UTF-8''{name}".encode()))
    exchange.skip_body()
    async with read_blob(app.blobs, file.digest) as pieces:
        # Never the type that the uploader chose: a browser would run a page.
        await response.send_pieces(None if exchange.method == "HEAD" else pieces, wire.BINARY.encode(), file.size)


async def delete(app: App, exchange: HttpExchange) -> None:
    file_id = _split(exchange)
    if not await app.files.delete(exchange.record.principal, file_id):
        raise _not_found(file_id)
    encode = wire.encode_anthropic_deleted if _is_anthropic(exchange) else wire.encode_deleted
    await exchange.response.send_json(encode(file_id))


def _split(exchange: HttpExchange) -> str:
    return exchange.path.removeprefix(f"{PATH}/")


async def _send(exchange: HttpExchange, file: StoredFile) -> None:
    encode = wire.encode_anthropic_file if _is_anthropic(exchange) else wire.encode_file
    await exchange.response.send_json(encode(file))


def _is_anthropic(exchange: HttpExchange) -> bool:
    return exchange.response.family is ANTHROPIC


def _not_found(file_id: str) -> NotFound:
    return NotFound(f"file {quote(file_id)} is not stored here")
