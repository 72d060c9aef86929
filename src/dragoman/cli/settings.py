"""The settings that a command works with: those that `dragoman serve` would have."""

import os
import sys

from dragoman.config.loading import Flags, Loaded, load
from dragoman.config.settings import Settings


def look_here() -> None:
    """As with `python -m`: an engine of the user's own lies in the folder where the command is given."""
    sys.path.insert(0, os.getcwd())  # noqa: PTH109


def settings_of(config: str | None) -> Settings:
    return loaded_of(config).settings


def loaded_of(config: str | None) -> Loaded:
    look_here()
    return load(config, Flags(), os.environ)
