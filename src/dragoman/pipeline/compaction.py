"""Compacts a conversation that has become too long, if it has.

Rules
1. With a threshold, a prompt is compacted if it has more tokens, or if it leaves less room in the context than a
   summary needs: later it would be too late.
2. The most recent user messages stay as they are, as many as need at most a third of that length. If the model answers
   afterwards, those without a reply stay as long as the context holds them beside the summary and a reply.
3. If nothing would be left out, nothing is compacted: the system messages and the tools are too long then.
4. A message that the reply continues stays at the end.
"""

import msgspec

from dragoman.core.edits import DEFAULT_THRESHOLD, Compact, Compaction
from dragoman.core.errors import BadRequest
from dragoman.core.request import GenerationRequest
from dragoman.core.summary import (
    compact_messages,
    count_pending,
    is_system_message,
    is_user_message,
    last_user_messages,
)
from dragoman.pipeline.summary_writer import SummaryWriter
from dragoman.pipeline.token_counter import TokenCounter
from dragoman.pipeline.transcript import Transcript

KEPT_SHARE = 3
"""The kept messages have at most this part of the allowed length."""


async def compact(
    request: GenerationRequest, edit: Compact, writer: SummaryWriter
) -> tuple[GenerationRequest, Compaction] | None:
    """Return the compacted request; None if it need not be compacted, or if its tokens cannot be counted."""
    counter, threshold = writer.counter, edit.threshold
    limits = [] if threshold is None else [threshold]
    if counter.context is not None:
        limits.append(counter.context - writer.options.limit(counter.context))
    limit = min(limits, default=DEFAULT_THRESHOLD)
    if threshold is not None and (await counter.count(request) or 0) <= limit:
        return None
    prefill_message = request.messages[-1:] if request.continues_last else ()
    request = msgspec.structs.replace(
        request, messages=request.messages[: len(request.messages) - len(prefill_message)], continues_last=False
    )
    history = [message for message in request.messages if not is_system_message(message)]
    pending = count_pending(request.messages)
    kept = await _count_kept(request, counter, limit // KEPT_SHARE)
    if threshold is not None and kept < pending and await _can_keep(request, pending, writer):
        kept = pending
    if threshold is not None and kept == len(history):
        return None
    transcript = Transcript(history)
    if not transcript.text:
        raise BadRequest(f"{edit.path}: there is no conversation to compact", param=edit.path)
    summary, usage = await writer.write(request, transcript, edit.instructions)
    pending = min(kept, pending)
    messages = (*compact_messages(request.messages, summary, kept, pending), *prefill_message)
    compacted = msgspec.structs.replace(request, messages=messages, continues_last=bool(prefill_message))
    return compacted, Compaction(summary, kept, pending, usage)


async def _can_keep(request: GenerationRequest, pending: int, writer: SummaryWriter) -> bool:
    """Whether the context holds the messages that have no reply yet, beside the summary and a reply."""
    counter = writer.counter
    if counter.context is None:
        return True
    heads = filter(is_system_message, request.messages)
    messages = (*heads, *last_user_messages(request.messages, pending))
    tokens = await counter.count(msgspec.structs.replace(request, messages=messages))
    return tokens is None or tokens + 2 * writer.options.limit(counter.context) <= counter.context


async def _count_kept(request: GenerationRequest, counter: TokenCounter, most: int) -> int:
    """Count the most recent user messages that have at most this many tokens; all, if they cannot be counted."""

    async def fits(count: int) -> bool:
        messages = last_user_messages(request.messages, count)
        tokens = await counter.count(msgspec.structs.replace(request, messages=messages, tools=()))
        return tokens is None or tokens <= most

    users = sum(map(is_user_message, request.messages))
    if not users or await fits(users):
        return users
    low, high = 0, users
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if await fits(middle) else (low, middle)
    return low
