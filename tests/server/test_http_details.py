"""Details of HTTP/1.1 that proxies and old clients depend on, as bytes on a socket."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.conftest import HEADER_BYTES
from tests.support.bad_server import BadServer
from tests.support.bad_server import refused as refusing
from tests.support.requests import (
    CHAT,
    HELLO,
    PATIENCE,
    SMALLEST,
    Answer,
    ask,
    connect,
    frames,
    head,
    raw,
    read,
    recorded,
    refused,
    request_bytes,
    talking,
)
from tests.support.server_process import Running, serving

PAGE = "https://app.example"
BODY = b'{"messages": [{"role": "user", "content": "hello"}]}'


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with a local trusted proxy, keys, and an allowed origin."""
    config = {
        "models": {"echo": {"engine": "scripted"}},
        "api_keys": ["sk-one", "sk-two"],
        "proxies": ["127.0.0.1"],
        "cors": {"origins": [PAGE]},
    }
    with serving(tmp_path_factory.mktemp("proxied"), config) as running:
        yield running


@pytest.fixture(scope="module")
def trusting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The same without keys."""
    config = {"models": {"echo": {"engine": "scripted"}}, "proxies": ["127.0.0.1"]}
    with serving(tmp_path_factory.mktemp("trusting"), config) as running:
        yield running


def get(running: Running, path: str, *lines: str, version: str = "1.1") -> Answer:
    """The answer to the only request of a connection."""
    given = "\r\n".join([f"GET {path} HTTP/{version}", *lines, "Connection: close"])
    return raw(running, given.encode() + b"\r\n\r\n", PATIENCE)


class TestRepeatedHeaders:
    @pytest.mark.parametrize("second", ["localhost", "attacker.example"])
    @pytest.mark.parametrize("first", ["localhost", "attacker.example"])
    def test_host(self, proxied: Running, first: str, second: str) -> None:
        answer = get(proxied, "/health", f"Host: {first}", f"Host: {second}")
        refused(answer.response, 400)
        assert answer.closed

    @pytest.mark.parametrize("order", [1, -1])
    @pytest.mark.parametrize(
        "lines",
        [
            ("Authorization: Bearer sk-one", "Authorization: Bearer sk-two"),
            ("Authorization: Bearer sk-one", "Authorization: Bearer wrong"),
            ("x-api-key: sk-one", "X-API-Key: sk-two"),
        ],
    )
    def test_different_keys(self, proxied: Running, lines: tuple[str, str], order: int) -> None:
        answer = get(proxied, "/v1/models", "Host: localhost", *lines[::order])
        assert lines[0].partition(":")[0].lower() in refused(answer.response, 400)

    def test_same_key(self, proxied: Running) -> None:
        key = "Authorization: Bearer sk-one"
        assert get(proxied, "/v1/models", "Host: localhost", key, key).status == 200

    def test_different_types_of_a_body(self, proxied: Running) -> None:
        lines = ("Authorization: Bearer sk-one", "Content-Type: text/plain", "Connection: close")
        refused(raw(proxied, request_bytes(CHAT, SMALLEST[CHAT], *lines), PATIENCE).response, 400)

    @pytest.mark.parametrize(
        ("lines", "client"),
        [
            (("203.0.113.9", "127.0.0.1"), "203.0.113.9"),
            (("127.0.0.1", "203.0.113.9"), "203.0.113.9"),
            (("198.51.100.7, 203.0.113.9", "127.0.0.1, 127.0.0.1"), "203.0.113.9"),
            (("198.51.100.7", "nonsense", "127.0.0.1"), "127.0.0.1"),
        ],
    )
    def test_all_forwarded_addresses_are_read_in_order(
        self, trusting: Running, lines: tuple[str, ...], client: str
    ) -> None:
        forwarded = [f"X-Forwarded-For: {line}" for line in lines]
        answer = get(trusting, "/v1/models", "Host: localhost", *forwarded)
        [record] = recorded(trusting, id=answer.response.headers["x-request-id"])
        assert record["client"] == client
        assert get(trusting, "/admin/models", "Host: localhost", *forwarded).status in (401, 403)

    def test_scheme_comes_from_the_nearest_proxy(self, trusting: Running) -> None:
        lines = ("X-Forwarded-Proto: http", "X-Forwarded-Proto: https")
        answer = get(trusting, "/v1/models", "Host: localhost", *lines)
        [record] = recorded(trusting, id=answer.response.headers["x-request-id"])
        assert record["scheme"] == "https"


class TestHttp10:
    def test_stream_ends_with_connection(self, tight: Running) -> None:
        body = SMALLEST[CHAT] | {"model": "slow", "stream": True, "max_tokens": 5}
        data = request_bytes(CHAT, body).replace(b"HTTP/1.1", b"HTTP/1.0")
        answer = raw(tight, data, PATIENCE)
        assert answer.status == 200
        assert answer.closed
        assert b"transfer-encoding" not in answer.head
        assert b"connection: close" in answer.head
        assert frames(answer.body.decode())[-1] == "[DONE]"

    def test_whole_reply_has_content_length(self, tight: Running) -> None:
        answer = raw(tight, request_bytes(CHAT, SMALLEST[CHAT]).replace(b"HTTP/1.1", b"HTTP/1.0"), PATIENCE)
        assert int(answer.response.headers["content-length"]) == len(answer.body)

    def test_no_interim_response(self, tight: Running) -> None:
        data = request_bytes(CHAT, SMALLEST[CHAT], "Expect: 100-continue").replace(b"HTTP/1.1", b"HTTP/1.0")
        assert raw(tight, data, PATIENCE).status == 200


TRANSFERS = {
    "gzip, chunked": 501,
    "gzip\r\nTransfer-Encoding: chunked": 501,
    "chunked, chunked": 400,
    "chunked\r\nTransfer-Encoding: chunked": 400,
    "chunked, gzip": 400,
    "identity": 400,
    "xchunked": 400,
    "": 400,
}


@pytest.mark.parametrize(("coding", "status"), TRANSFERS.items())
def test_other_transfer_codings_are_refused(tight: Running, coding: str, status: int) -> None:
    content = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    line = f"Transfer-Encoding: {coding}".encode()
    answer = raw(tight, head(CHAT, b"Host: localhost", line) + content, PATIENCE)
    refused(answer.response, status)
    assert answer.closed


def test_chunks_in_http_1_0_are_refused(tight: Running) -> None:
    data = head(CHAT, b"Host: localhost", b"Transfer-Encoding: chunked").replace(b"HTTP/1.1", b"HTTP/1.0")
    answer = raw(tight, data + b"0\r\n\r\n", PATIENCE)
    refused(answer.response, 400)
    assert answer.closed


def test_204_has_neither_a_length_nor_a_body(proxied: Running) -> None:
    lines = [f"Origin: {PAGE}", "Access-Control-Request-Method: POST", "Host: localhost", "Connection: close"]
    data = "\r\n".join([f"OPTIONS {CHAT} HTTP/1.1", *lines]).encode() + b"\r\n\r\n"
    answer = raw(proxied, data, PATIENCE)
    assert answer.status == 204
    assert b"content-length" not in answer.head
    assert b"transfer-encoding" not in answer.head
    assert answer.body == b""


def test_body_is_sent_after_the_interim_response(tight: Running) -> None:
    first = head(CHAT, b"Host: localhost", b"Expect: 100-continue", b"Content-Length: %d" % len(BODY))
    with connect(tight) as sock:
        sock.settimeout(PATIENCE)
        sock.sendall(first)
        assert sock.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(BODY + b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answer = read(sock, PATIENCE)
    assert answer.status == 200
    assert answer.closed


def assert_anthropic_error(answer: Answer, status: int, kind: str) -> None:
    """Assert that the answer is an error in Anthropic's format."""
    told = answer.response.json()
    assert (answer.status, told["type"], told["error"]["type"]) == (status, "error", kind)
    assert told["request_id"] == answer.response.headers["request-id"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/nope", "/v1/messages/batches", "/v1/messages/nope?a=b"])
class TestErrorsOfMessages:
    """All errors below this path have Anthropic's format."""

    def test_unknown_paths_and_methods(self, tight: Running, path: str) -> None:
        is_known = path == "/v1/messages"
        expected = (405, "invalid_request_error") if is_known else (404, "not_found_error")
        assert_anthropic_error(get(tight, path, "Host: localhost"), *expected)

    def test_malformed_and_large_heads(self, tight: Running, path: str) -> None:
        first = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n".encode()
        assert_anthropic_error(raw(tight, first + b"broken\r\n\r\n", PATIENCE), 400, "invalid_request_error")
        long = first + b"X: " + b"a" * 1000
        with connect(tight) as sock:
            sock.sendall(long)
            # Time for the server to parse the start before the rest arrives. It has nothing to answer yet.
            sock.settimeout(0.3)
            with pytest.raises(TimeoutError):
                sock.recv(1)
            sock.settimeout(PATIENCE)
            sock.sendall(b"a" * HEADER_BYTES)
            assert_anthropic_error(read(sock, PATIENCE), 431, "invalid_request_error")


def test_malformed_chunks_for_messages_get_an_anthropic_error(tight: Running) -> None:
    data = head("/v1/messages", b"Host: localhost", b"Transfer-Encoding: chunked") + b"zz\r\n"
    assert_anthropic_error(raw(tight, data, PATIENCE), 400, "invalid_request_error")


@pytest.mark.parametrize("status", ["429 Too Many", "503 Busy", "400 Bad"])
@pytest.mark.parametrize("seconds", ["1e300", "99999999999999999999", "Fri, 31 Dec 9999 23:59:59 GMT"])
def test_retry_after_of_an_upstream_is_bounded(tmp_path: Path, status: str, seconds: str) -> None:
    with BadServer() as behind:
        config = {
            "models": {
                "far": {"engine": "upstream", "url": behind.url, "protocol": "chat", "model": "m", "health_seconds": 0}
            }
        }
        with serving(tmp_path, config) as running, talking(running) as client:
            behind.play(refusing(status, retry_after=seconds))
            response = ask(client, CHAT, messages=HELLO, model="far")
            assert response.status_code == int(status[:3])
            assert float(response.headers.get("retry-after", "0")) <= 3600
