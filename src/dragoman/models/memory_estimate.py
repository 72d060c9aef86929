"""How much memory a model needs: what was measured the last time, else what its file lets expect.

A measurement is kept in `home()/memory.json`, by everything it depends on: engine, options, file, its size and date.
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
from dragoman.files.gguf import parts_of

log = logging.getLogger("dragoman.models")

PROCESS_BYTES = 100 * 1024 * 1024
"""What a worker takes before it has loaded anything."""
MOST_REMEMBERED = 500
_lock = threading.Lock()


def expected(spec: ModelSpec) -> int:
    """Reads files, and downloads those that are not here: not for the event loop."""
    known = _remembered().get(_fingerprint(spec))
    if known is not None:
        return known
    if not in_worker(spec):
        return 0
    # Where an engine of folders has its weights, it alone knows: mostly in the memory of a GPU.
    path = None if spec.file is None else sources.fetch(spec.file)
    size = 0 if path is None else sum(part.stat().st_size for part in parts_of(path))
    cls, options = _configured(spec, path)
    return PROCESS_BYTES + size + cls.memory_beside_file(options)


def remember(spec: ModelSpec, size: int) -> None:
    """A model grows while it is used: the most that was seen counts."""
    key = _fingerprint(spec)
    with _lock:
        known = _remembered()
        if known.get(key, 0) >= size:
            return
        # A new entry is the youngest; the oldest make room.
        known.pop(key, None)
        kept = dict([*known.items(), (key, size)][-MOST_REMEMBERED:])
        place = _place()
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            fresh = place.with_name(f".memory-{os.getpid()}.json")
            fresh.write_text(json.dumps(kept))
            fresh.replace(place)
        except OSError as error:
            log.warning("%s cannot be written: %s", place, error.strerror)


def in_worker(spec: ModelSpec) -> bool:
    """Whether it gets a process of its own, whose memory is then its own too."""
    cls, options = _configured(spec, None)
    return cls.needs_worker(options)


def _configured(spec: ModelSpec, path: Path | None) -> tuple[type[Engine], msgspec.Struct]:
    """Its engine, and what that is told of it; without a path where the file has not been looked for."""
    cls = engine_class(spec.engine)
    takes_file = "path" in cls.Options.__struct_fields__
    given = {**spec.options, "path": str(path or "")} if takes_file else dict(spec.options)
    try:
        return cls, msgspec.convert(given, cls.Options)
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
        # Without its file nothing has been measured either.
        pass
    told = json.dumps([spec.engine, file, spec.options], sort_keys=True, default=str)
    return hashlib.sha256(told.encode()).hexdigest()


def _remembered() -> dict[str, int]:
    try:
        known = json.loads(_place().read_text())
        return {str(key): int(size) for key, size in known.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        # None yet, or one that is damaged: what it said can be measured again.
        return {}


def _place() -> Path:
    return sources.home() / "memory.json"
