"""Constrained types for settings, the scopes of keys, and priorities."""

from typing import Annotated, Literal

import msgspec

Count = Annotated[int, msgspec.Meta(ge=1)]
CountOrZero = Annotated[int, msgspec.Meta(ge=0)]
MAX_SECONDS = 366 * 86400.0
Seconds = Annotated[float, msgspec.Meta(gt=0, le=MAX_SECONDS)]
SecondsOrZero = Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)]
Word = Annotated[str, msgspec.Meta(min_length=1)]
ReasoningField = Literal["reasoning_content", "reasoning", "thought"]
Priority = Literal["interactive", "batch"]
"""Batch requests use the slots and the time that interactive requests leave free."""
RouteScope = Literal[
    "chat",
    "completions",
    "messages",
    "responses",
    "embeddings",
    "rerank",
    "files",
    "batches",
    "models",
    "tokens",
    "stats",
    "admin",
]
"""What a key may be allowed to use."""
