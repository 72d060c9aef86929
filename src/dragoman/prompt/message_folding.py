"""A conversation put so that a template takes it: the same words, as close to their place as the template allows.

Rules
1. What the template takes as it is stays as it is.
2. System messages: several at the beginning become one; a later one becomes part of the user message next to it,
   marked as what it is; without a system role the first goes to the head of the first user message.
3. Where roles must alternate, messages of the same role become one, with a blank line between them.
4. Calls that the template shows only one by one become turns of their own, each followed by its result.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Literal

import msgspec

from dragoman.core.request import Message, Part, Reasoning, Role, Text, ToolCall, ToolResult
from dragoman.prompt.template_capabilities import Habits

CallIds = Literal["any", "kimi", "mistral"]

_SAYS_ERROR = re.compile(r"\W*error", re.IGNORECASE)
_MISTRAL_ID = re.compile(r"[a-zA-Z0-9]{9}")


def singly(messages: Iterable[Message], ids: CallIds) -> Iterator[Message]:
    """Each tool result a message of its own, which knows the name of its function. Ids as the template wants them."""
    made: dict[str, ToolCall] = {}
    number = 0
    for message in messages:
        for result in message.parts:
            if isinstance(result, ToolResult):
                call = made.get(result.call_id, ToolCall(_own_id(result.call_id, ids), message.name or "", ""))
                answer = ToolResult(call.id, (Text(_told(result)),))
                yield Message("tool", (answer,), message.name or call.name or None)
        parts: list[Part] = [part for part in message.parts if not isinstance(part, ToolResult)]
        for at, part in enumerate(parts):
            if isinstance(part, ToolCall):
                parts[at] = made[part.id] = msgspec.structs.replace(part, id=call_id(part, number, ids))
                number += 1
        if parts or not message.parts:
            yield Message("system" if message.role == "developer" else message.role, tuple(parts), message.name)


def text_message(role: Role, text: str) -> Message:
    return Message(role, (Text(text),))


def call_id(call: ToolCall, number: int, ids: CallIds) -> str:
    return f"functions.{call.name}:{number}" if ids == "kimi" else _own_id(call.id, ids)


def _own_id(given: str, ids: CallIds) -> str:
    if ids != "mistral" or _MISTRAL_ID.fullmatch(given):
        return given
    return hashlib.sha256(given.encode("utf-8", "replace")).hexdigest()[:9]


def _told(result: ToolResult) -> str:
    text = "".join(part.text for part in result.content if isinstance(part, Text))
    return f"Error: {text}" if result.is_error and not _SAYS_ERROR.match(text) else text


def fitted(messages: Sequence[Message], habits: Habits) -> tuple[Message, ...]:
    found = list(messages)
    if not habits.parallel_calls:
        found = list(_one_by_one(found))
    found = [part for message in found for part in _said_apart(message, habits)]
    found = _fold_systems(found, habits)
    if not habits.repeats:
        found = list(_alternating(found))
    if not habits.assistant_first:
        lead = next((at for at, message in enumerate(found) if message.role != "system"), len(found))
        if lead < len(found) and found[lead].role != "user":
            found.insert(lead, text_message("user", ""))
    return tuple(found)


def _one_by_one(messages: Sequence[Message]) -> Iterator[Message]:
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        calls = [part for part in message.parts if isinstance(part, ToolCall)]
        if len(calls) < 2:
            yield message
            continue
        end = next((end for end in range(at, len(messages)) if messages[end].role != "tool"), len(messages))
        yield from _pairs(message, calls, messages[at:end])
        at = end


def _pairs(message: Message, calls: Sequence[ToolCall], results: Sequence[Message]) -> Iterator[Message]:
    rest = [part for part in message.parts if not isinstance(part, ToolCall)]
    answers: dict[str | None, list[Message]] = {}
    for result in results:
        answers.setdefault(_call_of(result), []).append(result)
    for call in calls:
        yield Message("assistant", (*rest, call), message.name)
        rest = []
        yield from answers.pop(call.id, [])
    for others in answers.values():
        yield from others


def _call_of(message: Message) -> str | None:
    return next((part.call_id for part in message.parts if isinstance(part, ToolResult)), None)


def _said_apart(message: Message, habits: Habits) -> Iterator[Message]:
    """Text beside calls, where the template would lose it or refuses it."""
    kinds = {type(part) for part in message.parts}
    if not kinds >= {Text, ToolCall} or not message.text:
        yield message
    elif not habits.text_with_thought and Reasoning in kinds:
        thought = "".join(part.text for part in message.parts if isinstance(part, Reasoning))
        calls = [part for part in message.parts if isinstance(part, ToolCall)]
        yield Message("assistant", (Reasoning(f"{thought}\n\n{message.text}"), *calls), message.name)
    elif not habits.text_with_calls and habits.repeats:
        yield Message("assistant", (Text(message.text),), message.name)
        yield Message("assistant", tuple(part for part in message.parts if not isinstance(part, Text)), message.name)
    else:
        yield message


def _fold_systems(messages: list[Message], habits: Habits) -> list[Message]:
    lead = next((at for at, message in enumerate(messages) if message.role != "system"), len(messages))
    head, rest = messages[:lead], messages[lead:]
    if not habits.late_system and any(message.role == "system" for message in rest):
        rest = _beside_users(rest, habits)
    if len(head) > 1 and not habits.systems:
        head = [_merged(head)]
    working = bool(rest) and rest[-1].role == "tool"
    if head and not (habits.system and (habits.system_with_results or not working)):
        text = "\n\n".join(message.text for message in head)
        if rest and rest[0].role == "user":
            return [_with_text(rest[0], f"{text}\n\n", before=True), *rest[1:]]
        return [text_message("user", text), *rest]
    return head + rest


def _beside_users(messages: Sequence[Message], habits: Habits) -> list[Message]:
    """Each system message goes to the user message after it, or before it, or is one itself; else to the nearest that
    follows, or that came before."""
    groups = [(role, list(group)) for role, group in groupby(messages, key=lambda message: message.role)]
    following = [role for role, _ in groups[1:]] + [None]
    found: list[Message] = []
    waiting: list[str] = []
    for (role, group), after in zip(groups, following, strict=True):
        told = "".join(f"<system>\n{message.text}\n</system>\n\n" for message in group)
        if role != "system":
            if role == "user" and waiting:
                group[0] = _with_text(group[0], "".join(waiting), before=True)
                waiting = []
            found += group
        elif after == "user":
            waiting.append(told)
        elif found and found[-1].role == "user":
            found[-1] = _with_text(found[-1], "\n\n" + told.rstrip("\n"), before=False)
        elif after != "tool" and habits.repeats:
            found.append(text_message("user", told.rstrip("\n")))
        else:
            waiting.append(told)
    return _put_back(found, "".join(waiting).rstrip("\n")) if waiting else found


def _put_back(messages: list[Message], told: str) -> list[Message]:
    last = next((at for at in range(len(messages) - 1, -1, -1) if messages[at].role == "user"), None)
    if last is None:
        return [*messages, text_message("user", told)]
    messages[last] = _with_text(messages[last], f"\n\n{told}", before=False)
    return messages


def _with_text(message: Message, text: str, before: bool) -> Message:
    if not message.text:
        text = text.strip("\n")
    parts = (Text(text), *message.parts) if before else (*message.parts, Text(text))
    return msgspec.structs.replace(message, parts=parts)


def _alternating(messages: Iterable[Message]) -> Iterator[Message]:
    for role, group in groupby(messages, key=lambda message: message.role):
        same = list(group)
        if role == "tool" or len(same) == 1:
            yield from same
        else:
            yield _merged(same)


def _merged(messages: Sequence[Message]) -> Message:
    texts = [message.text for message in messages if message.text]
    thoughts = ["".join(part.text for part in message.parts if isinstance(part, Reasoning)) for message in messages]
    thought = "\n\n".join(filter(None, thoughts))
    calls = [part for message in messages for part in message.parts if isinstance(part, ToolCall)]
    names = {message.name for message in messages}
    return Message(
        messages[0].role,
        (*([Reasoning(thought)] if thought else []), Text("\n\n".join(texts)), *calls),
        names.pop() if len(names) == 1 else None,
    )
