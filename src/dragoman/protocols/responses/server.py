"""Server side of the Responses protocol: decodes requests in two steps. `encoder` encodes the replies.

    body -> parse -> ParsedRequest -> decode(stored items) -> ResponseRequest

Between the steps the server looks up the stored items that the request refers to.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from dragoman.core.edits import Compact
from dragoman.core.errors import BadRequest, NotFound, NotSupported, quote
from dragoman.core.features import Feature
from dragoman.core.request import (
    Asked,
    Constraint,
    Delivery,
    GenerationRequest,
    JsonObject,
    JsonSchema,
    Logprobs,
    Message,
    Text,
)
from dragoman.protocols import json_body, openai, thinking
from dragoman.protocols.responses import compaction_items, items, mcp, tools
from dragoman.protocols.responses.calls import ClientTool
from dragoman.protocols.responses.tools import ToolChoiceField

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
INCLUDED = frozenset(
    {
        *(LOGPROBS, ENCRYPTED, "file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
        *("computer_call_output.output.image_url", "code_interpreter_call.outputs", "message.input_image.image_url"),
    }
)
"""Accepted values of `include`. Those about tools have no effect, because this server runs no tools."""
REASONING_PREFIX = "rs_"
ECHOED = (
    *("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "prompt_cache_key"),
    *("safety_identifier", "user"),
)
"""Fields that the response repeats, null if they were not sent."""
TEXT_DEFAULTS: dict[str, Any] = {"format": {"type": "text"}, "verbosity": "medium"}
SCHEMA_DEFAULTS: dict[str, Any] = {"name": "response", "description": None, "strict": False}
METADATA_NAME, METADATA_VALUE = 64, 512
"""Characters."""
Metadata = Annotated[dict[str, Any], msgspec.Meta(max_length=16)]
REASONING_DEFAULTS = {"context": "auto", "mode": "standard"}


class ResponseStreamOptions(msgspec.Struct, frozen=True):
    include_obfuscation: bool | None = None


class ReasoningSettings(msgspec.Struct, frozen=True):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None


class TextFormatField(msgspec.Struct, frozen=True):
    type: Literal["text", "json_object", "json_schema"] = "text"
    schema: dict[str, Any] | None = None
    name: str | None = None
    strict: bool | None = None


class TextField(msgspec.Struct, frozen=True):
    format: TextFormatField | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ConversationField(msgspec.Struct, frozen=True):
    id: str


class ResponseFields(openai.SamplingFields, frozen=True, kw_only=True):
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationField | None = None
    prompt: Any = None
    background: bool | None = None
    store: bool | None = None
    include: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoiceField = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: openai.Count | None = None
    max_output_tokens: openai.Count | None = None
    text: TextField | None = None
    reasoning: ReasoningSettings | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    context_management: list[Any] | None = None
    service_tier: str | None = None
    stream_options: ResponseStreamOptions | None = None  # type: ignore[assignment]
    metadata: Metadata | None = None
    client_metadata: Any = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: openai.Retention | None = None
    prompt_cache_options: Any = None
    safety_identifier: str | None = None


class ParsedRequest(msgspec.Struct, frozen=True):
    parsed: dict[str, Any]
    fields: ResponseFields
    items: list[items.LocatedItem]
    """The input, with references to stored items."""
    generates: bool = True
    """False: the request only prepares the next one on its WebSocket, so it may have no input."""

    @property
    def conversation(self) -> str | None:
        """The id of the conversation that the request continues."""
        field = self.fields.conversation
        return field.id if isinstance(field, ConversationField) else field

    @property
    def references(self) -> list[str]:
        """The ids of the stored items that the request refers to."""
        ids = [item.get("id") for _, kind, item in self.items if kind == "item_reference"]
        return [item_id for item_id in ids if isinstance(item_id, str)]


class ResponseContext(msgspec.Struct, frozen=True):
    """What the response needs to know about its request beyond the `GenerationRequest`."""

    echoed: Mapping[str, Any] = {}
    client_tools: Mapping[str, ClientTool] = {}
    """By the name that the model uses."""
    encrypts_reasoning: bool = False
    should_store: bool = True
    must_store: bool = False
    """Whether the caller relies on the store, so that the request fails without it."""
    is_background: bool = False
    conversation: str | None = None
    items: tuple[Mapping[str, Any], ...] = ()
    """The whole conversation before the response, as it is stored."""
    added: int = 0
    """The number of the last items that the request itself has."""


class ResponseRequest(msgspec.Struct, frozen=True):
    request: GenerationRequest
    context: ResponseContext


def parse(body: bytes) -> ParsedRequest:
    return read(json_body.parse(body))


def read(parsed: dict[str, Any], generates: bool = True) -> ParsedRequest:
    fields = json_body.convert(parsed, ResponseFields)
    _check_supported(fields)
    return ParsedRequest(parsed, fields, items.locate(() if fields.input is None else fields.input), generates)


def _check_supported(fields: ResponseFields) -> None:
    """Reject what no model can answer."""
    if fields.background and fields.store is False:
        raise BadRequest("background: needs store; leave out store: false", param="background")
    if fields.conversation is not None and fields.previous_response_id is not None:
        message = "conversation: cannot be combined with previous_response_id; send one of them"
        raise BadRequest(message, param="conversation")
    for at, tool in enumerate((fields.tools or ()) if fields.background else ()):
        secret = mcp.find_secret_field(tool)
        if secret is not None:
            param = f"tools[{at}].{secret}"
            message = f"{param}: a background request is stored, so it must not contain credentials; "
            raise BadRequest(f"{message}name a server of the configuration instead", param=param)
    if fields.prompt is not None:
        raise NotSupported("prompt: stored prompts are not supported; send the text as instructions", param="prompt")
    if fields.n is not None and fields.n > 1:
        raise BadRequest("n: must be 1", param="n")
    check_metadata(fields.metadata or {})


def check_metadata(metadata: Mapping[str, Any]) -> None:
    for name, value in metadata.items():
        path = f"metadata.{name:.64}"
        if not isinstance(value, str):
            raise BadRequest(f"{path}: expected a string", param=path)
        if len(name) > METADATA_NAME or len(value) > METADATA_VALUE:
            limits = f"a name of at most {METADATA_NAME} and a value of at most {METADATA_VALUE} characters"
            raise BadRequest(f"{path}: expected {limits}", param=path)


def decode(
    parsed_request: ParsedRequest,
    earlier: Sequence[dict[str, Any]] = (),
    referenced: Mapping[str, dict[str, Any]] | None = None,
    compacts: bool = False,
) -> ResponseRequest:
    """`earlier` are the items of the previous response or of the conversation; `referenced` the stored items by id.

    A request that `compacts` is answered with a compaction.
    """
    asked = [Asked(Feature.CHAT, "input"), *openai.requested_features(parsed_request.fields, parsed_request.parsed)]
    resolved = _resolve_references(parsed_request.items, referenced or {}, asked)
    sent, trigger = compaction_items.take_trigger(resolved)
    path = "previous_response_id" if parsed_request.conversation is None else "conversation"
    before = [(path, items.kind_of(item, path), item) for item in earlier]
    items.check_count(len(before) + len(sent))
    items.check_outputs(before, sent)
    located = items.window([*before, *sent])
    fields = _apply_updates(parsed_request.fields, sent)
    toolset = tools.decode(fields.tools or (), items.tools_of(located), asked)
    choice, left = tools.choose(fields.tool_choice, fields.parallel_tool_calls is not False, toolset, asked)
    system = (Message("system", (Text(fields.instructions),)),) if fields.instructions else ()
    history = mcp.McpHistory(located)
    messages = (*system, *items.decode(located, toolset, asked, history))
    if not messages and parsed_request.generates:
        raise _empty_input(asked)
    edits = compaction_items.decode_setting(fields.context_management or (), asked)
    if compacts or trigger is not None:
        edits = (Compact(trigger or "input", is_compaction_only=True),)
    if compacts:
        sent_fields = parsed_request.parsed
        asked += [Asked(Feature.UNKNOWN, name) for name in ("stream", "background", "store") if sent_fields.get(name)]
    _note_options(fields, parsed_request.parsed, asked)
    wants_logprobs = LOGPROBS in (fields.include or ()) or bool(fields.top_logprobs)
    if wants_logprobs:
        asked.append(Asked(Feature.LOGPROBS, "top_logprobs" if fields.top_logprobs else "include"))
    request = GenerationRequest(
        **openai.decode_common(fields),
        messages=messages,
        edits=edits,
        tools=left.tools,
        tool_choice=choice,
        tool_servers=history.with_listings(left.servers),
        approved_calls=history.check_approved(toolset.servers),
        max_tool_calls=fields.max_tool_calls,
        constraint=_constraint((fields.text or TextField()).format, asked),
        thinking=thinking.resolve({"reasoning": {"effort": fields.reasoning and fields.reasoning.effort}}, asked),
        max_tokens=fields.max_output_tokens,
        logprobs=Logprobs(fields.top_logprobs or 0) if wants_logprobs else None,
        delivery=Delivery(stream=bool(fields.stream) and not compacts, usage=True),
        asked=tuple(asked),
        extra=json_body.extra_fields(parsed_request.parsed, asked),
    )
    own = {id(item) for _, _, item in sent}
    conversation = [item for _, _, item in located]
    added = sum(id(item) in own for item in conversation)
    return ResponseRequest(request, _response_context(parsed_request, toolset, conversation, added))


def _empty_input(asked: Sequence[Asked]) -> BadRequest:
    """Name the item that was skipped, if any, because no other item has content."""
    skipped = next((entry.param for entry in asked if entry.feature == Feature.ITEMS), None)
    if skipped is None:
        return BadRequest("input: at least one item is required", param="input")
    path = f"{skipped}.type" if skipped.endswith("]") else skipped
    return BadRequest(f"{path}: the input has no item with content for the model", param=path)


def _resolve_references(
    sent: Sequence[items.LocatedItem], referenced: Mapping[str, dict[str, Any]], asked: list[Asked]
) -> list[items.LocatedItem]:
    """Return the items with stored items in place of references."""
    located: list[items.LocatedItem] = []
    for path, kind, item in sent:
        if kind != "item_reference":
            located.append((path, kind, item))
            continue
        item_id = item.get("id")
        if isinstance(item_id, str) and item_id in referenced:
            stored = referenced[item_id]
            located.append((path, items.kind_of(stored, path), stored))
        elif isinstance(item_id, str) and item_id.startswith(REASONING_PREFIX):
            # A conversation can continue without old reasoning, but not without its messages.
            asked.append(Asked(Feature.ITEMS, path))
        else:
            message = f"{path}.id: item {quote(item_id)} is not stored; send the item itself"
            raise NotFound(message, param=f"{path}.id")
    return located


class ConfigurationUpdate(msgspec.Struct, frozen=True):
    """An item that changes settings of the request."""

    reasoning: ReasoningSettings | None = None
    text: TextField | None = None


def _apply_updates(fields: ResponseFields, sent: Sequence[items.LocatedItem]) -> ResponseFields:
    for path, kind, item in sent:
        if kind != items.UPDATE:
            continue
        update = json_body.convert(item, ConfigurationUpdate, path)
        if update.reasoning is not None and update.reasoning.effort is not None:
            fields = msgspec.structs.replace(fields, reasoning=update.reasoning)
        if update.text is not None and update.text.format is not None:
            fields = msgspec.structs.replace(fields, text=update.text)
    return fields


def _note_options(fields: ResponseFields, parsed: dict[str, Any], asked: list[Asked]) -> None:
    # `reasoning.summary` is ignored too: the reasoning is returned in full.
    asked += [
        Asked(Feature.UNKNOWN, f"reasoning.{name}")
        for name, value in (parsed.get("reasoning") or {}).items()
        if name != "effort" and value is not None and value != REASONING_DEFAULTS.get(name)
    ]
    asked += [
        Asked(Feature.UNKNOWN, f"include[{at}]") for at, name in enumerate(fields.include or ()) if name not in INCLUDED
    ]
    if fields.text is not None and fields.text.verbosity not in (None, "medium"):
        asked.append(Asked(Feature.VERBOSITY, "text.verbosity"))
    if fields.truncation == "auto":
        asked.append(Asked(Feature.TRUNCATION, "truncation"))
    if fields.stream_options is not None and fields.stream_options.include_obfuscation:
        asked.append(Asked(Feature.UNKNOWN, "stream_options.include_obfuscation"))


def _constraint(field: TextFormatField | None, asked: list[Asked]) -> Constraint | None:
    if field is None or field.type == "text":
        return None
    asked.append(Asked(Feature.CONSTRAINT, "text.format"))
    if field.type == "json_object":
        return JsonObject()
    if field.schema is None:
        raise BadRequest("text.format.schema: required with type json_schema", param="text.format.schema")
    return JsonSchema(field.schema, field.name or "response", bool(field.strict), "text.format.schema")


def _response_context(
    parsed_request: ParsedRequest, toolset: tools.ToolSet, history: Sequence[Mapping[str, Any]], added: int
) -> ResponseContext:
    fields, parsed, conversation = parsed_request.fields, parsed_request.parsed, parsed_request.conversation
    echoed = {
        **{name: parsed.get(name) for name in ECHOED},
        **({} if conversation is None else {"conversation": {"id": conversation}}),
        "background": bool(fields.background),
        "metadata": fields.metadata or {},
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "reasoning": {"effort": fields.reasoning and fields.reasoning.effort, "summary": None},
        "store": fields.store is not False,
        "text": _echoed_text(parsed.get("text") or {}),
        "tool_choice": parsed.get("tool_choice") or "auto",
        "tools": [_echoed_tool(tool) for tool in fields.tools or ()],
        "top_logprobs": fields.top_logprobs or 0,
        "truncation": "disabled",
    }
    return ResponseContext(
        echoed,
        toolset.client_tools,
        encrypts_reasoning=ENCRYPTED in (fields.include or ()),
        should_store=fields.store is not False,
        must_store=bool(fields.store) or bool(fields.background) or conversation is not None,
        is_background=bool(fields.background),
        conversation=conversation,
        items=tuple(history),
        added=added,
    )


def _echoed_text(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field with what it always has in a response."""
    echoed = TEXT_DEFAULTS | json_body.without_nulls(text)
    if echoed["format"].get("type") == "json_schema":
        echoed["format"] = SCHEMA_DEFAULTS | json_body.without_nulls(echoed["format"])
    return echoed


def _echoed_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tool as it was sent, with the fields that a tool of its type always has."""
    if tool.get("type") == "function":
        return {"description": None, "parameters": None, **tool, "strict": bool(tool.get("strict"))}
    if tool.get("type") == tools.MCP:
        return mcp.echoed_tool(tool)
    if tool.get("type") == "namespace":
        return {**tool, "description": tool.get("description") or "", "tools": list(tool.get("tools") or ())}
    return dict(tool)


def encode_count(tokens: int) -> dict[str, Any]:
    return {"object": "response.input_tokens", "input_tokens": tokens}
