"""Serve any model you run yourself to any program that speaks the OpenAI or the Anthropic API.

from dragoman import Client, Engine, serve
"""

import importlib
from typing import TYPE_CHECKING, Any

from dragoman.core.version import __version__

if TYPE_CHECKING:
    from dragoman.client.async_client import AsyncClient as AsyncClient
    from dragoman.client.sync_client import Client as Client
    from dragoman.core.engine import Engine as Engine
    from dragoman.core.engine import ModelInfo as ModelInfo
    from dragoman.files.discovery import Discovery as Discovery
    from dragoman.pipeline.local_generation import generate as generate
    from dragoman.pipeline.split import SplitStage as SplitStage
    from dragoman.pipeline.stop import StopMatcher as StopMatcher
    from dragoman.protocols.wire_protocol import WireProtocol as WireProtocol
    from dragoman.server.hooks import Hooks as Hooks
    from dragoman.server.routes import create_app as create_app
    from dragoman.server.serve import serve as serve

PUBLIC = {
    "AsyncClient": "dragoman.client.async_client",
    "Client": "dragoman.client.sync_client",
    "Discovery": "dragoman.files.discovery",
    "Engine": "dragoman.core.engine",
    "Hooks": "dragoman.server.hooks",
    "ModelInfo": "dragoman.core.engine",
    "SplitStage": "dragoman.pipeline.split",
    "StopMatcher": "dragoman.pipeline.stop",
    "WireProtocol": "dragoman.protocols.wire_protocol",
    "create_app": "dragoman.server.routes",
    "generate": "dragoman.pipeline.local_generation",
    "serve": "dragoman.server.serve",
}
"""Imported when first used, so that `import dragoman` costs nothing."""

__all__ = [
    "AsyncClient",
    "Client",
    "Discovery",
    "Engine",
    "Hooks",
    "ModelInfo",
    "SplitStage",
    "StopMatcher",
    "WireProtocol",
    "__version__",
    "create_app",
    "generate",
    "serve",
]


def __getattr__(name: str) -> Any:
    if name in PUBLIC:
        return getattr(importlib.import_module(PUBLIC[name]), name)
    raise AttributeError(f"module 'dragoman' has no attribute {name!r}")
