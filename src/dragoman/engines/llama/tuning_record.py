"""Stores what `dragoman tune` chose for a model file on this machine.

    home_directory()/tuning/NAME-HASH.json       the choice and all measurements
    home_directory()/tuning/NAME-HASH.gguf       the converted copy, if it was chosen

A record is valid for the same path, size and modification time of the original, and for the same processor and number
of CPUs. Its copy must have the recorded size and hash. An invalid record is ignored, and the log says why.
"""

import hashlib
import logging
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from dragoman.core.errors import DECODE_ERRORS
from dragoman.engines.llama import hardware
from dragoman.engines.llama.options import MAX_THREADS
from dragoman.files.download import hash_file
from dragoman.files.sources import home_directory

log = logging.getLogger("dragoman.engine")


class Measurement(msgspec.Struct, frozen=True):
    """Tokens per second of a prompt, of one stream and of eight streams; bytes of memory; see `tuning` for the rest."""

    prompt: float
    one: float
    eight: float
    memory: int
    divergence: float = 0.0


class Trial(msgspec.Struct, frozen=True):
    layout: Literal["as-is", "Q8_0"]
    threads: Annotated[int, msgspec.Meta(ge=1, le=MAX_THREADS)]
    measured: Measurement | None = None
    error: str = ""
    """Why there is no measurement."""


class TuningKey(msgspec.Struct, frozen=True):
    path: str
    size: int
    mtime_ns: int
    processor: str
    cpus: int

    @classmethod
    def of(cls, original: Path) -> "TuningKey":
        stat = original.stat()
        path = str(original.resolve())
        return cls(path, stat.st_size, stat.st_mtime_ns, hardware.processor(), hardware.cpus())


class TuningRecord(msgspec.Struct, frozen=True):
    key: TuningKey
    chosen: Trial
    trials: tuple[Trial, ...]
    copy_size: int = 0
    copy_sha256: str = ""

    @property
    def file(self) -> Path:
        """The file to load."""
        original = Path(self.key.path)
        return original if self.chosen.layout == "as-is" else copy_path(original)


def record_path(original: Path) -> Path:
    resolved = original.resolve()
    name = hashlib.sha256(str(resolved).encode()).hexdigest()[:8]
    return home_directory() / "tuning" / f"{resolved.stem}-{name}.json"


def copy_path(original: Path) -> Path:
    return record_path(original).with_suffix(".gguf")


def read_record(original: Path, *, check_hash: bool = True) -> TuningRecord | None:
    """Return the record of a file if it is valid."""
    path = record_path(original)
    try:
        record = msgspec.json.decode(path.read_bytes(), type=TuningRecord)
        problem = _find_problem(record, original, check_hash)
    except FileNotFoundError:
        return None
    except (OSError, *DECODE_ERRORS) as error:
        problem = str(error)
    if not problem:
        return record
    log.warning("%s is ignored: %s; run `dragoman tune` again for %s", path, problem, original)
    return None


def _find_problem(record: TuningRecord, original: Path, check_hash: bool) -> str:
    key = TuningKey.of(original)
    if (key.processor, key.cpus) != (record.key.processor, record.key.cpus):
        return "it was made on another CPU"
    if key != record.key:
        return "the model file has changed"
    copy = record.file
    if record.chosen.layout == "as-is":
        return ""
    if not copy.is_file() or copy.stat().st_size != record.copy_size:
        return "the converted copy is missing or damaged"
    return "the converted copy is damaged" if check_hash and hash_file(copy) != record.copy_sha256 else ""
