"""The models and the configuration of a run, without secrets, for the event log."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dragoman.config.settings import Settings
from dragoman.core.urls import public

HIDDEN = "***"
SECRET = re.compile(r"(?i)(secret|password|passwd|credential|api_?keys?|access_?token|auth_?token|bearer)")


def describe_run(settings: Settings, models: Sequence[str]) -> dict[str, Any]:
    """The first line of the event log."""
    return {
        "models": list(models),
        "engines": {name: spec.engine for spec in settings.models for name in spec.names},
        "config": without_secrets(settings),
    }


def without_secrets(settings: Settings) -> Any:
    """As much of it as anybody may read: of keys how many there are, of what is called a secret that it is one.

    An address loses the user and the password that may be in it.
    """
    return _hidden(msgspec.to_builtins(settings)) | {"api_keys": len(settings.api_keys)}


def _hidden(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: HIDDEN if SECRET.search(str(name)) else _hidden(inner) for name, inner in value.items()}
    if isinstance(value, str):
        return public(value)
    return [_hidden(inner) for inner in value] if isinstance(value, list | tuple) else value
