"""Judges an answer.

Rules
1. The status is one that the case expects. 500, 502 and 504 are expected only where the case asks for a fault.
2. Every response has `x-request-id`, and `request-id` where it is in Anthropic's words; 503 and 529 have Retry-After,
   405 has Allow, 501 says that a retry is useless.
3. An error is in the words of its family, with a message that is short and shows nothing of the inside.
4. A 200 is what its protocol says (shapes), and a stream begins, proceeds and ends as its protocol says (streams). An
   error frame may end it only if the model fails on purpose, or if a comment started the stream before the request was
   refused: on a busy machine the engine may find the mistake late.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from tools.fuzz.cases import RawCase, Request
from tools.fuzz.client import Reply
from tools.fuzz.shapes import Wrong, check_error, check_reply
from tools.fuzz.streams import check_stream

EVENT_STREAM = b"text/event-stream; charset=utf-8"
COMMENT = b": keep-alive\n\n"
KINDS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/messages": "messages",
    "/v1/responses": "responses",
    "/v1/files": "file",
    "/v1/batches": "batch",
    "/v1/messages/batches": "message_batch",
    "/v1/conversations": "conversation",
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "rerank",
    "/v1/messages/count_tokens": "count",
    "/v1/responses/input_tokens": "count",
    "/v1/responses/compact": "compacted",
    "/v1/chat/completions/render": "render",
    "/v1/chat/completions/input_tokens": "count",
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
}
STREAMS = frozenset({"chat", "completions", "messages", "responses"})
OPENAI_PATHS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/rerank", "/v1/batches"),
    "/v1/organization/",
    "/v1/conversations",
)
SHARED_PATHS = frozenset({"/v1/chat/completions/render", "/v1/chat/completions/input_tokens"})
"""Errors are in the words of the caller's protocol."""


class Judgement(NamedTuple):
    kind: str
    """One word for findings that belong together."""
    text: str


def family_of(path: str, method: str, headers: tuple[tuple[str, str], ...]) -> str | None:
    """Whose words errors are in; None where either will do."""
    bare = path.partition("?")[0]
    if bare.startswith("/v1/messages"):
        return "anthropic"
    if not any(name == "anthropic-version" for name, _ in headers):
        return "openai"
    if bare in SHARED_PATHS or not bare.startswith(OPENAI_PATHS) or method != "POST":
        return None if bare.startswith(OPENAI_PATHS) else "anthropic"
    return "openai"


def judge(request: Request, reply: Reply) -> Judgement | None:
    """None: there is nothing wrong with it."""
    if reply.status not in request.expect:
        expected = ", ".join(map(str, sorted(request.expect)))
        return Judgement(f"status {reply.status}", f"expected {expected}: {reply.body[:300]!r}")
    try:
        _check_headers(request, reply)
        if reply.status >= 300:
            _check_error(request, reply)
        elif reply.status == 200 and request.method != "HEAD":
            _check_success(request, reply)
    except Wrong as error:
        return Judgement("answer", f"{reply.status}: {error}")
    return None


RAW_STATUSES = frozenset({200, 400, 401, 404, 405, 408, 413, 415, 426, 431, 501})
"""What bytes on a connection may get."""


def judge_raw(case: RawCase, replies: Sequence[Reply], rest: bytes) -> Judgement | None:
    """`rest` is what came after the last complete response."""
    if rest:
        return Judgement("malformed", f"an incomplete response: {rest[:200]!r}")
    statuses = [reply.status for reply in replies]
    if case.expect is not None and (
        len(statuses) != len(case.expect)
        or any(got not in want for got, want in zip(statuses, case.expect, strict=True))
    ):
        return Judgement("statuses", f"{statuses} instead of {[sorted(want) for want in case.expect]}")
    for reply in replies:
        if reply.status not in RAW_STATUSES:
            return Judgement(f"status {reply.status}", repr(reply.body[:300]))
        try:
            if not reply.headers.get(b"x-request-id"):
                raise Wrong("no x-request-id")
            if reply.status >= 300:
                body = msgspec.json.decode(reply.body)
                check_error("anthropic" if b'"type":"error"' in reply.body else "openai", body, reply.status)
        except (Wrong, msgspec.DecodeError) as error:
            return Judgement("answer", f"{reply.status}: {error}")
    return None


def _check_headers(request: Request, reply: Reply) -> None:
    headers = reply.headers
    if not headers.get(b"x-request-id"):
        raise Wrong("no x-request-id")
    if reply.status in (503, 529) and not headers.get(b"retry-after", b"").isdigit():
        raise Wrong("no Retry-After")
    if reply.status == 405 and not headers.get(b"allow"):
        raise Wrong("no Allow")
    if reply.status == 501 and headers.get(b"x-should-retry") != b"false":
        raise Wrong("no x-should-retry: false")
    if family_of(request.path, request.method, request.headers) == "anthropic" and not headers.get(b"request-id"):
        raise Wrong("no request-id")


def _check_error(request: Request, reply: Reply) -> None:
    if request.method == "HEAD":
        return
    if reply.headers.get(b"content-type") != b"application/json":
        raise Wrong(f"the content type is {reply.headers.get(b'content-type')!r}")
    try:
        body = msgspec.json.decode(reply.body)
    except msgspec.DecodeError as error:
        raise Wrong(f"the error is not JSON: {reply.body[:200]!r}") from error
    family = family_of(request.path, request.method, request.headers)
    if family is None:
        family = "anthropic" if isinstance(body, dict) and body.get("type") == "error" else "openai"
    check_error(family, body, reply.status)


def _check_success(request: Request, reply: Reply) -> None:
    bare = request.path.partition("?")[0]
    kind = KINDS.get(bare, "json") if request.method == "POST" else "json"
    if request.method == "GET" and bare.startswith("/v1/responses/") and "stream=true" in request.path:
        kind = "responses"
    media = reply.headers.get(b"content-type", b"")
    if media == EVENT_STREAM:
        if kind not in STREAMS:
            raise Wrong(f"a stream from {bare}")
        refused_late = reply.body.startswith(COMMENT) and b'"invalid_request_error"' in reply.body
        if not check_stream(kind, reply.body, None) and not (request.fault or refused_late):
            raise Wrong(f"an error frame: {reply.body[-400:]!r}")
        return
    if request.stream:
        raise Wrong(f"a stream was asked for, and {media!r} came")
    if bare == "/metrics":
        if not media.startswith(b"text/plain") or not reply.body.startswith(b"# HELP"):
            raise Wrong("not a page of metrics")
        return
    if media == b"application/octet-stream" and bare.startswith("/v1/files/"):
        return
    if media == b"application/x-jsonl" and bare.endswith("/results"):
        for line in reply.body.splitlines():
            check_reply("json", line)
        return
    if media != b"application/json":
        raise Wrong(f"the content type is {media!r}")
    is_anthropic = family_of(request.path, request.method, request.headers) == "anthropic"
    check_reply("anthropic_file" if kind == "file" and is_anthropic else kind, reply.body)
