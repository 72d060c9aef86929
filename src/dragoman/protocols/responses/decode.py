"""Decodes requests in two steps. Between them the server looks up the stored items that the request refers to.

body -> read -> Asking -> decode(stored items) -> Question
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dragoman.core.errors import BadRequest, NotFound, NotSupported, quote
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
    Thinking,
)
from dragoman.protocols import json_body, openai, thinking_fields
from dragoman.protocols.responses import items, tools
from dragoman.protocols.responses.calls import ClientTool
from dragoman.protocols.responses.fields import ReasoningSettings, ResponseFields, TextField, TextFormatField

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
    *("safety_identifier", "temperature", "top_p", "user"),
)
"""Fields that the response repeats, null if they were not sent."""
REASONING_DEFAULTS = {"context": "auto", "mode": "standard"}


class ParsedRequest(msgspec.Struct, frozen=True):
    """A parsed request and the ids of the stored items that it refers to."""

    parsed: dict[str, Any]
    fields: ResponseFields
    references: tuple[str, ...] = ()


class ResponseContext(msgspec.Struct, frozen=True):
    """What the response needs to know about its request beyond the `GenerationRequest`."""

    echoed: Mapping[str, Any] = {}
    client_tools: Mapping[str, ClientTool] = {}
    """By the name that the model uses."""
    encrypts_reasoning: bool = False
    should_store: bool = True
    items: tuple[Mapping[str, Any], ...] = ()
    """The whole conversation before the response, as it is stored."""


class ResponseRequest(msgspec.Struct, frozen=True):
    request: GenerationRequest
    context: ResponseContext


def parse(body: bytes) -> ParsedRequest:
    parsed = json_body.parse(body)
    fields = json_body.convert(parsed, ResponseFields)
    _check_supported(fields)
    sent = fields.input if isinstance(fields.input, list) else []
    items.check(sent)
    kinds = [items.kind_of(item, f"input[{at}]") for at, item in enumerate(sent)]
    references = (item.get("id") for item, kind in zip(sent, kinds, strict=True) if kind == "item_reference")
    return ParsedRequest(parsed, fields, tuple(item_id for item_id in references if isinstance(item_id, str)))


def _check_supported(fields: ResponseFields) -> None:
    """Reject what no model can answer."""
    if fields.background:
        raise NotSupported("background: not supported; send the request without it", param="background")
    if fields.conversation is not None:
        message = "conversation: not supported; send the items or previous_response_id"
        raise NotSupported(message, param="conversation")
    if fields.prompt is not None:
        raise NotSupported("prompt: stored prompts are not supported; send the text as instructions", param="prompt")
    if fields.n is not None and fields.n > 1:
        raise BadRequest("n: must be 1", param="n")
    for name, value in (fields.metadata or {}).items():
        if not isinstance(value, str):
            path = f"metadata.{name:.64}"
            raise BadRequest(f"{path}: expected a string", param=path)


def decode(
    asking: ParsedRequest,
    earlier: Sequence[dict[str, Any]] = (),
    referenced: Mapping[str, dict[str, Any]] | None = None,
) -> ResponseRequest:
    """`earlier` are the input and output items of the previous response; `referenced` the stored items by id."""
    asked = [Asked("chat", "input"), *openai.requested_features(asking.fields, asking.parsed)]
    sent = _input_items(asking.fields, referenced or {}, asked)
    located = [("previous_response_id", item) for item in earlier] + sent
    items.check_count(len(located))
    fields = _apply_updates(asking.fields, sent)
    toolset = tools.decode(fields.tools or (), items.tools_of(located), asked)
    choice, left = tools.choose(fields.tool_choice, fields.parallel_tool_calls is not False, toolset, asked)
    system = (Message("system", (Text(fields.instructions),)),) if fields.instructions else ()
    messages = (*system, *items.decode(located, toolset, asked))
    if not messages:
        raise _empty_input(asked)
    _note_options(fields, asking.parsed, asked)
    request = GenerationRequest(
        model=fields.model or "",
        messages=messages,
        tools=left,
        tool_choice=choice,
        constraint=_constraint((fields.text or TextField()).format, asked),
        thinking=_thinking(fields, asked),
        sampling=openai.decode_sampling(fields),
        keep_seconds=openai.retention_seconds(fields.prompt_cache_retention),
        labels=openai.decode_labels(fields),
        max_tokens=fields.max_output_tokens,
        stop=openai.decode_stops(fields.stop),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        ignore_eos=bool(fields.ignore_eos),
        logprobs=_logprobs(fields, asked),
        delivery=Delivery(stream=bool(fields.stream), usage=True),
        asked=tuple(asked),
    )
    return ResponseRequest(request, _response_context(asking, toolset, [item for _, item in located]))


def _empty_input(asked: Sequence[Asked]) -> BadRequest:
    """Name the item that was skipped, if any, because no other item has content."""
    skipped = next((entry.param for entry in asked if entry.feature == "items"), None)
    if skipped is None:
        return BadRequest("input: at least one item is required", param="input")
    path = f"{skipped}.type" if skipped.endswith("]") else skipped
    return BadRequest(f"{path}: the input has no item with content for the model", param=path)


def _input_items(
    fields: ResponseFields, referenced: Mapping[str, dict[str, Any]], asked: list[Asked]
) -> list[items.LocatedItem]:
    """Return the items of the input with their paths, and stored items in place of references."""
    if isinstance(fields.input, str):
        return [("input", {"type": "message", "role": "user", "content": fields.input})]
    located: list[items.LocatedItem] = []
    for at, item in enumerate(fields.input or ()):
        path = f"input[{at}]"
        if items.kind_of(item, path) != "item_reference":
            located.append((path, item))
            continue
        item_id = item.get("id")
        if isinstance(item_id, str) and item_id in referenced:
            located.append((path, referenced[item_id]))
        elif isinstance(item_id, str) and item_id.startswith(REASONING_PREFIX):
            # A conversation can continue without old reasoning, but not without its messages.
            asked.append(Asked("items", path))
        else:
            message = f"{path}.id: item {quote(item_id)} is not stored; send the item itself"
            raise NotFound(message, param=f"{path}.id")
    return located


class ConfigurationUpdate(msgspec.Struct, frozen=True):
    """An item that changes settings of the request."""

    reasoning: ReasoningSettings | None = None
    text: TextField | None = None


def _apply_updates(fields: ResponseFields, sent: Sequence[items.LocatedItem]) -> ResponseFields:
    for path, item in sent:
        if items.kind_of(item, path) != items.UPDATE:
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
        Asked("unknown", f"reasoning.{name}")
        for name, value in (parsed.get("reasoning") or {}).items()
        if name != "effort" and value is not None and value != REASONING_DEFAULTS.get(name)
    ]
    asked += [
        Asked("unknown", f"include[{at}]") for at, name in enumerate(fields.include or ()) if name not in INCLUDED
    ]
    if fields.text is not None and fields.text.verbosity not in (None, "medium"):
        asked.append(Asked("verbosity", "text.verbosity"))
    if fields.truncation == "auto":
        asked.append(Asked("truncation", "truncation"))
    if fields.service_tier not in (None, "auto", "default"):
        asked.append(Asked("service_tier", "service_tier"))
    if fields.stream_options is not None and fields.stream_options.include_obfuscation:
        asked.append(Asked("unknown", "stream_options.include_obfuscation"))


def _constraint(field: TextFormatField | None, asked: list[Asked]) -> Constraint | None:
    if field is None or field.type == "text":
        return None
    asked.append(Asked("constraint", "text.format"))
    if field.type == "json_object":
        return JsonObject()
    if field.schema is None:
        raise BadRequest("text.format.schema: required with type json_schema", param="text.format.schema")
    return JsonSchema(field.schema, field.name or "response", bool(field.strict), "text.format.schema")


def _thinking(fields: ResponseFields, asked: list[Asked]) -> Thinking:
    if fields.reasoning is None or fields.reasoning.effort is None:
        return Thinking()
    effort = "xhigh" if fields.reasoning.effort == "max" else fields.reasoning.effort
    return thinking_fields.decode({"reasoning": {"effort": effort}}, asked)


def _logprobs(fields: ResponseFields, asked: list[Asked]) -> Logprobs | None:
    if LOGPROBS not in (fields.include or ()) and not fields.top_logprobs:
        return None
    asked.append(Asked("logprobs", "top_logprobs" if fields.top_logprobs else "include"))
    return Logprobs(fields.top_logprobs or 0)


def _response_context(
    asking: ParsedRequest, toolset: tools.ToolSet, conversation: Sequence[Mapping[str, Any]]
) -> ResponseContext:
    fields, parsed = asking.fields, asking.parsed
    echoed = {
        **{name: parsed.get(name) for name in ECHOED},
        "background": False,
        "metadata": fields.metadata or {},
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "reasoning": {"effort": fields.reasoning and fields.reasoning.effort, "summary": None},
        "service_tier": "default",
        "store": fields.store is not False,
        "text": _echoed_text(parsed.get("text") or {}),
        "tool_choice": parsed.get("tool_choice") or "auto",
        "tools": [_echoed_tool(tool) for tool in fields.tools or ()],
        "top_logprobs": fields.top_logprobs or 0,
        "truncation": "disabled",
    }
    encrypts = ENCRYPTED in (fields.include or ())
    return ResponseContext(echoed, toolset.client_tools, encrypts, fields.store is not False, tuple(conversation))


def _echoed_text(text: Mapping[str, Any]) -> dict[str, Any]:
    sent = {name: value for name, value in text.items() if value is not None}
    return {"format": {"type": "text"}, "verbosity": "medium", **sent}


def _echoed_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tool as it was sent, with the fields that a tool of its type always has."""
    if tool.get("type") == "function":
        return {"description": None, "parameters": None, **tool, "strict": bool(tool.get("strict"))}
    if tool.get("type") == "namespace":
        return {**tool, "description": tool.get("description") or "", "tools": list(tool.get("tools") or ())}
    return dict(tool)
