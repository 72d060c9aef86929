"""What is wrong with a sound configuration once the files that it names are looked at.

    in the way    without it the server itself, or a model, has nothing to begin with
    unservable    the rest serves without it: whoever asks for such a model is told

`dragoman check` and a new configuration of a running server refuse both, but for what of the second the old one has
too; a start refuses the first, and warns of the second.
"""

from collections.abc import Iterable, Iterator

import msgspec

from dragoman.config.locations import Mistake
from dragoman.config.model_spec import ModelSpec
from dragoman.config.settings import Settings
from dragoman.core.errors import ConfigError
from dragoman.engines.upstream.options import UpstreamOptions, key_of
from dragoman.models.static_info import unfit, unreadable_files, wrong_files


def in_the_way(settings: Settings) -> list[Mistake]:
    # Imported late: a mistake in the file is told without it.
    from dragoman.server.preflight_checks import unusable_files

    return [*wrong_files(settings.models), *unusable_files(settings)]


def unservable(settings: Settings) -> list[Mistake]:
    models = settings.models
    return [*unreadable_files(models), *unfit(models), *_missing_keys(models)]


def _missing_keys(models: Iterable[ModelSpec]) -> Iterator[Mistake]:
    """Without its key no request to a server would be answered."""
    for model in models:
        if model.engine != "upstream":
            continue
        for place in msgspec.convert(model.options, UpstreamOptions).places:
            try:
                key_of(model.name, place)
            except ConfigError as error:
                yield Mistake(f"models.{model.name}", str(error).removeprefix(f"models.{model.name}: "))
