"""What numbers and words of a configuration may be."""

from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Word = Annotated[str, msgspec.Meta(min_length=1)]
