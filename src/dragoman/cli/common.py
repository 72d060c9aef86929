"""Helpers shared by the commands: argument parsers, loading the configuration, checking the files it names.

A *fatal* problem keeps the server or a model from starting. An *unservable* model fails its requests, while the rest
of the server works. `dragoman check` reports both. `dragoman serve` refuses to start on the first kind and warns about
the second. A reload is refused for both, except for unservable models of the running configuration.
"""

import argparse
import os
import sys
from collections.abc import Iterable, Iterator
from typing import TypeAlias

import msgspec

from dragoman.config.diagnostics import Diagnostic
from dragoman.config.loading import Flags, LoadedConfig, load
from dragoman.config.model_spec import ModelSpec
from dragoman.config.settings import Settings
from dragoman.core.errors import ConfigError
from dragoman.engines.upstream.options import UpstreamOptions, read_api_key
from dragoman.models.static_info import find_engine_mistakes, find_missing_files, find_unreadable_files

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
MANY = "may be given several times"


def add_command(
    commands: Commands, name: str, summary: str, description: str, examples: str
) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def print_progress(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def format_table(rows: list[list[str]]) -> str:
    """Return the rows as aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in padded)


def add_working_directory() -> None:
    """Make engines in the working directory importable, as `python -m` does."""
    sys.path.insert(0, os.getcwd())  # noqa: PTH109


def load_config(path: str | None) -> LoadedConfig:
    """Load the configuration that `dragoman serve` would use without flags."""
    add_working_directory()
    return load(path, Flags(), os.environ)


def find_fatal(settings: Settings) -> list[Diagnostic]:
    # Imported late: errors in the configuration file itself need no server modules.
    from dragoman.server.preflight_checks import check_files

    return [*find_missing_files(settings.models), *check_files(settings)]


def find_unservable(settings: Settings) -> list[Diagnostic]:
    models = settings.models
    return [*find_unreadable_files(models), *find_engine_mistakes(models), *_find_missing_keys(models)]


def _find_missing_keys(models: Iterable[ModelSpec]) -> Iterator[Diagnostic]:
    """Yield upstream models whose key is not in the environment."""
    for model in models:
        if model.engine != "upstream":
            continue
        for place in msgspec.convert(model.options, UpstreamOptions).places:
            try:
                read_api_key(model.name, place)
            except ConfigError as error:
                yield Diagnostic(f"models.{model.name}", str(error).removeprefix(f"models.{model.name}: "))
