"""Rewrites conversations into a form that a template accepts and keeps the text as close to its place as possible.

Rules
1. What the template accepts is not changed.
2. Several system messages at the beginning are merged. A later one becomes a marked part of an adjacent user message.
   Without a system role, the first one is prepended to the first user message.
3. If roles must alternate, adjacent messages of the same role are merged with a blank line.
4. If the template shows only one call per message, parallel calls become separate messages, each with its result.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Literal

import msgspec

from dragoman.core.request import Message, Part, Reasoning, Text, ToolCall, ToolResult
from dragoman.prompt.template_messages import Capabilities, text_message

CallIds = Literal["any", "kimi", "mistral"]

_ERROR_PREFIX = re.compile(r"\W*error", re.IGNORECASE)
_MISTRAL_ID = re.compile(r"[a-zA-Z0-9]{9}")


def split_tool_results(messages: Iterable[Message], ids: CallIds) -> Iterator[Message]:
    """Yield each tool result as a message with the name of its function. Call ids are converted to the template's
    form."""
    calls_by_id: dict[str, ToolCall] = {}
    number = 0
    for message in messages:
        for result in message.parts:
            if isinstance(result, ToolResult):
                call = calls_by_id.get(
                    result.call_id, ToolCall(_normalize_id(result.call_id, ids), message.name or "", "")
                )
                answer = ToolResult(call.id, (Text(_result_text(result)),))
                yield Message("tool", (answer,), message.name or call.name or None)
        parts: list[Part] = [part for part in message.parts if not isinstance(part, ToolResult)]
        for index, part in enumerate(parts):
            if isinstance(part, ToolCall):
                parts[index] = calls_by_id[part.id] = msgspec.structs.replace(
                    part, id=template_call_id(part, number, ids)
                )
                number += 1
        if parts or not message.parts:
            yield Message("system" if message.role == "developer" else message.role, tuple(parts), message.name)


def template_call_id(call: ToolCall, number: int, ids: CallIds) -> str:
    return f"functions.{call.name}:{number}" if ids == "kimi" else _normalize_id(call.id, ids)


def _normalize_id(call_id: str, ids: CallIds) -> str:
    if ids != "mistral" or _MISTRAL_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "replace")).hexdigest()[:9]


def _result_text(result: ToolResult) -> str:
    text = "".join(part.text for part in result.content if isinstance(part, Text))
    return f"Error: {text}" if result.is_error and not _ERROR_PREFIX.match(text) else text


def fold_messages(messages: Sequence[Message], capabilities: Capabilities) -> tuple[Message, ...]:
    folded = list(messages)
    if not capabilities.parallel_calls:
        folded = list(_split_parallel_calls(folded))
    folded = [part for message in folded for part in _separate_text_from_calls(message, capabilities)]
    folded = _fold_systems(folded, capabilities)
    if not capabilities.repeated_roles:
        folded = list(_merge_same_roles(folded))
    if not capabilities.assistant_first:
        lead = next((index for index, message in enumerate(folded) if message.role != "system"), len(folded))
        if lead < len(folded) and folded[lead].role != "user":
            folded.insert(lead, text_message("user", ""))
    return tuple(folded)


def _split_parallel_calls(messages: Sequence[Message]) -> Iterator[Message]:
    index = 0
    while index < len(messages):
        message = messages[index]
        index += 1
        if len(message.tool_calls) < 2:
            yield message
            continue
        end = next((end for end in range(index, len(messages)) if messages[end].role != "tool"), len(messages))
        yield from _pair_calls_with_results(message, messages[index:end])
        index = end


def _pair_calls_with_results(message: Message, results: Sequence[Message]) -> Iterator[Message]:
    rest = [part for part in message.parts if not isinstance(part, ToolCall)]
    answers: dict[str | None, list[Message]] = {}
    for result in results:
        call_id = next((part.call_id for part in result.parts if isinstance(part, ToolResult)), None)
        answers.setdefault(call_id, []).append(result)
    for call in message.tool_calls:
        yield Message("assistant", (*rest, call), message.name)
        rest = []
        yield from answers.pop(call.id, [])
    for others in answers.values():
        yield from others


def _separate_text_from_calls(message: Message, capabilities: Capabilities) -> Iterator[Message]:
    """Separate text from calls if the template would drop or reject it."""
    kinds = {type(part) for part in message.parts}
    if not kinds >= {Text, ToolCall} or not message.text:
        yield message
    elif not capabilities.text_with_thought and Reasoning in kinds:
        thought = Reasoning(f"{message.reasoning}\n\n{message.text}")
        yield Message("assistant", (thought, *message.tool_calls), message.name)
    elif not capabilities.text_with_calls and capabilities.repeated_roles:
        yield Message("assistant", (Text(message.text),), message.name)
        yield Message("assistant", tuple(part for part in message.parts if not isinstance(part, Text)), message.name)
    else:
        yield message


def _fold_systems(messages: list[Message], capabilities: Capabilities) -> list[Message]:
    lead = next((index for index, message in enumerate(messages) if message.role != "system"), len(messages))
    head, rest = messages[:lead], messages[lead:]
    if not capabilities.late_system and any(message.role == "system" for message in rest):
        rest = _move_late_systems(rest, capabilities)
    if len(head) > 1 and not capabilities.multiple_systems:
        head = [_merge(head)]
    working = bool(rest) and rest[-1].role == "tool"
    if head and not (capabilities.system and (capabilities.system_with_results or not working)):
        text = "\n\n".join(message.text for message in head)
        if rest and rest[0].role == "user":
            return [_add_text(rest[0], f"{text}\n\n", before=True), *rest[1:]]
        return [text_message("user", text), *rest]
    return head + rest


def _move_late_systems(messages: Sequence[Message], capabilities: Capabilities) -> list[Message]:
    """Move each system message into the user message after or before it, or make it a user message; otherwise use the
    nearest later or earlier user message."""
    groups = [(role, list(group)) for role, group in groupby(messages, key=lambda message: message.role)]
    following = [role for role, _ in groups[1:]] + [None]
    folded: list[Message] = []
    waiting: list[str] = []
    for (role, group), after in zip(groups, following, strict=True):
        system_text = "".join(f"<system>\n{message.text}\n</system>\n\n" for message in group)
        if role != "system":
            if role == "user" and waiting:
                group[0] = _add_text(group[0], "".join(waiting), before=True)
                waiting = []
            folded += group
        elif after == "user":
            waiting.append(system_text)
        elif folded and folded[-1].role == "user":
            folded[-1] = _add_text(folded[-1], "\n\n" + system_text.rstrip("\n"), before=False)
        elif after != "tool" and capabilities.repeated_roles:
            folded.append(text_message("user", system_text.rstrip("\n")))
        else:
            waiting.append(system_text)
    return _append_to_last_user(folded, "".join(waiting).rstrip("\n")) if waiting else folded


def _append_to_last_user(messages: list[Message], system_text: str) -> list[Message]:
    last = next((index for index in range(len(messages) - 1, -1, -1) if messages[index].role == "user"), None)
    if last is None:
        return [*messages, text_message("user", system_text)]
    messages[last] = _add_text(messages[last], f"\n\n{system_text}", before=False)
    return messages


def _add_text(message: Message, text: str, before: bool) -> Message:
    if not message.text:
        text = text.strip("\n")
    parts = (Text(text), *message.parts) if before else (*message.parts, Text(text))
    return msgspec.structs.replace(message, parts=parts)


def _merge_same_roles(messages: Iterable[Message]) -> Iterator[Message]:
    for role, group in groupby(messages, key=lambda message: message.role):
        same = list(group)
        if role == "tool" or len(same) == 1:
            yield from same
        else:
            yield _merge(same)


def _merge(messages: Sequence[Message]) -> Message:
    thought = "\n\n".join(message.reasoning for message in messages if message.reasoning)
    text = "\n\n".join(message.text for message in messages if message.text)
    parts: list[Part] = [Reasoning(thought)] if thought else []
    parts += [Text(text), *(call for message in messages for call in message.tool_calls)]
    names = {message.name for message in messages}
    return Message(messages[0].role, tuple(parts), names.pop() if len(names) == 1 else None)
