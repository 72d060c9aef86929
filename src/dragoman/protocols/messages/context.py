"""Context management of Anthropic messages: the edits of a request, the compaction blocks, and the field of a reply.

    context_management := {edits: [clear_tool_uses_20250919 | clear_thinking_20251015 | compact_20260112]}
    compaction         := {type: summarize, instructions?}         compacts now, and the model does not answer
    block              := {type: compaction, content, signature}   the summary, as text

Rules
1. What is before the last compaction block with content is not read. A block without content replaces nothing.
2. A signature of Dragoman must match the content. Others cannot be checked, and the content is readable anyway.
3. A reply has the field `context_management` if the request has edits.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from dragoman.core.edits import (
    DEFAULT_THRESHOLD,
    AppliedEdit,
    ClearThinking,
    ClearToolUses,
    Compact,
    Compaction,
    ContextEdit,
    ContextEdited,
)
from dragoman.core.errors import BadRequest
from dragoman.core.events import Usage
from dragoman.core.features import Feature
from dragoman.core.request import Asked
from dragoman.core.types import Count, CountOrZero
from dragoman.protocols import json_body
from dragoman.protocols.sealed import Seal

FIELD, SUMMARIZE = "context_management", "compaction"
CLEAR_TOOL_USES, CLEAR_THINKING = "clear_tool_uses_20250919", "clear_thinking_20251015"
COMPACT = "compact_20260112"
SIGNATURE = Seal.COMPACTION_SIGNATURE
EncodeUsage = Callable[[Usage], dict[str, Any]]


class InputTokens(msgspec.Struct, frozen=True):
    type: Literal["input_tokens"]
    value: Count


class AtLeastTokens(msgspec.Struct, frozen=True):
    type: Literal["input_tokens"]
    value: CountOrZero


class ToolUsesTrigger(msgspec.Struct, frozen=True):
    type: Literal["input_tokens", "tool_uses"]
    value: Count


class KeptToolUses(msgspec.Struct, frozen=True):
    type: Literal["tool_uses"]
    value: CountOrZero


class KeptThinking(msgspec.Struct, frozen=True):
    type: Literal["thinking_turns", "all"]
    value: Count | None = None


class ClearToolUsesField(msgspec.Struct, frozen=True):
    trigger: ToolUsesTrigger | None = None
    keep: KeptToolUses | None = None
    clear_at_least: AtLeastTokens | None = None
    exclude_tools: list[str] | None = None
    clear_tool_inputs: bool | list[str] | None = None


class ClearThinkingField(msgspec.Struct, frozen=True):
    keep: Literal["all"] | KeptThinking | None = None


class CompactField(msgspec.Struct, frozen=True):
    trigger: InputTokens | None = None
    pause_after_compaction: bool | None = None
    instructions: str | None = None


class SummarizeField(msgspec.Struct, frozen=True):
    type: Literal["summarize"]
    instructions: str | None = None


class EditField(msgspec.Struct, frozen=True):
    type: str


class ManagementField(msgspec.Struct, frozen=True):
    edits: list[dict[str, Any]] | None = None


class CompactionBlock(msgspec.Struct, frozen=True):
    content: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    signature: str | None = None


def decode_edits(parsed: Mapping[str, Any], asked: list[Asked]) -> tuple[ContextEdit, ...]:
    """Decode the fields `context_management` and `compaction`."""
    if parsed.get(SUMMARIZE) is not None:
        return (_decode_summarize(parsed),)
    if parsed.get(FIELD) is None:
        return ()
    management = json_body.convert(parsed[FIELD], ManagementField, FIELD)
    found = list[ContextEdit]()
    for at, edit in enumerate(management.edits or ()):
        path = f"{FIELD}.edits[{at}]"
        kind = json_body.convert(edit, EditField, path).type
        if kind not in DECODERS:
            # Claude Code sends the newest edits to every server.
            asked.append(Asked(Feature.UNKNOWN, path))
        elif (decoded := DECODERS[kind](edit, path)) is not None:
            asked.append(Asked(Feature.COUNT_TOKENS, path))
            found.append(decoded)
    return tuple(found)


def _clear_tool_uses(edit: dict[str, Any], path: str) -> ClearToolUses:
    field, defaults = json_body.convert(edit, ClearToolUsesField, path), ClearToolUses(path)
    tokens, uses, inputs = defaults.tokens, defaults.uses, field.clear_tool_inputs
    if field.trigger is not None:
        is_tokens = field.trigger.type == "input_tokens"
        tokens, uses = (field.trigger.value, None) if is_tokens else (None, field.trigger.value)
    return ClearToolUses(
        path,
        tokens,
        uses,
        keep=defaults.keep if field.keep is None else field.keep.value,
        at_least=0 if field.clear_at_least is None else field.clear_at_least.value,
        exclude=tuple(field.exclude_tools or ()),
        inputs=None if inputs is True else tuple(inputs or ()),
    )


def _clear_thinking(edit: dict[str, Any], path: str) -> ClearThinking | None:
    keep = json_body.convert(edit, ClearThinkingField, path).keep
    if keep == "all" or (isinstance(keep, KeptThinking) and keep.type == "all"):
        return None
    if isinstance(keep, KeptThinking) and keep.value is None:
        raise json_body.missing_field(f"{path}.keep.value")
    return ClearThinking(path, (keep.value if isinstance(keep, KeptThinking) else None) or ClearThinking(path).keep)


def _compact(edit: dict[str, Any], path: str) -> Compact:
    field = json_body.convert(edit, CompactField, path)
    threshold = DEFAULT_THRESHOLD if field.trigger is None else field.trigger.value
    return Compact(path, threshold, bool(field.pause_after_compaction), _instructions(field.instructions))


DECODERS: dict[str, Callable[[dict[str, Any], str], ContextEdit | None]] = {
    CLEAR_TOOL_USES: _clear_tool_uses,
    CLEAR_THINKING: _clear_thinking,
    COMPACT: _compact,
}
"""They return None for an edit that changes nothing."""


def _instructions(text: str | None) -> str | None:
    return text if text and not text.isspace() else None


def _decode_summarize(parsed: Mapping[str, Any]) -> Compact:
    field = json_body.convert(parsed[SUMMARIZE], SummarizeField, SUMMARIZE)
    choice = parsed.get("tool_choice")
    is_forced = isinstance(choice, dict) and choice.get("type") in ("any", "tool")
    without_reply = {
        FIELD: parsed.get(FIELD) is not None,
        "stop_sequences": bool(parsed.get("stop_sequences")),
        "output_format": parsed.get("output_format") is not None,
        "output_config.format": (parsed.get("output_config") or {}).get("format") is not None,
        "tool_choice": is_forced,
    }
    for name, is_sent in without_reply.items():
        if is_sent:
            raise BadRequest(f"{name}: cannot be combined with {SUMMARIZE}, which gets no reply", param=name)
    return Compact(SUMMARIZE, is_compaction_only=True, instructions=_instructions(field.instructions))


def check_block(block: CompactionBlock, path: str) -> None:
    if block.content is not None and SIGNATURE.is_broken(block.signature or "", block.content):
        raise BadRequest(f"{path}.signature: does not match the content", param=f"{path}.signature")


def find_compaction(contents: Sequence[Any]) -> tuple[int, int] | None:
    """Return the message of the last compaction block with content, and the block in it."""
    for at in range(len(contents) - 1, -1, -1):
        blocks = contents[at] if isinstance(contents[at], list) else ()
        for block_at in range(len(blocks) - 1, -1, -1):
            block = blocks[block_at]
            if block.get("type") == "compaction" and block.get("content") is not None:
                return at, block_at
    return None


def encode_block(compaction: Compaction) -> dict[str, Any]:
    summary = compaction.summary
    return {"type": "compaction", "content": summary, "signature": SIGNATURE.sign(summary)}


def stream_block(compaction: Compaction, index: int, edits: Sequence[ContextEdit]) -> Iterator[dict[str, Any]]:
    """Yield the events of a block. After the field `compaction` it arrives whole, as clients expect."""
    block, is_whole = encode_block(compaction), any(edit.path == SUMMARIZE for edit in edits)
    opening = block if is_whole else {**block, "content": None, "encrypted_content": None}
    yield {"type": "content_block_start", "index": index, "content_block": opening}
    if not is_whole:
        delta = {"type": "compaction_delta", "content": compaction.summary, "encrypted_content": None}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
    yield {"type": "content_block_stop", "index": index}


def encode_iterations(edited: ContextEdited | None, message: Usage, encode: EncodeUsage) -> dict[str, Any]:
    """Return the field of the usage that a compaction adds. Its tokens are not in the other fields."""
    if edited is None or edited.compaction is None:
        return {}
    usages = [("compaction", edited.compaction.usage), *([] if message == Usage() else [("message", message)])]
    iterations = [{"type": kind, **encode(usage)} for kind, usage in usages]
    for iteration in iterations:
        del iteration["output_tokens_details"]
    return {"iterations": iterations}


def encode_edited(edits: Sequence[ContextEdit], edited: ContextEdited | None) -> dict[str, Any]:
    """Return the field of a reply about the edits of its request, if it has any."""
    if not any(edit.path.startswith(FIELD) for edit in edits):
        return {}
    return {FIELD: {"applied_edits": [_encode_applied(applied) for applied in (edited and edited.applied) or ()]}}


def _encode_applied(applied: AppliedEdit) -> dict[str, Any]:
    is_thinking = isinstance(applied.edit, ClearThinking)
    return {
        "type": CLEAR_THINKING if is_thinking else CLEAR_TOOL_USES,
        "cleared_thinking_turns" if is_thinking else "cleared_tool_uses": applied.count,
        "cleared_input_tokens": applied.tokens,
    }
