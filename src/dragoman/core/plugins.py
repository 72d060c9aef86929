"""Finds extensions: engines, formats and wire protocols.

    name := built-in name | name of an entry point | module ":" attribute

An entry point belongs to an installed package, in the group `dragoman.engines`, `dragoman.formats` or
`dragoman.protocols`. Built-in names come first. Nothing is imported before its name is used.
"""

import importlib
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Literal

from dragoman.core.errors import ConfigError

Kind = Literal["engine", "format", "protocol"]


def find_plugin(kind: Kind, name: str, built_in: Mapping[str, str]) -> object:
    """Import and return the object that a name stands for. `built_in` maps names to `module:attribute`."""
    target = built_in.get(name, name)
    if ":" not in target:
        installed = entry_points(group=f"dragoman.{kind}s")
        entry = next((entry for entry in installed if entry.name == name), None)
        if entry is None:
            known = ", ".join((*built_in, *sorted(installed.names - built_in.keys())))
            raise ConfigError(f"unknown {kind} {name!r}; {kind}s: {known or 'none'}, or module:Class for your own")
        target = entry.value
    module_name, _, attribute = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, TypeError, ValueError) as error:
        raise ConfigError(f"{kind} {name!r} cannot be imported: {error}") from error
    if not hasattr(module, attribute):
        raise ConfigError(f"{kind} {name!r}: {module_name} has nothing called {attribute}")
    return getattr(module, attribute)
