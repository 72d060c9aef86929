"""The configuration of a llama model."""

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from dragoman.core.types import Count
from dragoman.engines.llama.adapters import Entry
from dragoman.engines.llama.binding import MAX_SEQUENCES, Kv

MAX_THREADS = 512
"""llama.cpp aborts the process with more."""
MAX_CONTEXT = 20_000_000
MAX_BATCH = 65_536
AUTO_LAYOUT_WARNING = "auto has no effect: run `dragoman tune {}` to find the fastest layout for this machine"


class LlamaOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: str
    format: str | None = None
    """Syntax of the model's thinking and tool calls. None: detected from the chat template."""
    template_options: tuple[str, ...] = ()
    """Variables of the chat template that clients may set."""
    context: Annotated[int, msgspec.Meta(ge=1, le=MAX_CONTEXT)] | None = None
    """Tokens of prompt and reply together. None: the trained length, or less if the memory is small."""
    slots: Annotated[int, msgspec.Meta(ge=1, le=MAX_SEQUENCES)] = 4
    threads: Annotated[int, msgspec.Meta(ge=1, le=MAX_THREADS)] | None = None
    """Compute threads. None: what `dragoman tune` recorded, else one for each physical core."""
    batch: Annotated[int, msgspec.Meta(ge=1, le=MAX_BATCH)] = 512
    """Maximum number of prompt tokens in one step."""
    cache_sequences: Annotated[int, msgspec.Meta(ge=0, le=MAX_SEQUENCES)] | None = None
    """Sequences that cache prefixes beside those in the slots. None: as many as slots, or fewer if the memory is
    small."""
    isolate: bool = False
    """Share prefixes only between requests of one principal, so that response times reveal nothing about the prompts
    of others."""
    flash_attention: bool = True
    """Faster for short texts, slower for long ones. Without it, log probabilities of f16 weights depend much less on
    the requests that are decoded in the same step."""
    kv: Kv = "f16"
    """Type of the KV cache. q8_0 takes little more than half of the memory."""
    adapters: Mapping[str, Entry] = {}
    """LoRA adapters by the name of the resulting model: a path, or a path and a scale."""
    speculation: bool = True
    """Decode several tokens in one step if they are likely to repeat earlier text."""
    gap_ms: Count = 150
    """Target time between two tokens of a reply while prompts are being processed. Steps may take nearly twice as long
    if that makes long prompts much faster."""
    layout: Literal["auto", "as-is"] | None = None
    """`as-is` ignores what `dragoman tune` recorded. `auto` is the same as None, with a warning."""

    def __post_init__(self) -> None:
        if self.kv != "f16" and not self.flash_attention:
            raise ValueError(f"kv: {self.kv} needs flash attention: remove flash_attention: false")
        if self.slots + (self.cache_sequences or 0) > MAX_SEQUENCES:
            raise ValueError(
                f"cache_sequences: {self.cache_sequences} and {self.slots} slots are more than {MAX_SEQUENCES}, "
                "the maximum of llama.cpp: lower one of them"
            )
