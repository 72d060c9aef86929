"""What is allowed and yet hardly meant: `dragoman check` tells it, and the server starts all the same."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from dragoman.config.places import Mistake

if TYPE_CHECKING:
    from dragoman.config import Settings

_WILD = re.compile(r"[*?]")


def doubts(settings: "Settings") -> Iterator[Mistake]:
    for at, folder in enumerate(settings.models_dir or ()):
        if not Path(folder).expanduser().is_dir():
            yield Mistake(f"models_dir[{at}]", f"there is no folder {folder} yet, so it has no models")
    for pattern in settings.aliases:
        beginning = _WILD.split(pattern)[0]
        above = next((model for model in settings.models if model.has(beginning)), None)
        if above is not None:
            words = f"never used: every name that begins with {above.name}/ is asked of {above.name}"
            yield Mistake(f"aliases.{pattern}", words)
