"""Batches of both APIs: their inputs, with odd and damaged lines, and what callers do with a batch while it runs."""

from collections.abc import Callable
from random import Random
from typing import Any

from tools.fuzz import bodies, forms, values
from tools.fuzz.cases import LAST_ID, OK, Request
from tools.fuzz.servers import KEYS, Profile

BATCHES, MESSAGE_BATCHES = "/v1/batches", "/v1/messages/batches"
JSON = ("content-type", "application/json")
BEARER = ("authorization", f"Bearer {KEYS[0]}")
OTHER = ("authorization", f"Bearer {KEYS[1]}")
VERSION = ("anthropic-version", "2023-06-01")
Body = dict[str, Any]
ENDPOINTS: dict[str, Callable[[Random], Body]] = {
    "/v1/chat/completions": bodies.chat,
    "/v1/completions": bodies.completion,
    "/v1/responses": bodies.response,
    "/v1/embeddings": bodies.embedding,
}
URLS = ("/v1/files", "http://127.0.0.1:1/v1/chat/completions", "//example.com", "", "/admin/reload", "/v1/batches", 5)
NAMES = ("", "a", "x" * 512, "x" * 600, "\0", "\x1b[31m\n", "\u2603", None, 7)
DAMAGED = (
    b"",
    b"{}",
    b"null",
    b"[" * 3000,
    b'{"a":' * 3000,
    b"\xff\xfe",
    b"\0",
    b'{"custom_id":"\\ud800"}',
    b" " * 300,
)
QUERIES = ("", "?limit=1", "?limit=0", "?limit=x", "?after=x", "?after=%00", "?after_id=%ff", "?before_id=x")
REFUSED = frozenset({400, 413})


def session(random: Random, profile: Profile) -> list[Request]:
    """A batch, and requests about it, also with another tenant's key. A batch may have ended when it is cancelled."""
    is_openai = random.random() < 0.6
    made = _openai(random, profile) if is_openai else [_anthropic(random, profile)]
    if made[-1].expect != OK:
        return made
    path, headers = (BATCHES, (BEARER,)) if is_openai else (MESSAGE_BATCHES, (BEARER, VERSION))
    by_id, other = f"{path}/{LAST_ID.decode()}", (OTHER, *headers[1:])
    for _ in range(random.randint(1, 3)):
        kind = random.randrange(7)
        if kind == 0:
            made.append(Request(random.choice(("GET", "HEAD")), by_id, b"", headers))
        elif kind == 1:
            made.append(Request(*random.choice((("GET", by_id), ("POST", f"{by_id}/cancel"))), b"", other, NOT_FOUND))
        elif kind == 2:
            made.append(Request("GET", path + random.choice(QUERIES), b"", headers, OK | {400}))
        elif kind == 3:
            made.append(Request("POST", f"{by_id}/cancel", b"", headers, OK | {400}))
        elif kind == 4:
            expect = NOT_FOUND if is_openai else OK | NOT_FOUND
            made.append(Request("GET", f"{by_id}/results", b"", headers, expect))
        elif kind == 5:
            odd = random.choice(("/x", "/cancel/", "%00", "/results/x"))
            made.append(Request("GET", by_id + odd, b"", headers, frozenset({404, 405})))
        else:
            made.append(Request("DELETE", by_id, b"", headers, frozenset({405}) if is_openai else OK | {400, 404}))
    return made


NOT_FOUND = frozenset({404})


def _model(profile: Profile) -> str:
    return "poet" if profile.name == "scripted" else "smollm2"


def _body(random: Random, profile: Profile, make: Callable[[Random], Body]) -> Body:
    body: Body = values.copied(make(random)) | {"model": _model(profile)}
    values.mutate(random, body, random.choice((0, 0, 1, 2)))
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if name in body and profile.most_tokens is not None:
            body[name] = profile.most_tokens
    return body


def _openai(random: Random, profile: Profile) -> list[Request]:
    endpoint = random.choice(list(ENDPOINTS))
    lines = []
    for number in range(random.randint(0, 4)):
        line: Body = {"custom_id": f"line-{number % 3}", "method": "POST", "url": endpoint}
        line["body"] = _body(random, profile, ENDPOINTS[endpoint])
        kind = random.randrange(8)
        if kind == 0:
            line["url"] = random.choice(URLS)
        elif kind == 1:
            line["custom_id"] = random.choice(NAMES)
        elif kind == 2:
            values.mutate(random, line, 2)
        lines.append(random.choice(DAMAGED) if kind == 3 else values.encoded(line))
    upload = forms.upload(random.choice((b"\n", b"\r\n", b"\n\n")).join(lines), b"batch")
    fields: Body = {"input_file_id": LAST_ID.decode(), "endpoint": endpoint, "completion_window": "24h"}
    expect = OK
    if random.random() < 0.4:
        fields["metadata"] = {"a": bodies.words(random)}
        values.mutate(random, fields, 1)
        expect = OK | REFUSED
    made = [upload]
    if random.random() < 0.15:
        made.append(Request("DELETE", f"/v1/files/{LAST_ID.decode()}", b"", (BEARER,)))
        expect = frozenset({400})
    sender = BEARER
    if random.random() < 0.1:
        # The file is that of another tenant.
        sender, expect = OTHER, frozenset({400})
    return [*made, Request("POST", BATCHES, values.encoded(fields), (JSON, sender), expect)]


def _anthropic(random: Random, profile: Profile) -> Request:
    requests: list[Body] = []
    for number in range(random.randint(1, 4)):
        params = _body(random, profile, bodies.message)
        requests.append({"custom_id": f"line-{number}", "params": params})
    body: Body = {"requests": requests}
    data, expect = values.encoded(body), OK | REFUSED
    kind = random.randrange(6)
    if kind == 0:
        requests[0]["custom_id"] = random.choice(NAMES)
        data = values.encoded(body)
    elif kind == 1:
        values.mutate(random, body, 2)
        data = values.encoded(body)
    elif kind == 2:
        data = values.damage(random, data)
    elif kind == 3:
        data = b'{"requests":%b' % random.choice((b"[" * 5000, b"[{}]}", b"[]}", b"[1,{}]}", b'"x"}', b"[{}", b"null}"))
        expect = REFUSED
    return Request("POST", MESSAGE_BATCHES, data, (JSON, BEARER, VERSION), expect)
