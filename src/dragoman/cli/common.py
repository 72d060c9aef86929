"""Helpers shared by the commands: argument parsers, tables, loading the configuration."""

import argparse
import os
import sys
from typing import Any, TypeAlias

from dragoman.config.loading import Flags, LoadedConfig, load

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


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


def add_repeatable(parser: argparse.ArgumentParser, flag: str, metavar: str, description: str, **settings: Any) -> None:
    """Add a flag whose values are collected in a list."""
    text = f"{description}; may be given several times"
    parser.add_argument(flag, metavar=metavar, action="append", default=[], help=text, **settings)


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


def load_config(path: str | None, storage: str | None = None) -> LoadedConfig:
    """Load the configuration that `dragoman serve` would use without flags, or with `--storage`."""
    add_working_directory()
    return load(path, Flags(storage=storage), os.environ)
