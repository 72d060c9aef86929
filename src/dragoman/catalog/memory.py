"""How much memory a model needs: what was measured the last time, else what its file lets expect.

A measurement is kept in `home()/memory.json`, by everything it depends on: engine, options, file, its size and date.
"""

import hashlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import msgspec

from dragoman import sources
from dragoman.catalog.foreseen import adapter_files
from dragoman.config import ModelSpec
from dragoman.engines import engine_class
from dragoman.errors import ConfigError
from dragoman.gguf import Value, parts_of, read_metadata

log = logging.getLogger("dragoman.catalog")

PROCESS_BYTES = 100 * 1024 * 1024
"""What a worker takes before it has loaded anything."""
STATE_ELEMENT_BYTES = {"f16": 2, "q8_0": 34 / 32}
MOST_REMEMBERED = 500
_lock = threading.Lock()


def expected(spec: ModelSpec) -> int:
    """Reads files, and downloads those that are not here: not for the event loop."""
    known = _remembered().get(_fingerprint(spec))
    if known is not None:
        return known
    if not in_worker(spec):
        return 0
    if spec.file is None:
        # Where an engine of folders has its weights, it alone knows: mostly in the memory of a GPU.
        return PROCESS_BYTES
    path = sources.fetch(spec.file)
    size = sum(part.stat().st_size for part in parts_of(path))
    size += sum(adapter.stat().st_size for adapter in adapter_files(spec).values() if adapter.is_file())
    try:
        return PROCESS_BYTES + size + _state_bytes(spec, read_metadata(path))
    except ConfigError:
        # Loading it will say what is wrong with it.
        return PROCESS_BYTES + size


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


def resident(pid: int | None) -> int:
    """Bytes that a process has in memory now; 0 where nobody can tell."""
    try:
        if pid is None:
            return 0
        if sys.platform.startswith("linux"):
            return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        told = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=False)  # noqa: S603, S607
        return int(told.stdout.strip() or 0) * 1024
    except (OSError, ValueError, IndexError):
        return 0


def in_worker(spec: ModelSpec) -> bool:
    """Whether it gets a process of its own, whose memory is then its own too."""
    cls = engine_class(spec.engine)
    given = {**spec.options, "path": ""} if "path" in cls.Options.__struct_fields__ else dict(spec.options)
    try:
        return cls.needs_worker(msgspec.convert(given, cls.Options))
    except msgspec.ValidationError as error:
        raise ConfigError(f"models.{spec.name}: {error}") from error


def _state_bytes(spec: ModelSpec, metadata: Mapping[str, Value]) -> int:
    """Of keys and values, for all texts that are in memory at once, once more for each adapter."""
    # Imported late: it brings llama.cpp along.
    from dragoman.engines.llama.room import fitted

    def number(key: str) -> int:
        value = metadata.get(f"{metadata.get('general.architecture')}.{key}", 0)
        return int(value) if isinstance(value, int | float) else 0

    heads = number("attention.head_count")
    groups = number("attention.head_count_kv") or heads
    width = number("attention.key_length") or (number("embedding_length") // heads if heads else 0)
    kept = spec.options.get("kv", "f16")
    token = int(2 * number("block_count") * groups * width * STATE_ELEMENT_BYTES.get(kept, 2) * len(spec.names))
    if not token:
        return 0
    wanted = _number(spec, "context"), _number(spec, "cache_sequences")
    space = fitted(number("context_length"), token, _number(spec, "slots") or 1, *wanted)
    return token * space.length * space.sequences


def _number(spec: ModelSpec, name: str) -> int | None:
    """What the configuration says, or else the engine; None where both leave it open."""
    options = engine_class(spec.engine).Options
    default = next((field.default for field in msgspec.structs.fields(options) if field.name == name), None)
    value = spec.options.get(name, default)
    return value if isinstance(value, int) else None


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
