"""Builds the app with the server's routes."""

from collections.abc import Sequence

from dragoman.config.settings import Settings
from dragoman.core.engine import Engine
from dragoman.models import MakeOf
from dragoman.server.app import App, Reread
from dragoman.server.routes import ROUTES

ENGINES_ONLY = Settings(models_dir=())
"""For an app that serves given engines: no models from folders."""


def build_app(
    settings: Settings,
    engines: Sequence[Engine] = (),
    reread: Reread | None = None,
    make_of: MakeOf | None = None,
) -> App:
    """`reread` returns the settings as they are written now; `make_of` makes engines that run elsewhere."""
    return App(ROUTES, settings, engines, reread, make_of)


def create_app(*engines: Engine, settings: Settings | None = None) -> App:
    """An ASGI app that serves the given engines and the models of the settings. It mounts into any other ASGI app."""
    return build_app(settings or ENGINES_ONLY, engines)
