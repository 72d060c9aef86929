"""A model's layout found out before it is loaded, where somebody can watch."""

import argparse
import sys
from pathlib import Path

from dragoman.engines.llama.tuning.layout import is_settled, prepared

CELLS = 30


def add(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "--layout",
        choices=("auto", "as-is"),
        help=f"whether {what} may be converted, once, to a layout that is faster on this machine (auto)",
    )


def prepare(original: Path) -> None:
    if not is_settled(original):
        try:
            prepared(original, _say, _bar if sys.stderr.isatty() else _no_bar)
        finally:
            _wipe()


def _say(words: str) -> None:
    _wipe()
    print(words, file=sys.stderr, flush=True)


def _bar(doing: str, done: float) -> None:
    full = round(done * CELLS)
    print(f"\r[{'#' * full}{'.' * (CELLS - full)}] {done:4.0%} {doing:12}", end="", file=sys.stderr, flush=True)


def _no_bar(doing: str, done: float) -> None:
    """A file or a pipe has the lines."""


def _wipe() -> None:
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
