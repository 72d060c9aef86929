"""Builds the app with the server's routes."""

from collections.abc import Sequence

from dragoman.config.settings import Settings
from dragoman.core.engine import Engine
from dragoman.models import EngineFactory
from dragoman.server.app import App, SettingsLoader
from dragoman.server.routes import ROUTES

ENGINES_ONLY = Settings(models_dir=())
"""Settings for an app that serves only the given engines."""


def build_app(
    settings: Settings,
    engines: Sequence[Engine] = (),
    reload_settings: SettingsLoader | None = None,
    engine_factory: EngineFactory | None = None,
) -> App:
    """`reload_settings` loads the settings again; `engine_factory` makes engines that run elsewhere."""
    return App(ROUTES, settings, engines, reload_settings, engine_factory)


def create_app(*engines: Engine, settings: Settings | None = None) -> App:
    """Make an ASGI app that serves the engines and the models of the settings. It can be mounted into another app."""
    return build_app(settings or ENGINES_ONLY, engines)
