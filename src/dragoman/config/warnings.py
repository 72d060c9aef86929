"""What is allowed and yet hardly meant: `dragoman check` and `dragoman serve` tell it, and the server starts all the
same."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dragoman.config.locations import Mistake
from dragoman.core.errors import ConfigError
from dragoman.engines import engine_class
from dragoman.files import sources

if TYPE_CHECKING:
    from dragoman.config.model_spec import ModelSpec
    from dragoman.config.settings import Settings

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
    for model in settings.models:
        yield from (Mistake(f"models.{model.name}.{key}", words) for key, words in _of_model(model))


def _of_model(model: "ModelSpec") -> Sequence[tuple[str, str]]:
    """What its engine says, which looks at the file where that is here already."""
    engine = engine_class(model.engine)
    try:
        here = None if model.file is None else sources.locate(model.file)
        given = dict(model.options) if model.source is None else {**model.options, "path": str(here or model.source)}
        return engine.doubts(msgspec.convert(given, engine.Options))
    except (ConfigError, msgspec.ValidationError):
        # That is a mistake, and told as one.
        return ()
