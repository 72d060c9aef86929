"""`dragoman check`: what is wrong with a configuration, without starting anything."""

import argparse
import sys
from collections.abc import Iterable, Iterator

import msgspec

from dragoman.catalog.foreseen import unfit, unreadable_files, wrong_files
from dragoman.cli.settings import loaded_of
from dragoman.config import ModelSpec
from dragoman.config.doubts import doubts
from dragoman.config.places import Mistake
from dragoman.engines.upstream.options import UpstreamOptions, key_of
from dragoman.errors import ConfigError

EXAMPLES = """\
examples:
  dragoman check
  dragoman check --config team.yaml && kill -HUP "$(pidof -s dragoman)"

Without --config the file is found as for `dragoman serve`. Every mistake is told with its line and its key;
the exit code is 0 or 2.
"""


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "check",
        help="check a configuration",
        description="Tell the mistakes of a configuration without starting a server.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="a configuration file (YAML or JSON)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    loaded = loaded_of(arguments.config)
    settings = loaded.settings
    # Imported late: a mistake in the file is told without it.
    from dragoman.server.beforehand import remarks
    from dragoman.server.files import unusable_files

    models = settings.models
    wrong = [*wrong_files(models), *unreadable_files(models), *unfit(models), *unusable_files(settings)]
    wrong += _missing_keys(models)
    if wrong:
        raise ConfigError(*loaded.places.told(wrong))
    for doubt in (*loaded.places.told(doubts(settings)), *remarks(settings)):
        print(f"dragoman: warning: {doubt}", file=sys.stderr)
    names = ", ".join(name for model in settings.models for name in model.names) or "those of the models folder"
    print(f"the configuration is sound; models: {names}")
    return 0


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
