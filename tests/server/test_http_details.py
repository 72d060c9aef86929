"""What proxies, old clients and pages of other origins depend on: details of HTTP/1.1, forwarded addresses, CORS."""

import itertools
import json
from pathlib import Path

import httpx
import pytest

from dragoman.core.errors import ConfigError
from dragoman.server.http.headers import TrustedProxies
from tests.support.bad_server import BadServer
from tests.support.bad_server import refused as refusing
from tests.support.raw_http import Answer, connect, head, raw, read, request_bytes
from tests.support.requests import CHAT, HELLO, PATIENCE, SMALLEST, ask, frames, recorded, refused, talking, text_of
from tests.support.server_process import Running, Serving, server_fixture

PAGE = "https://app.example"
KEY = "Authorization: Bearer sk-one"
STREAM = {"messages": HELLO, "model": "slow", "stream": True}
BODY = b'{"messages": [{"role": "user", "content": "hello"}]}'


proxied = server_fixture(
    {
        "models": {"echo": {"engine": "scripted"}, "slow": {"engine": "scripted", "tokens_per_second": 50}},
        "api_keys": ["sk-one", "sk-two"],
        "proxies": ["127.0.0.1"],
        "cors": {"origins": [PAGE]},
    }
)
"""A server with a local trusted proxy, keys, and an allowed origin."""


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
        assert get(proxied, "/v1/models", "Host: localhost", KEY, KEY).status == 200

    def test_different_types_of_a_body(self, proxied: Running) -> None:
        lines = ("Authorization: Bearer sk-one", "Content-Type: text/plain", "Connection: close")
        refused(raw(proxied, request_bytes(CHAT, SMALLEST[CHAT], *lines), PATIENCE).response, 400)

    @pytest.mark.parametrize(
        ("lines", "client"),
        [
            (("198.51.100.7, 203.0.113.9", "127.0.0.1, 127.0.0.1"), "203.0.113.9"),
            (("198.51.100.7", "nonsense", "127.0.0.1"), "127.0.0.1"),
        ],
    )
    def test_all_forwarded_addresses_are_read_in_order(
        self, proxied: Running, lines: tuple[str, ...], client: str
    ) -> None:
        forwarded = [f"X-Forwarded-For: {line}" for line in lines]
        answer = get(proxied, "/v1/models", "Host: localhost", KEY, *forwarded)
        [record] = recorded(proxied, id=answer.response.headers["x-request-id"])
        assert record["client"] == client

    def test_scheme_comes_from_the_nearest_proxy(self, proxied: Running) -> None:
        lines = ("X-Forwarded-Proto: http", "X-Forwarded-Proto: https")
        answer = get(proxied, "/v1/models", "Host: localhost", KEY, *lines)
        [record] = recorded(proxied, id=answer.response.headers["x-request-id"])
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


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        ("203.0.113.9", "198.51.100.7", "203.0.113.9"),
        ("127.0.0.1", "198.51.100.7", "198.51.100.7"),
        ("127.0.0.1", "1.1.1.1, 198.51.100.7", "198.51.100.7"),
        ("127.0.0.1", "1.1.1.1, 198.51.100.7, 10.1.2.3", "198.51.100.7"),
        ("127.0.0.1", "10.0.0.1, 10.0.0.2", "10.0.0.1"),
        ("127.0.0.1", "198.51.100.7:5555", "198.51.100.7"),
        ("127.0.0.1", "[2001:db8::1]:5555", "2001:db8::1"),
        ("127.0.0.1", "2001:db8::1", "2001:db8::1"),
        ("127.0.0.1", "nonsense", "127.0.0.1"),
        ("127.0.0.1", "198.51.100.7, nonsense", "127.0.0.1"),
        ("127.0.0.1", "", "127.0.0.1"),
        (None, "198.51.100.7", None),
    ],
)
def test_forwarded_addresses(peer: str | None, forwarded: str, client: str | None) -> None:
    proxies = TrustedProxies(["127.0.0.1", "10.0.0.0/8"])
    assert proxies.client(peer, {b"x-forwarded-for": forwarded.encode()}) == client


def test_forwarded_schemes_and_mistakes() -> None:
    proxies = TrustedProxies(["127.0.0.1"])
    headers = {b"x-forwarded-proto": b"https"}
    assert proxies.scheme("127.0.0.1", headers) == "https"
    assert proxies.scheme("203.0.113.9", headers) is None
    assert proxies.scheme("127.0.0.1", {b"x-forwarded-proto": b"gopher"}) is None
    with pytest.raises(ConfigError, match="expected an address"):
        TrustedProxies(["proxy.example"])


def preflight(client: httpx.Client, path: str, origin: str, **headers: str) -> httpx.Response:
    asked = {"origin": origin, "access-control-request-method": "POST", **headers}
    return client.request("OPTIONS", path, headers=asked)


def test_preflight(proxied: Running) -> None:
    with talking(proxied) as client:
        wanted = {"access-control-request-headers": "authorization, content-type,x-stainless-os"}
        allowed = preflight(client, CHAT, PAGE, **wanted)
        assert allowed.status_code == 204
        assert allowed.headers["access-control-allow-origin"] == PAGE
        assert allowed.headers["access-control-allow-methods"] == "POST"
        assert allowed.headers["access-control-allow-headers"] == "authorization, content-type,x-stainless-os"
        assert allowed.headers["access-control-max-age"] == "600"
        assert "access-control-allow-credentials" not in allowed.headers
        both = preflight(client, "/v1/responses", PAGE)
        assert both.headers["access-control-allow-methods"] == "POST, GET, HEAD"
        for path, origin in ((CHAT, "https://evil.example"), (CHAT, "null"), ("/v1/nothing", PAGE)):
            denied = preflight(client, path, origin)
            assert denied.status_code in (401, 404, 405)
            if origin != PAGE:
                assert "access-control-allow-origin" not in denied.headers
        odd = preflight(client, CHAT, PAGE, **{"access-control-request-headers": "a b;c"})
        assert "access-control-allow-headers" not in odd.headers


def test_replies_to_a_page(proxied: Running) -> None:
    with talking(proxied, {"origin": PAGE, "authorization": "Bearer sk-one"}) as client:
        whole = ask(client, CHAT)
        assert text_of(whole) == "hello"
        with client.stream("POST", CHAT, json=STREAM) as stream:
            assert stream.read().endswith(b"data: [DONE]\n\n")
        wrong = ask(client, CHAT, model="nothing")
        stranger = client.get("/v1/models", headers={"authorization": "Bearer sk-three"})
        assert stranger.status_code == 401
        for reply in (whole, stream, wrong, stranger):
            assert reply.headers["access-control-allow-origin"] == PAGE
            assert reply.headers["vary"] == "origin"
            assert "x-request-id" in reply.headers["access-control-expose-headers"]
        other = ask(client, CHAT, model="echo")
        assert other.status_code == 200
        text = client.post(CHAT, content=json.dumps({"messages": HELLO}), headers={"content-type": "text/plain"})
        assert text.status_code == 415
    with talking(proxied, {"origin": "https://evil.example", "authorization": "Bearer sk-one"}) as client:
        assert "access-control-allow-origin" not in ask(client, CHAT).headers


def test_no_cors_by_default(scripted: Running) -> None:
    with talking(scripted) as client:
        refused(preflight(client, CHAT, PAGE), 405)
        assert "access-control-allow-origin" not in client.get("/v1/models", headers={"origin": PAGE}).headers


STATUSES = ["429 Too Many", "503 Busy", "400 Bad"]
RETRIES = ["1e300", "99999999999999999999", "Fri, 31 Dec 9999 23:59:59 GMT"]


def test_retry_after_of_an_upstream_is_bounded(tmp_path: Path, serving: Serving) -> None:
    cases = {f"m{at}": case for at, case in enumerate(itertools.product(STATUSES, RETRIES))}
    with BadServer() as behind:
        # An upstream that fails is not used for a while: each case has its own.
        upstream = {"engine": "upstream", "url": behind.url, "protocol": "chat", "health_seconds": 0}
        config = {"models": {name: upstream | {"model": name} for name in cases}}
        with serving(tmp_path, config) as running, talking(running) as client:
            for name, (status, seconds) in cases.items():
                behind.play(refusing(status, retry_after=seconds))
                response = ask(client, CHAT, model=name)
                assert response.status_code == int(status[:3])
                assert float(response.headers.get("retry-after", "0")) <= 3600
