"""Edits of a conversation that the server makes before the model sees it, and what they did.

    edit   := ClearToolUses | ClearThinking | Compact
    result := Compacting* ContextEdited          before the events of the reply, if an edit changed the conversation

`pipeline.context_edits` has the rules of their order, `core.summary` those of the conversation after a compaction.
System and developer messages, and the tools, are never changed.
"""

import msgspec

from dragoman.core.events import Usage

DEFAULT_THRESHOLD = 150_000
"""Tokens of a prompt above which it is compacted, if the request names no other number."""


class ClearToolUses(msgspec.Struct, frozen=True, tag="clear_tool_uses"):
    """Replace the results of old tool calls by a placeholder.

    It happens above `tokens` tokens of the prompt or `uses` calls; None means any number. The last `keep` calls stay,
    and all calls of the tools in `exclude`. `inputs` are the tools whose arguments are cleared too; None means all.
    """

    path: str
    tokens: int | None = 100_000
    uses: int | None = None
    keep: int = 3
    at_least: int = 0
    """Tokens that must become free; otherwise nothing is cleared."""
    exclude: tuple[str, ...] = ()
    inputs: tuple[str, ...] | None = ()


class ClearThinking(msgspec.Struct, frozen=True, tag="clear_thinking"):
    """Remove the reasoning of all turns of the assistant but the last `keep` ones that have reasoning."""

    path: str
    keep: int = 1


class Compact(msgspec.Struct, frozen=True, tag="compact"):
    """Compact the conversation above `threshold` tokens of the prompt, or when little room is left in the context.

    Without a threshold it is always compacted. With `is_compaction_only`, the model does not answer afterwards.
    """

    path: str
    threshold: int | None = None
    is_compaction_only: bool = False
    instructions: str | None = None
    """The prompt for the summary; None means that of the configuration."""


ContextEdit = ClearToolUses | ClearThinking | Compact


class AppliedEdit(msgspec.Struct, frozen=True):
    """What `ClearToolUses` or `ClearThinking` did: how many uses or turns, and how many tokens of the prompt."""

    edit: ClearToolUses | ClearThinking
    count: int
    tokens: int


class Compaction(msgspec.Struct, frozen=True):
    """`kept` is the number of the most recent user messages that stay beside the summary. The `pending` last ones of
    them have no reply yet."""

    summary: str
    kept: int
    pending: int
    usage: Usage


class Compacting(msgspec.Struct, frozen=True):
    """The model is writing a summary. Repeated while it does, so that the stream is not silent."""


class ContextEdited(msgspec.Struct, frozen=True):
    """`ignored` are the edits that need a count of tokens, if the engine cannot count them."""

    applied: tuple[AppliedEdit, ...] = ()
    compaction: Compaction | None = None
    ignored: tuple[str, ...] = ()


ContextEvent = Compacting | ContextEdited
