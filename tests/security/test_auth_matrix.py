"""Every route, method, spelling of a path and kind of credential, compared with the rules in `rules`."""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest
from tools.websocket import CLOSE, frame

from dragoman.server.routes import PATHS, PREFIX_PATHS
from tests.security.conftest import Guarded
from tests.security.credentials import (
    STATIC,
    USUAL,
    Credential,
    bearer,
    invalid_credentials,
    valid_credentials,
)
from tests.security.http_client import Answer, PipelinedClient, Request
from tests.security.rules import RULES, RULES_BELOW, SAMPLES, allowed_statuses, decoded_path
from tests.support.raw_http import raw
from tests.support.server_process import Running, Serving
from tests.support.websocket import handshake

METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "PROPFIND")
OWN_METHODS = ("GET", "POST", "DELETE")
"""Methods of at least one route."""
CONNECTIONS = 4
SHOWN = 20
"""Number of mistakes that a failing test prints."""
OPENAI_ERROR = {"message", "type", "param", "code"}


BEFORE = [
    *(b"/", b"//localhost", b"/.", b"/x/..", b"/health/..", b"/v1/models/../..", b"/%2e%2e", b"/health/%2e%2e"),
    *(b"http://localhost", b"http://127.0.0.1:1", b"http://localhost/health/.."),
]
AFTER = [
    *(b"/", b"X", b";admin=1", b";/health", b"%00", b"%20", b"%0d%0aX-Evil:%201", b".json"),
    *(b"?", b"?path=/health&x=../../health", b"?/../../health", b"#/health", b"/" + b"a" * 6000, b"?" + b"a" * 6000),
]


def spellings(path: str) -> Iterable[bytes]:
    """Other ways to write a path: some are equivalent, some only a careless server treats as equivalent."""
    plain = path.encode()
    first, _, rest = plain.removeprefix(b"/").partition(b"/")
    yield from (before + plain for before in BEFORE)
    yield from (plain + after for after in AFTER)
    yield from (b"/" + first + slash + rest for slash in (b"//", b"%2F", b"%252F", b"\\"))
    yield from (start + plain[1:] for start in (b"/./", b"/health%2f..%2f"))
    yield from (plain.upper(), plain[:-1], plain + b"/" + plain.rpartition(b"/")[2])
    yield b"/" + b"".join(b"%%%02x" % byte for byte in plain[1:])


MALFORMED = [
    b"GET v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET * HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET http:/v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"CONNECT /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"get /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization : Bearer %b\r\n\r\n" % STATIC.encode(),
    b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nx: y\r\n Authorization: Bearer %b\r\n\r\n" % STATIC.encode(),
    b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nx-api-key\x00: %b\r\n\r\n" % STATIC.encode(),
    b"GET /v1/models\r\nAuthorization: Bearer %b\r\n\r\n" % STATIC.encode(),
]
"""Heads that no route may answer, with or without a key in them."""

Case = tuple[Request, Credential]


def case(method: str, target: bytes, credential: Credential) -> Case:
    if credential.query:
        before, _, after = target.partition(b"#")
        target = before + (b"&" if b"?" in before else b"?") + credential.query + (b"#" + after if after else b"")
    return Request(method, target, credential.headers, b"{}" if method == "POST" else b""), credential


def send_all(running: Running, requests: Sequence[Request]) -> list[Answer]:
    """Send over a few connections at once; the answers are in the order of the requests."""
    step = -(-len(requests) // CONNECTIONS)
    parts = [requests[start : start + step] for start in range(0, len(requests), step)]

    def send_part(part: Sequence[Request]) -> list[Answer]:
        with PipelinedClient(running.port) as client:
            return client.send_all(part)

    with ThreadPoolExecutor(CONNECTIONS) as pool:
        return [answer for answers in pool.map(send_part, parts) for answer in answers]


def mistakes(running: Running, cases: Sequence[Case]) -> list[str]:
    """The wrong answers, one line each."""
    answers = send_all(running, [request for request, _ in cases])
    return [
        f"{request.method} {request.target[:80]!r} with {credential.name}: {wrong}"
        for (request, credential), answer in zip(cases, answers, strict=True)
        if (wrong := mistake(request, credential, answer))
    ]


def mistake(request: Request, credential: Credential, answer: Answer) -> str:
    path = decoded_path(request.target)
    allowed = allowed_statuses(request.method, path, credential)
    if answer.status not in allowed:
        return f"{answer.status}, expected {sorted(allowed)}; {answer.body[:200]!r}"
    if credential.secret and credential.secret in answer.head + answer.body:
        return "the answer contains the secret"
    if answer.status >= 400 and request.method != "HEAD":
        return wrong_format(path, answer)
    return ""


def wrong_format(path: str, answer: Answer) -> str:
    body = answer.json()
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        is_right = set(body) == {"type", "error", "request_id"} and set(body["error"]) == {"type", "message"}
    else:
        is_right = set(body) == {"error"} and set(body["error"]) == OPENAI_ERROR
    return "" if is_right else f"not the protocol's error: {answer.body[:200]!r}"


def test_every_route_has_a_rule() -> None:
    assert set(PATHS) == set(RULES)
    assert set(PREFIX_PATHS) == set(RULES_BELOW)
    for path, methods in (PATHS | PREFIX_PATHS).items():
        rule = RULES[path] if path in RULES else RULES_BELOW[path][1]
        assert set(methods) == set(rule.answers), path


def test_every_route_method_and_credential(guarded: Guarded) -> None:
    credentials = valid_credentials(guarded.authority) + invalid_credentials(guarded.authority)
    cases = [case(method, path.encode(), who) for path, method, who in product(SAMPLES, METHODS, credentials)]
    assert not mistakes(guarded.running, cases)[:SHOWN]


def test_unusual_path_spellings_grant_no_access(guarded: Guarded) -> None:
    credentials = [
        Credential("none"),
        bearer("wrong", "sk-wrong"),
        bearer("stored", guarded.authority.stored("usual"), USUAL),
        bearer("stored for rerank", guarded.authority.stored("reranker", "rerank"), frozenset({"rerank", "models"})),
    ]
    targets = [target for path in SAMPLES if path != "/" for target in spellings(path)]
    cases = [case(method, target, who) for target, method, who in product(targets, OWN_METHODS, credentials)]
    assert not mistakes(guarded.running, cases)[:SHOWN]


@pytest.mark.parametrize("head", MALFORMED)
def test_malformed_heads_are_refused(guarded: Guarded, head: bytes) -> None:
    answer = raw(guarded.running, head, quiet=0)
    assert answer.status in (400, 401), answer
    assert STATIC.encode() not in answer.head + answer.body


def test_ready_names_models_only_to_callers_who_may_list_them(guarded: Guarded) -> None:
    narrow = guarded.authority.stored("narrow", models=("echo",))
    expected = [
        (Credential("none"), set()),
        (bearer("wrong", "sk-wrong"), set()),
        (bearer("for echo", narrow), {"echo"}),
        (bearer("static", STATIC), {"echo", "other"}),
    ]
    with PipelinedClient(guarded.running.port) as client:
        for credential, names in expected:
            answer = client.send(Request("GET", b"/ready", credential.headers))
            assert answer.status == 200
            assert set(answer.json()["models"]) == names, credential.name


def test_anonymous_callers_never_reach_operator_routes(tmp_path: Path, serving: Serving) -> None:
    keys = {"anonymous": True, "store": "keys.db"}
    config = {"models": {"echo": {"engine": "scripted"}}, "api_keys": [STATIC], "keys": keys}
    anonymous = [
        Credential("none", scopes=USUAL),
        bearer("wrong", "sk-wrong", USUAL),
        bearer("static", STATIC, frozenset({*USUAL, "stats", "admin"})),
    ]
    targets = [*(path.encode() for path in SAMPLES), b"/admin", b"/admin/", b"/admin//models", b"/%61dmin/models"]
    with serving(tmp_path, config) as running:
        cases = [case(method, target, who) for target, method, who in product(targets, METHODS, anonymous)]
        assert not mistakes(running, cases)[:SHOWN]


def test_websocket_of_every_path_and_credential(guarded: Guarded) -> None:
    """Only the WebSocket of `/v1/responses` opens, and only with its scope."""
    credentials = valid_credentials(guarded.authority) + invalid_credentials(guarded.authority)
    for path, credential in product([*SAMPLES, "/v1/elsewhere"], credentials):
        headers = [name.encode() + b": " + value for name, value in credential.headers]
        target = path + (f"?{credential.query.decode()}" if credential.query else "")
        answer = raw(guarded.running, handshake(target, *headers) + frame(CLOSE), quiet=0)
        expected = allowed_statuses("GET", path, credential)
        if not expected & {401, 403, 404}:
            expected = {101} if path == "/v1/responses" else {426}
        elif path in SAMPLES and 404 in expected:
            expected = {426}
        assert answer.status in expected, (path, credential.name, answer)
        assert not (credential.secret and credential.secret in answer.head + answer.body)
