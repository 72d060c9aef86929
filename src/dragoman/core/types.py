"""What numbers and words of a configuration may be."""

from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=1)]
LONGEST = 366 * 86400.0
Seconds = Annotated[float, msgspec.Meta(gt=0, le=LONGEST)]
Patience = Annotated[float, msgspec.Meta(ge=0, le=LONGEST)]
"""Seconds that may be none at all."""
Word = Annotated[str, msgspec.Meta(min_length=1)]
