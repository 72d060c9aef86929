"""Bodies of replies and errors: whether they are what their protocol says. The SDKs' types are the measure."""

import functools
import math
import re
from typing import Any, Literal

import msgspec
import pydantic
from anthropic.types.beta import BetaFileMetadata, BetaMessage
from anthropic.types.messages import MessageBatch
from openai.types import Batch, Completion, CreateEmbeddingResponse, FileObject
from openai.types.chat import ChatCompletion
from openai.types.conversations import Conversation
from openai.types.responses import Response

MOST_MESSAGE = 2000
"""Characters of an error message."""
INTERNAL = re.compile(
    r"Traceback|<class '|object at 0x|File \"|\.py\b.*line \d+|site-packages|msgspec\.|dragoman\.\w+\."
)
"""What belongs in the log, not in a message."""
ANTHROPIC_TYPES = {
    400: {"invalid_request_error"},
    401: {"authentication_error"},
    403: {"permission_error"},
    404: {"not_found_error"},
    413: {"request_too_large"},
    429: {"rate_limit_error"},
    504: {"timeout_error"},
    529: {"overloaded_error"},
}


class Wrong(Exception):
    """Something is wrong with an answer."""


class OpenAIError(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIErrorBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    error: OpenAIError


class AnthropicError(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    message: str
    details: dict[str, Any] | None = None


class AnthropicErrorBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    error: AnthropicError
    request_id: str


def check_error(family: str, body: Any, status: int | None) -> None:
    """An error in the words of its family; `status` is None for one in a stream."""
    expected: Any = AnthropicErrorBody if family == "anthropic" else OpenAIErrorBody
    try:
        read = msgspec.convert(body, expected)
    except msgspec.ValidationError as error:
        raise Wrong(f"not an error of {family}: {error}: {str(body)[:200]}") from error
    message = read.error.message
    if not message.strip():
        raise Wrong("an error without a message")
    if len(message) > MOST_MESSAGE:
        raise Wrong(f"an error message of {len(message)} characters: {message[:100]}")
    if INTERNAL.search(message):
        raise Wrong(f"an error message shows internals: {message[:200]}")
    if family == "anthropic":
        allowed = ANTHROPIC_TYPES.get(status or 0)
        if read.type != "error" or (allowed is not None and read.error.type not in allowed):
            raise Wrong(f"a {status} of the type {read.error.type}")
    elif read.error.code is None:
        raise Wrong(f"an error without a code: {message[:200]}")


class RerankResult(msgspec.Struct, frozen=True):
    index: int
    relevance_score: float
    document: dict[str, str] | None = None


class Rerank(msgspec.Struct, frozen=True):
    id: str
    model: str
    results: list[RerankResult]
    usage: dict[str, int]


class TokenCount(msgspec.Struct, frozen=True):
    input_tokens: int


class Tokenized(msgspec.Struct, frozen=True):
    tokens: list[int | dict[str, Any]]
    count: int
    max_model_len: int | None


class Detokenized(msgspec.Struct, frozen=True):
    content: str
    prompt: str


class Rendered(msgspec.Struct, frozen=True):
    object: str
    model: str
    prompt: str
    tokens: list[int]
    token_count: int


class Compacted(msgspec.Struct, frozen=True):
    """The SDK's type has only messages of the assistant."""

    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[dict[str, Any]]
    usage: dict[str, Any]


OWN_TYPES = {
    "compacted": Compacted,
    "rerank": Rerank,
    "count": TokenCount,
    "tokenize": Tokenized,
    "detokenize": Detokenized,
    "render": Rendered,
}


@functools.cache
def sdk_types() -> dict[str, pydantic.TypeAdapter[Any]]:
    """Built late: it takes a second."""
    types = {
        "chat": ChatCompletion,
        "completions": Completion,
        "messages": BetaMessage,
        "responses": Response,
        "embeddings": CreateEmbeddingResponse,
        "file": FileObject,
        "anthropic_file": BetaFileMetadata,
        "batch": Batch,
        "message_batch": MessageBatch,
        "conversation": Conversation,
    }
    return {name: pydantic.TypeAdapter(kind) for name, kind in types.items()}


GENERATIONS = frozenset({"chat", "completions", "messages", "responses"})
NOT_CHECKED = frozenset({"tools", "tool_choice", "text", "reasoning", "token_logprobs", "top_logprobs"})
"""Fields that repeat the request, which may be a mutated one; and the log probabilities of a completion: the first
token of a prompt has none, and OpenAI too sends null where its SDK's type wants a value."""


def first_error(error: pydantic.ValidationError) -> str | None:
    """The first thing that is wrong."""
    for one in error.errors(include_url=False, include_context=False, include_input=False):
        if NOT_CHECKED.isdisjoint(one["loc"]):
            return f"{'.'.join(map(str, one['loc']))}: {one['msg']}"
    return None


def check_reply(kind: str, body: bytes) -> None:
    """The body of a 200 that is not a stream."""
    try:
        if kind in OWN_TYPES:
            read = msgspec.json.decode(body, type=OWN_TYPES[kind])
            if isinstance(read, Rerank) and any(not math.isfinite(one.relevance_score) for one in read.results):
                raise Wrong("a score is not a number")
            if isinstance(read, Compacted) and [item["type"] for item in read.output[-1:]] != ["compaction"]:
                raise Wrong(f"a compacted conversation without a compaction: {body[:300]!r}")
            return
        if kind == "embeddings":
            _check_embeddings(body)
            return
        adapter = sdk_types().get(kind)
        if adapter is not None:
            reply = adapter.validate_json(body)
            if kind in GENERATIONS:
                _check_generation(kind, reply)
        elif kind == "json" and not isinstance(msgspec.json.decode(body), dict):
            raise Wrong("the body is not an object")
    except pydantic.ValidationError as error:
        if first := first_error(error):
            raise Wrong(f"not a reply of {kind}: {first}: {body[:300]!r}") from error
    except msgspec.MsgspecError as error:
        raise Wrong(f"not a reply of {kind}: {error}: {body[:300]!r}") from error


def _check_generation(kind: str, reply: Any) -> None:
    if kind in ("chat", "completions"):
        if not reply.choices or [choice.index for choice in reply.choices] != list(range(len(reply.choices))):
            raise Wrong(f"choices are numbered {[choice.index for choice in reply.choices]}")
        if any(choice.finish_reason is None for choice in reply.choices) or reply.usage is None:
            raise Wrong("a choice without a finish reason, or no usage")
    elif kind == "messages":
        if reply.stop_reason is None:
            raise Wrong("a message without a stop reason")
    elif reply.status not in (("queued",) if reply.background else ("completed", "incomplete")):
        raise Wrong(f"a response that is {reply.status}")


def _check_embeddings(body: bytes) -> None:
    read = msgspec.json.decode(body)
    # The SDK's type does not know vectors in base64.
    for entry in read["data"]:
        if isinstance(entry.get("embedding"), str):
            entry["embedding"] = []
    sdk_types()["embeddings"].validate_python(read)
