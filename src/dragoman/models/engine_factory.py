"""Builds the engine of a model, in this process or in a worker."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import msgspec

from dragoman.config.model_spec import ModelSpec
from dragoman.config.settings import Limits
from dragoman.core.engine import Engine
from dragoman.core.errors import ConfigError
from dragoman.engines import engine_class
from dragoman.files import sources
from dragoman.ipc.worker_engine import WorkerEngine, dump_options
from dragoman.models.model_host import BuildEngine, OnEngineLost

T = TypeVar("T")
EngineFactory = Callable[[ModelSpec, Limits], BuildEngine]


def existing_engine(engine: Engine) -> BuildEngine:
    async def build(on_lost: OnEngineLost) -> Engine:
        return engine

    return build


def local_engine(spec: ModelSpec, limits: Limits) -> BuildEngine:
    """Build the engine in this process, or in a worker if it needs one."""

    async def build(on_lost: OnEngineLost) -> Engine:
        cls = engine_class(spec.engine)
        values = dict(spec.options)
        if spec.file is not None:
            path = sources.locate(spec.file) or await run_in_daemon_thread(partial(sources.fetch, spec.file))
            values["path"] = str(path)
        elif spec.source is not None:
            values["path"] = spec.source
        try:
            options = msgspec.convert(values, cls.Options)
        except msgspec.ValidationError as error:
            raise ConfigError(f"models.{spec.name}: {error}") from error
        if cls.needs_worker(options):
            return WorkerEngine(
                spec.engine, spec.name, dump_options(options), limits.stall_seconds, on_lost, limits.load_seconds
            )
        return cls.configured(spec.name, options)

    return build


async def run_in_daemon_thread(work: Callable[[], T]) -> T:
    """Run long work, such as a download, in a thread that does not delay the end of the process."""
    result: Future[T] = Future()
    # The work cannot be cancelled: it runs to its end even if the caller stops waiting.
    result.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # noqa: BLE001 (raised in the caller)
            result.set_exception(error)

    threading.Thread(target=run, name="dragoman-background", daemon=True).start()
    return await asyncio.wrap_future(result)
