"""Calls that are answered with one JSON body, as steps: models, embeddings, token counts and rendered prompts."""

from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import quote

import msgspec

from dragoman.client.planner import CallPlanner, PlannedCall, Steps
from dragoman.core.embeddings import Embedding, EmbeddingRequest, Input
from dragoman.core.engine import RenderedPrompt
from dragoman.core.errors import BadAnswer, BadRequest
from dragoman.core.events import Usage
from dragoman.core.request import GenerationRequest
from dragoman.protocols import embeddings, reply_fields
from dragoman.protocols.chat import client as chat
from dragoman.protocols.messages import client as messages
from dragoman.protocols.responses import client as responses

PAGE_SIZE = 1000
CONTEXT_FIELDS = (
    "max_model_len",
    "context_length",
    "max_context_length",
    "context_window",
    "max_input_tokens",
    "n_ctx_train",
)


class ServerModel(msgspec.Struct, frozen=True):
    name: str
    context: int | None = None
    """In tokens, if the server reports it."""


class Embeddings(msgspec.Struct, frozen=True):
    """One vector for each text, in the same order."""

    vectors: tuple[tuple[float, ...], ...]
    usage: Usage


class ModelPage(msgspec.Struct, frozen=True):
    models: tuple[ServerModel, ...]
    next: str | None = None
    """The last name of this page, if there are more pages."""


def list_models(planner: CallPlanner) -> Steps[tuple[ServerModel, ...]]:
    models: list[ServerModel] = []
    after: str | None = None
    while True:
        body = yield from planner.fetch("models", [_models_call(planner, after)])
        page = _read_page(body)
        models += page.models
        if page.next is None or page.next == after:
            return tuple(models)
        after = page.next


def _models_call(planner: CallPlanner, after: str | None) -> PlannedCall:
    query = f"?limit={PAGE_SIZE}" + (f"&after_id={quote(after)}" if after else "")
    has_pages = planner.protocol == "messages" or after
    return planner.json_call("models", f"/models{query if has_pages else ''}", protocol=planner.protocol or "chat")


def _read_page(body: bytes) -> ModelPage:
    parsed = reply_fields.parse(body)
    entries = parsed.get("data", parsed.get("models")) if isinstance(parsed, dict) else parsed
    if not isinstance(entries, list):
        raise BadAnswer(f"the server sent no list of models: {reply_fields.excerpt(body)!r}")
    models = tuple(_model(entry) for entry in entries if isinstance(entry, dict) and _name(entry))
    has_more = isinstance(parsed, dict) and parsed.get("has_more") is True and bool(models)
    return ModelPage(models, models[-1].name if has_more else None)


def _name(entry: dict[str, Any]) -> str:
    return str(entry.get("id") or entry.get("name") or "")


def _model(entry: dict[str, Any]) -> ServerModel:
    meta = entry.get("meta")
    objects = [entry, meta if isinstance(meta, dict) else {}]
    sizes = (fields.get(name) for fields in objects for name in CONTEXT_FIELDS)
    return ServerModel(_name(entry), next((size for size in sizes if isinstance(size, int)), None))


def embed_texts(
    planner: CallPlanner, texts: str | Sequence[str], model: str, dimensions: int | None
) -> Steps[Embeddings]:
    inputs = [texts] if isinstance(texts, str) else list(texts) if isinstance(texts, Iterable) else [texts]
    if not all(isinstance(text, str) for text in inputs):
        raise BadRequest("texts: expected a string or a list of strings", param="texts")
    vectors, usage = yield from embed(planner, inputs, model, dimensions)
    return Embeddings(tuple(tuple(vector.values) for vector in vectors), usage)


def embed(
    planner: CallPlanner, inputs: Sequence[Input], model: str, dimensions: int | None = None
) -> Steps[tuple[tuple[Embedding, ...], Usage]]:
    """Like `embed_texts`, for texts or tokens; the vectors are packed, as engines use them."""
    request = EmbeddingRequest(tuple(inputs), model or planner.model, dimensions, listed=True)
    call = planner.json_call("embeddings", embeddings.PATH, embeddings.encode_request(request))
    body = yield from planner.fetch("embeddings", [call])
    return embeddings.decode_reply(body, len(inputs))


def count_tokens(planner: CallPlanner, request: GenerationRequest) -> Steps[int]:
    """Count with the route of Anthropic, of OpenAI or of vLLM. vLLM's does not support tools."""
    count = {name: value for name, value in messages.encode(request, False).items() if name != "max_tokens"}
    items = {
        name: value for name, value in responses.encode(request, False).items() if name not in ("store", "include")
    }
    calls = [
        planner.json_call("messages", "/messages/count_tokens", count, protocol="messages"),
        planner.json_call("responses", "/responses/input_tokens", items),
        planner.json_call("tokenize", "/tokenize", chat.encode(request, False), at_root=True),
    ]
    body = yield from planner.fetch("count", calls)
    parsed = reply_fields.parse_object(body)
    for name in ("input_tokens", "count", "total_tokens"):
        tokens = parsed.get(name)
        if isinstance(tokens, int):
            return tokens
    raise BadAnswer(f"the server sent no token count: {reply_fields.excerpt(body)!r}")


def render(planner: CallPlanner, request: GenerationRequest) -> Steps[RenderedPrompt]:
    """Ask a Dragoman for the prompt of a chat."""
    body = yield from planner.fetch(
        "render", [planner.json_call("render", "/chat/completions/render", chat.encode(request, False))]
    )
    parsed = reply_fields.parse_object(body)
    try:
        return msgspec.convert({**parsed, "text": parsed.get("prompt"), "ignored": ()}, RenderedPrompt)
    except msgspec.ValidationError as error:
        raise BadAnswer(f"the server sent no prompt: {reply_fields.excerpt(body)!r}") from error
