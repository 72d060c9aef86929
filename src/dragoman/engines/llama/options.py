"""What a configuration may say about a model of llama, beside its name."""

from collections.abc import Mapping
from typing import Annotated

import msgspec

from dragoman.core.types import Count
from dragoman.engines.llama.adapters import Entry
from dragoman.engines.llama.binding import MAX_SEQUENCES
from dragoman.engines.llama.kv_size import Kv
from dragoman.engines.llama.tuning.layout import Layout

MOST_THREADS = 512
"""That llama.cpp computes with; more end the process."""
MOST_CONTEXT = 20_000_000
"""No model was made for as many."""
MOST_BATCH = 65_536
"""Nobody waits for a step of so many rows."""


class LlamaOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: str
    format: str | None = None
    """The syntax in which the model writes thoughts and calls; None: what its chat template shows."""
    template_options: tuple[str, ...] = ()
    """Variables of the chat template that callers may set."""
    context: Annotated[int, msgspec.Meta(ge=1, le=MOST_CONTEXT)] | None = None
    """Tokens of prompt and reply together; None: as many as the model was trained for, if the memory is large."""
    slots: Annotated[int, msgspec.Meta(ge=1, le=MAX_SEQUENCES)] = 4
    threads: Annotated[int, msgspec.Meta(ge=1, le=MOST_THREADS)] | None = None
    """Those that compute; None: as many as are fastest, which is tried out."""
    batch: Annotated[int, msgspec.Meta(ge=1, le=MOST_BATCH)] = 512
    """The most prompt tokens that are taken in at once."""
    cache_sequences: Annotated[int, msgspec.Meta(ge=0, le=MAX_SEQUENCES)] | None = None
    """Texts that are kept beside those in the slots, for requests that begin alike; None: as many as there are slots,
    if the memory is large."""
    isolate: bool = False
    """Beginnings are shared only between requests of one principal: nobody can tell from the time that an answer takes
    what others have asked."""
    flash_attention: bool = True
    """Where it helps; without it long texts are written faster, short ones slower. Weights that are half floats give
    then the same log probabilities, nearly to the bit, whoever else is being answered; those of fewer bits do not."""
    kv: Kv = "f16"
    """How exactly the state of texts is kept: with q8_0 it takes little more than half of the memory."""
    adapters: Mapping[str, Entry] = {}
    """By the name of the model that each makes of this one: a path, or a path and a scale."""
    speculation: bool = True
    """Tokens that are likely to come as they came before in the text are decoded together, where that pays."""
    gap_ms: Count = 150
    """How long somebody who is being answered may wait for the next token while prompts are taken in: as a rule, and
    nearly twice as long where that gets long prompts done much sooner."""
    layout: Layout = "auto"
    """Whether another layout of the weights may be used where it is faster here."""

    def __post_init__(self) -> None:
        """What does not go together is told with the line of the file that it stands in."""
        if self.kv != "f16" and not self.flash_attention:
            raise ValueError(f"kv: {self.kv} needs flash attention: leave out flash_attention: false")
        if self.slots + (self.cache_sequences or 0) > MAX_SEQUENCES:
            raise ValueError(
                f"cache_sequences: {self.cache_sequences} and {self.slots} slots are more than {MAX_SEQUENCES} texts, "
                "which is the most that llama.cpp keeps: lower one of them"
            )
