"""Models that lie in a folder, found by looking: GGUF files, and folders as Hugging Face and Mistral lay them out.

    name := the path within the folder, without ".gguf" and without "-00001-of-00003"     `org/Model-Q4_K_M`
    wanted name, in any case
        -> the name, or its last part where only one has it
        -> base[:tag]: the name without its quantisation, and the quantisation as the tag; another tag is left aside
        -> none, where that is the last part of several

Rules
1. A wanted name is compared with the names that were found. It is never made into a path.
2. A file or folder that is, by way of links, outside of the folder is not one of its models.
3. A model in several files is one model, if all of them are there.
4. Of several quantisations the largest answers, where none is asked for.
"""

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal

import msgspec

from dragoman.errors import ConfigError
from dragoman.gguf import PART, Value, parts_of, read_metadata
from dragoman.sources import DESCRIPTIONS

log = logging.getLogger("dragoman.discovery")

DEEPEST = 4
"""Folders in folders."""
MOST_FILES = 20_000
_QUANTISATION = re.compile(r"(?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|NVFP4|BF16|F16|F32|FP16|FP32)", re.IGNORECASE)
_SUFFIX = re.compile(rf"(?P<base>.+)[-._](?P<tag>{_QUANTISATION.pattern})", re.IGNORECASE)
_FILE_TYPES = """
    0=F32 1=F16 2=Q4_0 3=Q4_1 7=Q8_0 8=Q5_0 9=Q5_1 10=Q2_K 11=Q3_K_S 12=Q3_K_M 13=Q3_K_L 14=Q4_K_S 15=Q4_K_M 16=Q5_K_S
    17=Q5_K_M 18=Q6_K 19=IQ2_XXS 20=IQ2_XS 21=Q2_K_S 22=IQ3_XS 23=IQ3_XXS 24=IQ1_S 25=IQ4_NL 26=IQ3_S 27=IQ3_M 28=IQ2_S
    29=IQ2_M 30=IQ4_XS 31=IQ1_M 32=BF16 36=TQ1_0 37=TQ2_0 38=MXFP4
"""
FILE_TYPES = {int(number): name for number, _, name in (entry.partition("=") for entry in _FILE_TYPES.split())}
"""`general.file_type` of a GGUF."""
NOT_MODELS = ("clip", "adapter", "imatrix")
"""Architectures of files that only go with a model."""


class Found(msgspec.Struct, frozen=True):
    name: str
    path: str
    kind: Literal["gguf", "folder"]
    size: int
    """Bytes of all its files."""
    architecture: str | None = None
    quantisation: str | None = None

    @property
    def base(self) -> str:
        """The name without its quantisation."""
        cut = _SUFFIX.fullmatch(self.name)
        return cut["base"] if cut else self.name


class _Entry(msgspec.Struct, frozen=True):
    """A model whose files have not been opened."""

    name: str
    path: Path
    kind: Literal["gguf", "folder"]
    files: tuple[Path, ...]


class Discovery:
    """What the folders hold. A file is opened once, and again when it has changed."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = tuple(folders)
        self.found: Mapping[str, Found] = {}
        """By name in lower case."""
        self._opened: dict[tuple[str, int, int], tuple[str | None, str | None] | None] = {}

    def look(self) -> None:
        """Takes its time: not for the event loop."""
        found: dict[str, Found] = {}
        for entry in _entries(self.folders):
            made = self._described(entry)
            if made is not None:
                found.setdefault(entry.name.lower(), made)
        self.found = found

    def _described(self, entry: _Entry) -> Found | None:
        try:
            stats = [file.stat() for file in entry.files]
        except OSError:
            # It has just been removed.
            return None
        key = (str(entry.path), max(stat.st_mtime_ns for stat in stats), sum(stat.st_size for stat in stats))
        if key not in self._opened:
            self._opened[key] = _opened(entry)
        known = self._opened[key]
        return None if known is None else Found(entry.name, str(entry.path), entry.kind, key[2], *known)

    def resolve(self, wanted: str) -> Found | None:
        """The model for a name in lower case."""
        if wanted in self.found:
            return self.found[wanted]
        last = [found for name, found in self.found.items() if name.rpartition("/")[2] == wanted]
        if len(last) == 1:
            return last[0]
        fitting = self.called(wanted)
        is_one = len({found.base.lower() for found in fitting}) == 1
        return max(fitting, key=lambda found: found.size) if is_one else None

    def called(self, wanted: str) -> list[Found]:
        """All that a name in lower case may mean: more than quantisations of one model where its path is needed."""
        base, _, tag = wanted.partition(":")
        tagged = [
            found
            for found in self.found.values()
            if not _QUANTISATION.fullmatch(tag) or (found.quantisation or "").lower() == tag
        ]
        whole = [found for found in tagged if base in (found.name.lower(), found.base.lower())]
        return whole or [found for found in tagged if base in (_last(found.name), _last(found.base))]


def _last(name: str) -> str:
    return name.lower().rpartition("/")[2]


def names_in(folders: Sequence[Path]) -> set[str]:
    """The names, in lower case, without opening a file."""
    return {entry.name.lower() for entry in _entries(folders)}


def _entries(folders: Sequence[Path]) -> Iterator[_Entry]:
    for folder in folders:
        try:
            root = folder.resolve(strict=True)
        except OSError:
            # A folder that is not there yet has no models.
            continue
        yield from _below(root, root, DEEPEST)


def _below(root: Path, folder: Path, depth: int) -> Iterator[_Entry]:
    inside = _listed(root, folder)
    weights = tuple(path for path in inside if path.suffix in (".safetensors", ".bin") and path.is_file())
    if folder != root and weights and any(folder / name in inside for name in DESCRIPTIONS):
        yield _Entry(_name(root, folder), folder, "folder", weights)
    yield from _ggufs(root, [path for path in inside if path.suffix.lower() == ".gguf" and path.is_file()])
    if depth:
        for path in inside:
            if path.is_dir():
                yield from _below(root, path, depth - 1)


def _listed(root: Path, folder: Path) -> list[Path]:
    """What lies in a folder and does not lead out of the root, in order. Hidden ones are somebody else's."""
    try:
        names = sorted(entry.name for entry in os.scandir(folder))[:MOST_FILES]
    except OSError as error:
        log.warning("the folder %s cannot be read: %s", folder, error.strerror)
        return []
    paths = (folder / name for name in names if not name.startswith("."))
    return [path for path in paths if _is_inside(root, path)]


def _is_inside(root: Path, path: Path) -> bool:
    try:
        return not path.is_symlink() or path.resolve(strict=True).is_relative_to(root)
    except (OSError, RuntimeError):
        # It leads nowhere, or round and round.
        return False


def _ggufs(root: Path, files: Sequence[Path]) -> Iterator[_Entry]:
    for path in files:
        part = PART.fullmatch(path.stem)
        if part is None:
            yield _Entry(_name(root, path.with_suffix("")), path, "gguf", (path,))
        elif int(part["at"]) == 1:
            wanted = parts_of(path)
            missing = [file.name for file in wanted if file not in files]
            if missing:
                _warn_once(f"{path} is not complete: {', '.join(missing[:3])} missing")
                continue
            yield _Entry(_name(root, path.with_name(part["stem"])), path, "gguf", tuple(wanted))


@lru_cache(maxsize=1000)
def _warn_once(words: str) -> None:
    """The folders are looked at again and again."""
    log.warning("%s", words)


def _name(root: Path, path: Path) -> str:
    return re.sub(r"\s+", "-", path.relative_to(root).as_posix())


def _opened(entry: _Entry) -> tuple[str | None, str | None] | None:
    """Architecture and quantisation; None for what is no model."""
    try:
        return _of_folder(entry.path) if entry.kind == "folder" else _of_gguf(entry, read_metadata(entry.path))
    except ConfigError as error:
        log.warning("%s", error)
        return None


def _of_gguf(entry: _Entry, metadata: Mapping[str, Value]) -> tuple[str | None, str | None] | None:
    architecture = metadata.get("general.architecture")
    if architecture in NOT_MODELS or metadata.get("general.type", "model") != "model":
        return None
    file_type = metadata.get("general.file_type")
    suffix = _SUFFIX.fullmatch(entry.name)
    by_name = suffix["tag"].upper() if suffix else None
    known = FILE_TYPES.get(file_type) if isinstance(file_type, int) else None
    return (None if architecture is None else str(architecture)), by_name or known


def _of_folder(folder: Path) -> tuple[str | None, str | None]:
    if not (folder / "config.json").is_file():
        # The other description has no words for either.
        return None, None
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        named = config.get("architectures") or [config.get("model_type")]
        quantised = config.get("quantization_config") or {}
        kind = quantised.get("quant_method") or config.get("torch_dtype") or config.get("dtype")
        return (None if named[0] is None else str(named[0])), (None if kind is None else str(kind))
    except (OSError, ValueError, AttributeError, IndexError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder}/config.json cannot be read: {error}") from error
