"""The table of built-in engines by configuration name. An engine is imported when a model uses it."""

from dragoman.core.engine import Engine, check_engine_class
from dragoman.core.errors import ConfigError
from dragoman.core.plugins import find_plugin

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
    """Return the engine class for a name in the table, of an entry point, or for `module:Class`."""
    found = find_plugin("engine", name, ENGINES)
    if not (isinstance(found, type) and issubclass(found, Engine)):
        raise ConfigError(f"engine {name!r}: it is not a subclass of Engine")
    check_engine_class(found)
    return found
