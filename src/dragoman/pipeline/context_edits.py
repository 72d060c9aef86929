"""Applies the edits of a request to its conversation, before the model sees it.

    request with edits -> clear tool uses | clear thinking | compact -> request without edits

Rules
1. What is cleared is cleared first; then the conversation is compacted, if it is still too long.
2. An engine that cannot count tokens gets the conversation as it is, unless it is always compacted.
3. A conversation that does not fit into the context is above every threshold of tokens.
4. The oldest tool uses are cleared first. A cleared result stays in its place, as a short text.
5. A turn of the assistant ends with the next user message. It may have several thoughts, between calls and results.
"""

from collections.abc import Sequence

import msgspec

from dragoman.core.edits import (
    AppliedEdit,
    ClearThinking,
    ClearToolUses,
    Compact,
    Compaction,
    ContextEdit,
    ContextEdited,
)
from dragoman.core.engine import Engine
from dragoman.core.events import Event, Finished, Started, Usage
from dragoman.core.request import GenerationRequest, Message, Part, Reasoning, Text, ToolCall, ToolResult
from dragoman.pipeline.compaction import compact
from dragoman.pipeline.summary_writer import OnContext, RunGeneration, SummaryOptions, SummaryWriter
from dragoman.pipeline.token_counter import TokenCounter

CLEARED = (Text("[This result was removed to save space.]"),)
CLEARED_ARGUMENTS = "{}"
COMPACTION_ONLY: Sequence[Event] = (Started(), Finished("compaction", usage=Usage()))
"""The events of a reply that has only a compaction."""


async def edit_context(
    engine: Engine, request: GenerationRequest, options: SummaryOptions, run: RunGeneration, on_event: OnContext
) -> GenerationRequest | None:
    """Return the request that the model gets; None if it gets none, because the reply is only a compaction."""
    counter = TokenCounter(engine, request.model)
    edited, applied = await clear_context(request, counter)
    compaction: Compaction | None = None
    is_compaction_only = False
    for edit in request.edits:
        if isinstance(edit, Compact) and compaction is None:
            compacted = await compact(edited, edit, SummaryWriter(engine, counter, options, run, on_event))
            if compacted is not None:
                (edited, compaction), is_compaction_only = compacted, edit.is_compaction_only
    ignored = () if counter.can_count else tuple(edit.path for edit in request.edits if needs_count(edit))
    if applied or compaction is not None or ignored:
        pause = on_event(ContextEdited(applied, compaction, ignored))
        if pause is not None:
            await pause
    return None if is_compaction_only else edited


def needs_count(edit: ContextEdit) -> bool:
    return not isinstance(edit, Compact) or edit.threshold is not None


async def clear_context(
    request: GenerationRequest, counter: TokenCounter
) -> tuple[GenerationRequest, tuple[AppliedEdit, ...]]:
    """Apply the edits that clear something, and return the request without edits."""
    edited, applied = msgspec.structs.replace(request, edits=()), list[AppliedEdit]()
    for edit in request.edits:
        if isinstance(edit, Compact):
            continue
        messages, count = _clear(edited.messages, edit)
        before = await counter.count(edited) if count else None
        if before is None or not _is_above(edit, before, counter.context):
            continue
        shorter = msgspec.structs.replace(edited, messages=messages)
        freed = before - (await counter.count(shorter) or 0)
        if isinstance(edit, ClearThinking) or freed >= edit.at_least:
            edited = shorter
            applied.append(AppliedEdit(edit, count, max(0, freed)))
    return edited, tuple(applied)


def _is_above(edit: ClearToolUses | ClearThinking, tokens: int, context: int | None) -> bool:
    """Whether a prompt with this many tokens is long enough for the edit."""
    if isinstance(edit, ClearThinking) or edit.tokens is None:
        return True
    return tokens > edit.tokens or (context is not None and tokens >= context)


def _clear(messages: Sequence[Message], edit: ClearToolUses | ClearThinking) -> tuple[tuple[Message, ...], int]:
    """Return the messages after an edit, and how many uses or turns it clears."""
    return clear_thinking(messages, edit) if isinstance(edit, ClearThinking) else clear_tool_uses(messages, edit)


def clear_tool_uses(messages: Sequence[Message], edit: ClearToolUses) -> tuple[tuple[Message, ...], int]:
    calls = [call for message in messages for call in message.tool_calls]
    if edit.uses is not None and len(calls) <= edit.uses:
        return tuple(messages), 0
    recent = max(0, len(calls) - edit.keep)
    # Some clients use an id several times.
    old = {call.id for call in calls[:recent]} - {call.id for call in calls[recent:]}
    old -= {call.id for call in calls if call.name in edit.exclude}
    cleared = set[str]()

    def clear(part: Part) -> Part:
        if isinstance(part, ToolResult) and part.call_id in old and part.content != CLEARED:
            cleared.add(part.call_id)
            return msgspec.structs.replace(part, content=CLEARED)
        if isinstance(part, ToolCall) and part.id in old and (edit.inputs is None or part.name in edit.inputs):
            return msgspec.structs.replace(part, arguments=CLEARED_ARGUMENTS)
        return part

    changed = tuple(msgspec.structs.replace(message, parts=tuple(map(clear, message.parts))) for message in messages)
    return changed, len(cleared)


def clear_thinking(messages: Sequence[Message], edit: ClearThinking) -> tuple[tuple[Message, ...], int]:
    turns: list[list[int]] = [[]]
    """The messages with reasoning of each turn."""
    for at, message in enumerate(messages):
        if message.role == "user" and turns[-1]:
            turns.append([])
        if any(isinstance(part, Reasoning) for part in message.parts):
            turns[-1].append(at)
    thinking = [turn for turn in turns if turn]
    old = thinking[: max(0, len(thinking) - edit.keep)]
    changed = list(messages)
    for at in (at for turn in old for at in turn):
        parts = tuple(part for part in messages[at].parts if not isinstance(part, Reasoning))
        changed[at] = msgspec.structs.replace(messages[at], parts=parts)
    return tuple(message for message in changed if message.parts), len(old)
