"""Builds the app with the server's routes."""

from collections.abc import Sequence

from dragoman.config.settings import Settings
from dragoman.core.engine import Engine
from dragoman.models import MakeOf
from dragoman.server.app import App, Reread
from dragoman.server.routes import ROUTES

ENGINES_ONLY = Settings(models_dir=())
"""Settings for an app that serves only the given engines."""


def build_app(
    settings: Settings,
    engines: Sequence[Engine] = (),
    reread: Reread | None = None,
    make_of: MakeOf | None = None,
) -> App:
    """`reread` loads the settings again; `make_of` makes engines that run elsewhere."""
    return App(ROUTES, settings, engines, reread, make_of)


def create_app(*engines: Engine, settings: Settings | None = None) -> App:
    """Make an ASGI app that serves the engines and the models of the settings. It can be mounted into another app."""
    return build_app(settings or ENGINES_ONLY, engines)
