"""How the engine of a model is made: of what the configuration says, or as it was brought along."""

from collections.abc import Callable
from functools import partial

import msgspec

from dragoman.config.model_spec import ModelSpec
from dragoman.config.settings import Limits
from dragoman.core.engine import Engine
from dragoman.core.errors import ConfigError
from dragoman.engines import engine_class
from dragoman.files import sources
from dragoman.ipc.worker_engine import WorkerEngine, options_of
from dragoman.models.background import aside
from dragoman.models.model_host import GivenUp, Make

MakeOf = Callable[[ModelSpec, Limits], Make]
"""How the engine of a model is made."""


def as_is(engine: Engine) -> Make:
    async def make(given_up: GivenUp) -> Engine:
        return engine

    return make


def made_here(spec: ModelSpec, limits: Limits) -> Make:
    """In this process, or in a worker of its own where it needs one."""

    async def make(given_up: GivenUp) -> Engine:
        cls = engine_class(spec.engine)
        given = dict(spec.options)
        if spec.file is not None:
            path = sources.locate(spec.file) or await aside(partial(sources.fetch, spec.file))
            given["path"] = str(path)
        elif spec.source is not None:
            given["path"] = spec.source
        try:
            options = msgspec.convert(given, cls.Options)
        except msgspec.ValidationError as error:
            raise ConfigError(f"models.{spec.name}: {error}") from error
        if cls.needs_worker(options):
            told = options_of(options)
            return WorkerEngine(spec.engine, spec.name, told, limits.stall_seconds, given_up, limits.load_seconds)
        return cls.configured(spec.name, options)

    return make
