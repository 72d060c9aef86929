"""Request bodies with a Content-Encoding: every coding, damaged bodies, and bodies that expand to very large ones."""

import gzip
import itertools
import json
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import brotli
import httpx
import openai
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from dragoman import create_app
from dragoman.config.sections import KeyLimits, Keys
from dragoman.config.settings import Settings
from dragoman.core.errors import BadRequest, TooLarge
from dragoman.engines.scripted import ScriptedEngine
from dragoman.server.http.content_codings import FREE_BYTES, MAX_RATIO, decompress, parse_codings
from tests.server.conftest import BODY_BYTES
from tests.support.raw_http import raw, request_bytes
from tests.support.requests import (
    CHAT,
    COMPLETIONS,
    HELLO,
    JSON_BODY,
    SMALLEST,
    ask,
    in_process,
    recorded,
    refused,
    text_of,
)
from tests.support.server_process import Running

MIB = 1024 * 1024


def compress_brotli(data: bytes) -> bytes:
    return bytes(brotli.compress(data, quality=5))


def raw_deflate(data: bytes) -> bytes:
    return zlib.compress(data, wbits=-zlib.MAX_WBITS)


def streamed_zstd(data: bytes) -> bytes:
    """A frame whose header does not say its length."""
    compressor = zstandard.ZstdCompressor(write_checksum=True).compressobj()
    return compressor.compress(data) + compressor.flush()


CODINGS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "zstd": ("zstd", zstandard.compress),
    "zstd without a length": ("ZSTD", streamed_zstd),
    "br": ("br", compress_brotli),
    "gzip": ("gzip", gzip.compress),
    "x-gzip": ("x-gzip", gzip.compress),
    "deflate": ("deflate", zlib.compress),
    "deflate without a header": ("deflate", raw_deflate),
    "two codings": ("gzip, br", lambda data: compress_brotli(gzip.compress(data))),
    "the same one twice": ("zstd,zstd", lambda data: zstandard.compress(zstandard.compress(data))),
    "identity": ("identity", bytes),
    "identity among others": ("identity, gzip, ,", gzip.compress),
}
EACH = pytest.mark.parametrize(("coding", "compress"), CODINGS.values(), ids=CODINGS.keys())


@pytest.fixture(scope="session")
def server(tight: Running) -> Running:
    return tight


def send(client: httpx.Client, path: str, body: bytes, coding: str) -> httpx.Response:
    return client.post(path, content=body, headers=JSON_BODY | {"content-encoding": coding})


@EACH
def test_compressed_bodies_of_generations(client: httpx.Client, coding: str, compress: Callable[..., bytes]) -> None:
    for path in (CHAT, COMPLETIONS):
        assert text_of(send(client, path, compress(json.dumps(SMALLEST[path]).encode()), coding)) == "hello"


@EACH
def test_compressed_bodies_of_relayed_routes(client: httpx.Client, coding: str, compress: Callable[..., bytes]) -> None:
    path = "/v1/messages/count_tokens"
    plain = ask(client, path)
    assert send(client, path, compress(json.dumps(SMALLEST[path]).encode()), coding).json() == plain.json()


def test_large_compressed_body(client: httpx.Client) -> None:
    """Above the size at which bodies are decoded in a thread, and up to the limit."""
    filler = "".join(f"{number:x} " for number in range(BODY_BYTES // 8))
    body = json.dumps({"messages": HELLO, "metadata": {"filler": filler}}).encode()
    body += b" " * (BODY_BYTES - len(body))
    for coding, compress in CODINGS.values():
        assert text_of(send(client, CHAT, compress(body), coding)) == "hello"
        assert "larger than" in refused(send(client, CHAT, compress(body + b" "), coding), 413)


async def test_quotas_estimate_the_decompressed_body() -> None:
    keys = Keys(limits=KeyLimits(tokens_per_minute=6000))
    app = create_app(ScriptedEngine(), settings=Settings(models_dir=(), api_keys=("a",), keys=keys))
    body = json.dumps({"messages": [{"role": "user", "content": "word " * 4000}], "max_tokens": 1}).encode()
    async with in_process(app, headers=JSON_BODY | {"x-api-key": "a"}) as client:
        assert text_of(await client.post(CHAT, json=SMALLEST[CHAT])) == "hello"
        for coding, compress in CODINGS.values():
            sent = await client.post(CHAT, content=compress(body), headers={"content-encoding": coding})
            assert "may need 6000" in refused(sent, 429)


def test_openai_sdk_with_a_compressing_transport(server: Running) -> None:
    def compress(request: Any) -> None:
        content = zstandard.compress(request.read())
        request.stream = type(request.stream)(content)
        request.headers.update({"content-encoding": "zstd", "content-length": str(len(content))})

    http = openai.DefaultHttpxClient(event_hooks={"request": [compress]}, trust_env=False)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", http_client=http, max_retries=0) as client:
        reply = client.responses.create(model="echo", input="hello")
        assert reply.output_text == "hello"
        with client.chat.completions.stream(model="echo", messages=[{"role": "user", "content": "hello"}]) as stream:
            assert stream.get_final_completion().choices[0].message.content == "hello"


DAMAGED = {
    "not compressed": lambda data: b'{"messages": []}',
    "empty": lambda data: b"",
    "truncated": lambda data: data[:-1],
    "damaged in the middle": lambda data: data[:10] + bytes(byte ^ 0xFF for byte in data[10:14]) + data[14:],
    "followed by data": lambda data: data + b"x",
    "followed by itself": lambda data: data + data,
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED.keys())
@pytest.mark.parametrize("coding", ["zstd", "br", "gzip", "deflate"])
def test_damaged_body_is_a_400_that_names_the_header(
    client: httpx.Client, coding: str, damage: Callable[[bytes], bytes]
) -> None:
    # Bytes that do not repeat, so that none of them is unused.
    body = json.dumps(SMALLEST[CHAT] | {"metadata": {"a": "".join(map(chr, range(33, 127)))}}).encode()
    compressed = streamed_zstd(body) if coding == "zstd" else CODINGS[coding][1](body)
    for path in (CHAT, "/v1/responses/input_tokens"):
        message = refused(send(client, path, damage(compressed), coding), 400, code="invalid_value")
        assert message.startswith(f"content-encoding: the body is not valid {coding}")


@pytest.mark.parametrize("coding", ["x", "compress", "gzip, x", "gzip, br, zstd", "gzip;q=1", "*"])
def test_unknown_coding_is_a_415_that_lists_the_known_ones(client: httpx.Client, coding: str) -> None:
    for path in (CHAT, "/v1/responses/input_tokens"):
        response = send(client, path, b"{}", coding)
        message = refused(response, 415, code="unsupported_media_type")
        assert message.startswith("content-encoding: ")
        assert response.headers["accept-encoding"] == "zstd, br, gzip, deflate"
    answer = client.post("/v1/messages", content=b"{}", headers=JSON_BODY | {"content-encoding": coding})
    assert (answer.status_code, answer.json()["type"]) == (415, "error")


def test_codings_in_several_lines_are_one_list(server: Running) -> None:
    body = compress_brotli(gzip.compress(json.dumps(SMALLEST[CHAT]).encode()))
    request = request_bytes(CHAT, SMALLEST[CHAT], "Content-Encoding: gzip", "Content-Encoding: br", "Connection: close")
    head = request.partition(b"\r\n\r\n")[0].lower()
    length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length"))
    head = request.partition(b"\r\n\r\n")[0].replace(b"Content-Length", b"content-length")
    answer = raw(server, head.replace(length, b"content-length: %d" % len(body)) + b"\r\n\r\n" + body)
    assert text_of(answer.response) == "hello"


BOMBS: dict[str, Callable[[], bytes]] = {
    "zstd": lambda: zstandard.compress(b" " * (64 * MIB)),
    "br": lambda: compress_brotli(b" " * (64 * MIB)),
    "gzip": lambda: gzip.compress(b" " * (64 * MIB)),
    "deflate": lambda: zlib.compress(b" " * (64 * MIB)),
    "gzip, gzip": lambda: gzip.compress(gzip.compress(b" " * (64 * MIB))),
    "br, zstd": lambda: zstandard.compress(compress_brotli(b" " * (64 * MIB))),
    # The inner streams expand to nothing: only the outer one is large.
    "zstd, gzip": lambda: gzip.compress(zstandard.compress(b"") * 2_000_000),
}


@pytest.fixture(scope="module")
def bombs() -> dict[str, bytes]:
    return {coding: make() for coding, make in BOMBS.items()}


@pytest.mark.parametrize("coding", BOMBS)
def test_bomb_is_a_413(server: Running, client: httpx.Client, bombs: dict[str, bytes], coding: str) -> None:
    for path in (CHAT, "/v1/responses/input_tokens"):
        response = send(client, path, bombs[coding], coding)
        message = refused(response, 413, code="request_too_large")
        assert "decompressed" in message
        [record] = recorded(server, id=response.headers["x-request-id"])
        assert record["status"] == 413
    assert send(client, "/v1/messages", bombs[coding], coding).json()["error"]["type"] == "request_too_large"


def test_bombs_take_bounded_memory(server: Running, client: httpx.Client, bombs: dict[str, bytes]) -> None:
    """Also zstd with a window that is too large."""
    for pid in (server.process.pid, *server.fronts()):
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    before = _memory(server, "VmRSS")
    for coding, bomb in itertools.islice(itertools.cycle(bombs.items()), 40):
        refused(send(client, CHAT, bomb, coding), 413)
    wide = zstandard.ZstdCompressionParameters(window_log=27)
    compressor = zstandard.ZstdCompressor(compression_params=wide).compressobj()
    refused(send(client, CHAT, compressor.compress(b"{}" * 1000) + compressor.flush(), "zstd"), 400)
    assert _memory(server, "VmHWM") < before + 100 * 1024


def _memory(running: Running, field: str) -> int:
    """In KiB, of all processes with connections."""
    total = 0
    for pid in (running.process.pid, *running.fronts()):
        status = Path(f"/proc/{pid}/status").read_text()
        total += next(int(line.split()[1]) for line in status.splitlines() if line.startswith(field))
    return total


@given(data=st.binary(max_size=3000), kinds=st.lists(st.sampled_from(["zstd", "br", "gzip", "deflate"]), max_size=2))
def test_decompressing_is_the_inverse_of_compressing(data: bytes, kinds: list[str]) -> None:
    body = data
    for kind in kinds:
        body = CODINGS[kind][1](body)
    codings = parse_codings(", ".join(kinds).encode())
    assert decompress(body, codings, 3000) == data
    if data and codings:
        with pytest.raises(TooLarge):
            decompress(body, codings, len(data) - 1)


@given(body=st.binary(max_size=300), kinds=st.lists(st.sampled_from(["zstd", "br", "gzip", "deflate"]), min_size=1))
def test_any_bytes_are_decoded_or_refused(body: bytes, kinds: list[str]) -> None:
    with suppress(BadRequest, TooLarge):
        assert len(decompress(body, tuple(kinds), 1000)) <= 1000


@given(share=st.floats(0, 1), kind=st.sampled_from(["zstd", "br", "gzip", "deflate"]))
def test_truncated_bodies_are_refused(share: float, kind: str) -> None:
    body = CODINGS[kind][1](b"".join(b"%d," % number for number in range(2000)))
    with pytest.raises(BadRequest):
        decompress(body[: int(share * (len(body) - 1))], (kind,), MIB)


@pytest.mark.parametrize("coding", ["zstd", "br", "gzip", "deflate"])
def test_ratio_is_limited_above_one_megabyte(coding: str) -> None:
    compress = CODINGS[coding][1]
    assert decompress(compress(b" " * FREE_BYTES), (coding,), 100 * MIB) == b" " * FREE_BYTES
    body = compress(b" " * (8 * MIB))
    assert len(body) * MAX_RATIO < 8 * MIB
    with pytest.raises(TooLarge, match="send it uncompressed"):
        decompress(body, (coding,), 100 * MIB)
