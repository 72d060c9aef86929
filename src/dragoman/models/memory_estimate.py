"""Estimates how much memory a model needs: the last measurement, or else the size of its file.

Measurements are stored in `home()/memory.json`, keyed by engine, options, file path, size and date.
"""

import hashlib
import json
import logging
import os
import threading
from pathlib import Path

import msgspec

from dragoman.config.model_spec import ModelSpec
from dragoman.core.engine import Engine
from dragoman.core.errors import ConfigError
from dragoman.engines import engine_class
from dragoman.files import sources
from dragoman.files.gguf import list_parts

log = logging.getLogger("dragoman.models")

PROCESS_BYTES = 100 * 1024 * 1024
"""Memory of a worker before it loads a model."""
MOST_REMEMBERED = 500
_lock = threading.Lock()


def expected_memory(spec: ModelSpec) -> int:
    """Return the expected memory. Blocks: it reads files and downloads missing ones."""
    measured = _read_measurements().get(_fingerprint(spec))
    if measured is not None:
        return measured
    if not needs_worker(spec):
        return 0
    # An engine that loads a directory keeps the weights mostly in GPU memory.
    path = None if spec.file is None else sources.fetch(spec.file)
    size = 0 if path is None else sum(part.stat().st_size for part in list_parts(path))
    cls, options = _engine_options(spec, path)
    return PROCESS_BYTES + size + cls.memory_beside_file(options)


def remember_memory(spec: ModelSpec, size: int) -> None:
    """Store a measurement; the largest one counts, because a model grows while it is used."""
    key = _fingerprint(spec)
    with _lock:
        known = _read_measurements()
        if known.get(key, 0) >= size:
            return
        # New entries go to the end; the oldest are dropped.
        known.pop(key, None)
        entries = dict([*known.items(), (key, size)][-MOST_REMEMBERED:])
        file = _file()
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            temporary = file.with_name(f".memory-{os.getpid()}.json")
            temporary.write_text(json.dumps(entries))
            temporary.replace(file)
        except OSError as error:
            log.warning("%s cannot be written: %s", file, error.strerror)


def needs_worker(spec: ModelSpec) -> bool:
    """Whether the engine runs in a worker, whose memory can be measured."""
    cls, options = _engine_options(spec, None)
    return cls.needs_worker(options)


def _engine_options(spec: ModelSpec, path: Path | None) -> tuple[type[Engine], msgspec.Struct]:
    cls = engine_class(spec.engine)
    has_path = "path" in cls.Options.__struct_fields__
    values = {**spec.options, "path": str(path or "")} if has_path else dict(spec.options)
    try:
        return cls, msgspec.convert(values, cls.Options)
    except msgspec.ValidationError as error:
        raise ConfigError(f"models.{spec.name}: {error}") from error


def _fingerprint(spec: ModelSpec) -> str:
    file: list[object] = [spec.source]
    try:
        path = None if spec.file is None else sources.locate(spec.file)
        if path is not None:
            stat = path.stat()
            file = [str(path.resolve()), stat.st_size, stat.st_mtime_ns]
    except (ConfigError, OSError):
        # Without a file there is no measurement.
        pass
    identity = json.dumps([spec.engine, file, spec.options], sort_keys=True, default=str)
    return hashlib.sha256(identity.encode()).hexdigest()


def _read_measurements() -> dict[str, int]:
    try:
        known = json.loads(_file().read_text())
        return {str(key): int(size) for key, size in known.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        # The file is missing or damaged; its values can be measured again.
        return {}


def _file() -> Path:
    return sources.home_directory() / "memory.json"
