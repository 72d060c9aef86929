"""The table of engines by configuration name. An engine is imported when a model uses it."""

import importlib

from dragoman.core.engine import Engine
from dragoman.core.errors import ConfigError

ENGINES = {
    "scripted": "dragoman.engines.scripted:ScriptedEngine",
    "llama": "dragoman.engines.llama.engine:LlamaEngine",
    "vllm": "dragoman.engines.vllm.engine:VllmEngine",
    "upstream": "dragoman.engines.upstream.engine:UpstreamEngine",
}
DEFAULT_ENGINE = "llama"
"""Runs GGUF files, and models whose entry names no engine."""
DIRECTORY_ENGINE = "vllm"
"""The default engine for a model directory."""


def engine_class(name: str) -> type[Engine]:
    """Return the engine class for a name in the table, or for `module:Class`."""
    target = ENGINES.get(name, name)
    module_name, colon, class_name = target.partition(":")
    if not colon:
        raise ConfigError(f"unknown engine {name!r}; engines: {', '.join(ENGINES)}, or module:Class for your own")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, TypeError, ValueError) as error:
        raise ConfigError(f"engine {name!r} cannot be imported: {error}") from error
    found = getattr(module, class_name, None)
    if not (isinstance(found, type) and issubclass(found, Engine)):
        raise ConfigError(f"engine {name!r}: {module_name} has no Engine subclass called {class_name}")
    return found
