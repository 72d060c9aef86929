"""Target `requests`: structure-aware JSON over every route and protocol.

body      recorded from a real client, or made by a grammar (bodies); left as it is, mutated, or damaged
envelope  the method, path, key, content type, compression and headers around it; at most one of them is odd
session   a response is created, read, continued and deleted, also with another tenant's key
forms     files are uploaded, read and deleted (forms)
batches   batches are created, read, cancelled and deleted (batches)
"""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from tools.fuzz import batches, bodies, forms, values
from tools.fuzz.cases import ANY, BUSY, LAST_ID, OK, HttpCase, Request, random_for
from tools.fuzz.compression import compressed
from tools.fuzz.servers import BODY_BYTES, HEADER_BYTES, KEYS, PROFILES, Profile

CORPUS = Path(__file__).parent / "corpus" / "requests.jsonl"
JSON = ("content-type", "application/json")
BEARER = ("authorization", f"Bearer {KEYS[0]}")
VERSION = ("anthropic-version", "2023-06-01")
SCOPED_KEY, LIMITED_KEY = "@scoped-key@", "@limited-key@"
"""Replaced by the runner: keys of the store are made anew for every server."""
WITHOUT_TEXT = "harmony"
"""A model that only calls a tool, so that it cannot summarise a conversation: 500."""
COMPACTING = re.compile(rb'"(context_management|compaction|compaction_trigger)"')
Headers = tuple[tuple[str, str], ...]

ROUTES: tuple[tuple[str, Callable[[Random], dict[str, Any]], int], ...] = (
    ("/v1/chat/completions", bodies.chat, 34),
    ("/v1/messages", bodies.message, 22),
    ("/v1/responses", bodies.response, 18),
    ("/v1/completions", bodies.completion, 8),
    ("/v1/embeddings", bodies.embedding, 4),
    ("/v1/rerank", bodies.rerank, 2),
    ("/v1/messages/count_tokens", bodies.message, 3),
    ("/v1/responses/input_tokens", bodies.response, 2),
    ("/v1/responses/compact", bodies.response, 3),
    ("/v1/chat/completions/render", bodies.chat, 2),
    ("/v1/chat/completions/input_tokens", bodies.chat, 2),
    ("/tokenize", bodies.tokens, 2),
    ("/detokenize", bodies.token_ids, 2),
)
UNSUPPORTED = frozenset({"/tokenize", "/detokenize", "/v1/chat/completions/render"})
"""The scripted engine has no tokens of its own and no template: 501."""
STREAMED = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"})
VECTORS = frozenset({"/v1/embeddings", "/v1/rerank"})
GETS = (
    *(
        "/",
        "/health",
        "/ping",
        "/version",
        "/ready",
        "/v1/models",
        "/v1/models/echo",
        "/v1/models/org%2Fnested",
        "/v1/models/org/nested",
    ),
    *(
        "/metrics",
        "/stats",
        "/admin/models",
        "/admin/upstreams",
        "/admin/usage",
        "/admin/usage?since=7d&by=day,key,model",
        "/v1/organization/usage/completions?start_time=1&group_by=model&limit=2",
        "/v1/models?limit=1",
        "/v1/models?limit=0&after_id=echo",
    ),
)
CONVERSATIONS = "/v1/conversations"
ODD_PATHS = (
    *("/v1/models/%00", "/v1//models", "/../etc/passwd", "/v1/models/../../x", "/v1/chat/completions/", "/%ff", "/%"),
    *(
        "/v1/models/" + "a" * 4000,
        "/v1/models/%e2%98%83",
        "/v1/responses/x",
        "/v1/responses/x/input_items",
        "/v1/conversations/x",
        "/v1/conversations/%00/items?limit=1000",
        "/favicon.ico",
    ),
    *("/v1/files", "/v1/files/x", "/v1/files/x/content", "/v1/files/%00", "/v1/files?after=%ff&limit=3", "/v1/files/"),
    *("/v1/batches", "/v1/batches/x", "/v1/batches/%00", "/v1/batches?after=%ff", "/v1/batches/batch_0/cancel"),
    *("/v1/messages/batches", "/v1/messages/batches/x/results", "/v1/messages/batches?before_id=%00"),
    *("/admin/usage?since=x", "/admin/usage?by=x", "/v1/organization/usage/completions?start_time=-1&page=x"),
    *("/v1/responses/%2e%2e/input_items?limit=1000", "/v1/responses/x?stream=true", "/v1/models?limit=-1", "/v1", "//"),
    *(
        "/v1/models?after_id=%00&before_id=",
        "/admin/models/",
        "/v1/models/",
        "/v1/models/a%0d%0aX:%20y",
        "/v1/models?=&&",
    ),
)
ODD_TYPES = (
    "text/plain",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
    "application/jsonx",
    ",",
)


class Recorded(msgspec.Struct, frozen=True):
    path: str
    headers: dict[str, str]
    body: msgspec.Raw


@functools.cache
def recorded() -> tuple[Recorded, ...]:
    return tuple(msgspec.json.decode(line, type=Recorded) for line in CORPUS.read_bytes().splitlines())


def case(engine: str, seed: str, number: int) -> HttpCase:
    random = random_for("requests", seed, number)
    profile = PROFILES[engine]
    kind = random.random()
    if kind < 0.84:
        return HttpCase((_post(random, profile),))
    if kind < 0.88:
        return HttpCase(tuple(forms.session(random)))
    if kind < 0.92:
        return HttpCase(
            tuple(random.choice((_session, _session, _conversation, _background, batches.session))(random, profile))
        )
    if kind < 0.97:
        return HttpCase((_get(random),))
    return HttpCase((_operator(random, profile) if kind > 0.999 else _odd_method(random),))


def _post(random: Random, profile: Profile) -> Request:
    if random.random() < 0.25:
        found = random.choice(recorded())
        path, body, headers = found.path, msgspec.json.decode(found.body), tuple(found.headers.items())
        expect, is_known = ANY, False
    else:
        path, make, _ = random.choices(ROUTES, [weight for _, _, weight in ROUTES])[0]
        # A copy of its own: the parts of a body are shared, and it may be mutated.
        body, headers = values.copied(make(random)), (VERSION,) if path.startswith("/v1/messages") else ()
        expect, is_known = OK, profile.name == "scripted"
    model = profile.model(random)
    if model:
        body["model"] = model
    times = 0 if random.random() < 0.3 else random.choice((1, 1, 1, 2, 3, 6))
    values.mutate(random, body, times)
    leaves = _bound(random, body, profile)
    data = values.encoded(body)
    if times or not is_known:
        expect = ANY
        if random.random() < 0.08:
            data = values.damage(random, data)
    elif model == "missing":
        expect = frozenset({404})
    elif model == "short" or path in VECTORS:
        expect = OK | {400}
    if path.partition("?")[0] in UNSUPPORTED and profile.name == "scripted":
        expect = expect - OK | {501}
    made = Request("POST", path, data, (JSON, BEARER, *headers), _with_faults(expect, model, profile))
    fails = model in profile.failing
    if model == WITHOUT_TEXT and COMPACTING.search(data if path != "/v1/responses/compact" else b'"compaction"'):
        made, fails = msgspec.structs.replace(made, expect=made.expect | {500}), True
    made = msgspec.structs.replace(
        made,
        fault=fails,
        stream=expect == OK and path in STREAMED and body.get("stream") is True,
        leave_after=leaves,
    )
    if random.random() < 0.04:
        return compressed(random, made)
    return _odd(random, made) if random.random() < 0.12 else made


def _with_faults(expect: frozenset[int], model: str, profile: Profile) -> frozenset[int]:
    if model in profile.failing:
        return expect | {500}
    return expect | BUSY if model in profile.full else expect


TOKEN_FIELDS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


def _bound(random: Random, body: Any, profile: Profile) -> int | None:
    """Keep a real model from long replies. Where the request asks for one, the client leaves early."""
    leaves = random.choice((0, 1, 100, 400)) if random.random() < 0.03 else None
    if profile.most_tokens is None or not isinstance(body, dict):
        return leaves
    for name in TOKEN_FIELDS:
        asked = body.get(name)
        if isinstance(asked, int | float) and asked > profile.most_tokens:
            if random.random() < 0.02:
                return 0
            body[name] = profile.most_tokens
    return leaves


def _replaced(headers: Headers, **others: str | None) -> Headers:
    """Headers with some of them changed; None removes one. `_` in a name stands for `-`."""
    changes = {name.replace("_", "-"): value for name, value in others.items()}
    kept = tuple(header for header in headers if header[0] not in changes)
    return (*kept, *((name, value) for name, value in changes.items() if value is not None))


def _odd(random: Random, request: Request) -> Request:
    """One oddity in the envelope, with the statuses that it leads to."""
    headers, expect, body = request.headers, request.expect, request.body
    kind = random.randrange(13)
    if kind == 0:
        headers, expect = (
            _replaced(
                headers, authorization="Bearer " + random.choice((KEYS[0][:-1] + "x", "", "x" * 500, "' OR 1=1"))
            ),
            frozenset({401}),
        )
    elif kind == 1:
        headers, expect = _replaced(headers, authorization=None), frozenset({401})
    elif kind == 2:
        headers, expect = (*headers, ("x-api-key", KEYS[1])), frozenset({401})
    elif kind == 3:
        headers = _replaced(headers, authorization=None, x_api_key=KEYS[1])
    elif kind == 4:
        headers, expect = _replaced(headers, content_type=random.choice(ODD_TYPES)), frozenset({415})
    elif kind == 5:
        headers, expect = (
            (*headers, ("host", random.choice(("evil.example", "a b", "", "127.0.0.1@x", "[::1")))),
            frozenset({400}),
        )
    elif kind == 6:
        body, expect = body + b" " * (BODY_BYTES + 1 - len(body)), frozenset({413})
    elif kind == 7:
        headers, expect = (*headers, ("x-dragoman-strict", "true")), expect | {400}
    elif kind == 8:
        headers, expect = (
            (*headers, ("x-dragoman-timeout", random.choice(("0", "-1", "nan", "inf", "x", "")))),
            frozenset({400}),
        )
    elif kind == 9:
        headers = (
            *headers,
            *((f"x-{at}", random.choice(("", "a", "\xff\xfe", "a" * 500))) for at in range(random.choice((1, 20)))),
        )
    elif kind == 10:
        headers, expect = (*headers, ("x-large", "a" * (HEADER_BYTES + 1))), frozenset({431})
    elif kind == 11:
        headers, expect = _replaced(headers, authorization=f"Bearer {SCOPED_KEY}"), expect | {403}
    else:
        headers, expect = _replaced(headers, authorization=f"Bearer {LIMITED_KEY}"), expect | {429}
    kept_stream = request.stream and expect == OK
    return msgspec.structs.replace(request, headers=headers, expect=expect, body=body, stream=kept_stream)


def _get(random: Random) -> Request:
    headers = (BEARER, VERSION) if random.random() < 0.3 else (BEARER,)
    method = random.choice(("GET", "GET", "GET", "HEAD"))
    if random.random() < 0.5:
        path = random.choice(GETS)
        expect = OK | ({400, 404} if "?" in path or "models/" in path else set())
        return Request(method, path, b"", headers, expect)
    path = random.choice(ODD_PATHS)
    if random.random() < 0.3:
        path = "/v1/models/" + "".join(f"%{random.randrange(256):02x}" for _ in range(random.randint(1, 20)))
    return Request(method, path, b"", headers, frozenset({200, 400, 404, 405, 501}))


def _odd_method(random: Random) -> Request:
    path = random.choice([path for path, _, _ in ROUTES] + list(GETS[:-2]))
    method = random.choice(("PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "GET", "POST"))
    known = {"GET"} if path in GETS else {"POST"}
    if method in known:
        method = "PUT"
    if method == "OPTIONS" and random.random() < 0.5:
        origin = (("origin", "https://app.example"), ("access-control-request-method", "POST"))
        return Request(method, path, b"", origin, frozenset({401}))
    body = b"{}" if method != "GET" and random.random() < 0.5 else b""
    expect = {404, 405} if "/v1/models/" in path or "/v1/responses/" in path or "/v1/conversations/" in path else {405}
    return Request(method, path, body, (BEARER, JSON), frozenset(expect))


def _operator(random: Random, profile: Profile) -> Request:
    if profile.name != "scripted":
        return Request("GET", "/admin/models", b"", (BEARER,))
    path = random.choice(
        ("/admin/models/spare/load", "/admin/models/spare/unload", "/admin/models/x/load", "/admin/reload")
    )
    body = random.choice((b"", b"{}", b"[]", b"{"))
    # A load that meets an unload or a reload is a documented 503.
    return Request("POST", path, body, (BEARER, JSON), frozenset({200, 202, 400, 404, 503}))


def _session(random: Random, profile: Profile) -> list[Request]:
    """A stored response. `LAST_ID` is replaced by the id of the reply before."""
    body = {"input": bodies.words(random), "max_output_tokens": 16, "store": True}
    model = "poet" if profile.name == "scripted" else "smollm2"
    tokens = {"max_output_tokens": profile.most_tokens or 16}
    first = values.encoded(body | tokens | {"model": model})
    by_id = "/v1/responses/" + LAST_ID.decode()
    made = [Request("POST", "/v1/responses", first, (JSON, BEARER))]
    other = _replaced((BEARER,), authorization=f"Bearer {KEYS[1]}")
    limits = ("", "?limit=1", "?order=asc", "?limit=0", "?after=x", "?limit=x")
    following = values.encoded({"input": "more", "model": model, **tokens, "previous_response_id": LAST_ID.decode()})
    for _ in range(random.randint(1, 4)):
        kind = random.randrange(6)
        if kind == 0:
            made.append(Request("GET", by_id, b"", (BEARER,)))
        elif kind == 1:
            # The id is that of another tenant.
            made.append(Request(random.choice(("GET", "DELETE")), by_id, b"", other, frozenset({404})))
        elif kind == 2:
            made.append(Request("GET", by_id + "/input_items" + random.choice(limits), b"", (BEARER,), OK | {400, 404}))
        elif kind == 3:
            made.append(Request("POST", "/v1/responses", following, (JSON, BEARER)))
        elif kind == 4:
            made.append(Request("POST", by_id + "/cancel", b"", (BEARER,), frozenset({400})))
        else:
            made.append(Request("DELETE", by_id, b"", (BEARER,)))
            made.append(Request("GET", by_id, b"", (BEARER,), frozenset({404})))
            return made
    return made


def _conversation(random: Random, profile: Profile) -> list[Request]:
    """A conversation, which responses of two tenants try to continue."""
    items = [{"role": "user", "content": bodies.words(random)} for _ in range(random.randint(0, 3))]
    made = [Request("POST", CONVERSATIONS, values.encoded({"items": items}), (JSON, BEARER))]
    by_id = f"{CONVERSATIONS}/{LAST_ID.decode()}"
    other = _replaced((BEARER,), authorization=f"Bearer {KEYS[1]}")
    limits = ("", "?limit=1", "?order=asc", "?limit=0", "?after=x")
    kind = random.randrange(5)
    if kind == 0:
        made.append(Request("GET", by_id, b"", (BEARER,)))
    elif kind == 1:
        made.append(Request(random.choice(("GET", "DELETE")), by_id, b"", other, frozenset({404})))
    elif kind == 2:
        made.append(Request("GET", f"{by_id}/items{random.choice(limits)}", b"", (BEARER,), OK | {400, 404}))
    elif kind == 3:
        added = random.choice(({"items": items}, {"items": 5}, {}, {"items": [{"role": "bob"}]}))
        made.append(Request("POST", f"{by_id}/items", values.encoded(added), (JSON, BEARER), OK | {400}))
    else:
        model = "poet" if profile.name == "scripted" else "smollm2"
        body = {"input": "more", "model": model, "max_output_tokens": 16, "conversation": LAST_ID.decode()}
        sender, expect = random.choice(((BEARER, OK), (other[0], frozenset({404}))))
        made.append(Request("POST", "/v1/responses", values.encoded(body), (JSON, sender), expect))
    return made


def _background(random: Random, profile: Profile) -> list[Request]:
    """A background response, which is read, streamed, cancelled or deleted while it runs."""
    model = "poet" if profile.name == "scripted" else "smollm2"
    body = {"input": bodies.words(random), "max_output_tokens": 16, "model": model, "background": True}
    by_id = "/v1/responses/" + LAST_ID.decode()
    other = _replaced((BEARER,), authorization=f"Bearer {KEYS[1]}")
    following = (
        Request("GET", by_id, b"", (BEARER,)),
        Request("POST", f"{by_id}/cancel", b"", (BEARER,)),
        Request("DELETE", by_id, b"", (BEARER,)),
        Request("GET", f"{by_id}?stream=true", b"", (BEARER,)),
        Request("GET", f"{by_id}?stream=true&starting_after=-1", b"", (BEARER,), frozenset({400})),
        Request("GET", f"{by_id}?stream=true", b"", other, frozenset({404})),
        Request("POST", f"{by_id}/cancel", b"", other, frozenset({404})),
    )
    return [Request("POST", "/v1/responses", values.encoded(body), (JSON, BEARER)), random.choice(following)]
