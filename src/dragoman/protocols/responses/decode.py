"""A request for a response, from its body to values, in two steps: between them somebody looks up what was kept.

body -> read -> Asking -> decode(what it refers to) -> Question
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
from dragoman.protocols import json_body, openai, thinking
from dragoman.protocols.responses import items, tools
from dragoman.protocols.responses.calls import Called
from dragoman.protocols.responses.fields import FormatField, ReasoningField, ResponseFields, TextField

LOGPROBS = "message.output_text.logprobs"
SEALED = "reasoning.encrypted_content"
INCLUDED = frozenset(
    {
        *(LOGPROBS, SEALED, "file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
        *("computer_call_output.output.image_url", "code_interpreter_call.outputs", "message.input_image.image_url"),
    }
)
"""Those that are about tools ask for nothing: a server would have to run these."""
THOUGHT = "rs_"
ECHOED = (
    *("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "prompt_cache_key"),
    *("safety_identifier", "temperature", "top_p", "user"),
)
"""Fields that the response repeats as they were sent, null where they were not."""

USUAL = {"context": "auto", "mode": "standard"}
"""Of `reasoning`, values that ask for nothing."""


class Asking(msgspec.Struct, frozen=True):
    """A request as it was sent, and what of it refers to items that were kept."""

    parsed: dict[str, Any]
    fields: ResponseFields
    references: tuple[str, ...] = ()


class Shown(msgspec.Struct, frozen=True):
    """What the response tells of its request, which the values do not say."""

    echoed: Mapping[str, Any] = {}
    called: Mapping[str, Called] = {}
    sealed: bool = False
    keep: bool = True
    items: tuple[Mapping[str, Any], ...] = ()
    """The whole conversation before the response, as it is kept with it."""


class Question(msgspec.Struct, frozen=True):
    request: GenerationRequest
    shown: Shown


def read(body: bytes) -> Asking:
    parsed = json_body.parse(body)
    fields = json_body.convert(parsed, ResponseFields)
    _refuse(fields)
    given = fields.input if isinstance(fields.input, list) else []
    items.check(given)
    kinds = [items.kind_of(item, f"input[{at}]") for at, item in enumerate(given)]
    references = (item.get("id") for item, kind in zip(given, kinds, strict=True) if kind == "item_reference")
    return Asking(parsed, fields, tuple(found for found in references if isinstance(found, str)))


def _refuse(fields: ResponseFields) -> None:
    """What cannot be answered at all, by any model."""
    if fields.background:
        raise NotSupported("background: responses are answered while you wait, not later", param="background")
    if fields.conversation is not None:
        words = "conversation: none are kept here; send the items, or previous_response_id"
        raise NotSupported(words, param="conversation")
    if fields.prompt is not None:
        raise NotSupported("prompt: none are kept here; send its text as instructions", param="prompt")
    if fields.n is not None and fields.n > 1:
        raise BadRequest("n: a response has one answer", param="n")
    for name, value in (fields.metadata or {}).items():
        if not isinstance(value, str):
            path = f"metadata.{name:.64}"
            raise BadRequest(f"{path}: metadata is text only", param=path)


def decode(
    asking: Asking, earlier: Sequence[dict[str, Any]] = (), referenced: Mapping[str, dict[str, Any]] | None = None
) -> Question:
    """`earlier` are the items of the previous response, its own among them; `referenced` those that were found."""
    asked = [Asked("chat", "input"), *openai.asked_fields(asking.fields, asking.parsed)]
    given = _given(asking.fields, referenced or {}, asked)
    placed = [("previous_response_id", item) for item in earlier] + given
    items.check_count(len(placed))
    fields = _updated(asking.fields, given)
    offered = tools.decode(fields.tools or (), items.tools_of(placed), asked)
    choice, left = tools.choose(fields.tool_choice, fields.parallel_tool_calls is not False, offered, asked)
    system = (Message("system", (Text(fields.instructions),)),) if fields.instructions else ()
    messages = (*system, *items.decode(placed, offered, asked))
    if not messages:
        raise _nothing_said(asked)
    _note_options(fields, asking.parsed, asked)
    request = GenerationRequest(
        model=fields.model or "",
        messages=messages,
        tools=left,
        tool_choice=choice,
        constraint=_constraint((fields.text or TextField()).format, asked),
        thinking=_thinking(fields, asked),
        sampling=openai.sampling(fields),
        keep_seconds=openai.keep_seconds(fields.prompt_cache_retention),
        labels=openai.labels(fields),
        max_tokens=fields.max_output_tokens,
        stop=openai.stops(fields.stop),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        ignore_eos=bool(fields.ignore_eos),
        logprobs=_logprobs(fields, asked),
        delivery=Delivery(stream=bool(fields.stream), usage=True),
        asked=tuple(asked),
    )
    return Question(request, _shown(asking, offered, [item for _, item in placed]))


def _nothing_said(asked: Sequence[Asked]) -> BadRequest:
    """What was left out with a mere note is now all that there was."""
    left_out = next((entry.param for entry in asked if entry.feature == "items"), None)
    if left_out is None:
        return BadRequest("input: at least one item is needed", param="input")
    path = f"{left_out}.type" if left_out.endswith("]") else left_out
    return BadRequest(f"{path}: this says nothing to a model, and no other item does", param=path)


def _given(fields: ResponseFields, referenced: Mapping[str, dict[str, Any]], asked: list[Asked]) -> list[items.Placed]:
    """The items of the input, each where the request has it, with those it only refers to."""
    if isinstance(fields.input, str):
        return [("input", {"type": "message", "role": "user", "content": fields.input})]
    placed: list[items.Placed] = []
    for at, item in enumerate(fields.input or ()):
        path = f"input[{at}]"
        if items.kind_of(item, path) != "item_reference":
            placed.append((path, item))
            continue
        wanted = item.get("id")
        if isinstance(wanted, str) and wanted in referenced:
            placed.append((path, referenced[wanted]))
        elif isinstance(wanted, str) and wanted.startswith(THOUGHT):
            # A conversation can go on without an old thought; without what was said it cannot.
            asked.append(Asked("items", path))
        else:
            raise NotFound(f"{path}.id: no item {quote(wanted)} is kept here; send the item itself", param=f"{path}.id")
    return placed


class Update(msgspec.Struct, frozen=True):
    """What an item may change of the settings with which the request came."""

    reasoning: ReasoningField | None = None
    text: TextField | None = None


def _updated(fields: ResponseFields, given: Sequence[items.Placed]) -> ResponseFields:
    for path, item in given:
        if items.kind_of(item, path) != items.UPDATE:
            continue
        update = json_body.convert(item, Update, path)
        if update.reasoning is not None and update.reasoning.effort is not None:
            fields = msgspec.structs.replace(fields, reasoning=update.reasoning)
        if update.text is not None and update.text.format is not None:
            fields = msgspec.structs.replace(fields, text=update.text)
    return fields


def _note_options(fields: ResponseFields, parsed: dict[str, Any], asked: list[Asked]) -> None:
    # A thought is told as it is: nobody is here who could sum it up.
    others = {name: value for name, value in (parsed.get("reasoning") or {}).items() if name != "effort"}
    odd = [name for name, value in others.items() if value is not None and value != USUAL.get(name)]
    asked += [Asked("unknown", f"reasoning.{name}") for name in odd]
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


def _constraint(field: FormatField | None, asked: list[Asked]) -> Constraint | None:
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
    return thinking.decode({"reasoning": {"effort": effort}}, asked)


def _logprobs(fields: ResponseFields, asked: list[Asked]) -> Logprobs | None:
    if LOGPROBS not in (fields.include or ()) and not fields.top_logprobs:
        return None
    asked.append(Asked("logprobs", "top_logprobs" if fields.top_logprobs else "include"))
    return Logprobs(fields.top_logprobs or 0)


def _shown(asking: Asking, offered: tools.Offered, conversation: Sequence[Mapping[str, Any]]) -> Shown:
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
    sealed = SEALED in (fields.include or ())
    return Shown(echoed, offered.called, sealed, fields.store is not False, tuple(conversation))


def _echoed_text(text: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in text.items() if value is not None}
    return {"format": {"type": "text"}, "verbosity": "medium", **given}


def _echoed_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The tool as it was sent, with what its kind always has."""
    if tool.get("type") == "function":
        return {"description": None, "parameters": None, **tool, "strict": bool(tool.get("strict"))}
    if tool.get("type") == "namespace":
        return {**tool, "description": tool.get("description") or "", "tools": list(tool.get("tools") or ())}
    return dict(tool)
