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
5. Each file and each folder is listed once, under its own name rather than that of a link. So a link to a parent
   folder does not repeat the walk.
6. Only regular files are opened, and again only after a change. Little is read of each (see `gguf`). After
   `MAX_LOOK_SECONDS` a look leaves new files to the next look.
7. A file whose name is not UTF-8 is not served. Spaces and control characters in names become `-`.
"""

import json
import logging
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Literal

import msgspec

from dragoman.core.errors import ConfigError
from dragoman.files.gguf import PART, Value, parts_of, read_metadata
from dragoman.files.sources import DESCRIPTIONS

log = logging.getLogger("dragoman.files.discovery")

DEEPEST = 4
"""Folders in folders."""
MOST_FILES = 20_000
"""Files and folders below one models folder."""
MAX_LOOK_SECONDS = 5.0
LARGEST_DESCRIPTION = 16 << 20
"""Bytes of a file such as config.json."""
KEYS = ("general.architecture", "general.type", "general.file_type")
"""Metadata that is read of a GGUF file."""
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


_Version = tuple[str, tuple[tuple[int, int, int], ...]]
"""The path of a model, and the size, modification time and inode of each of its files."""


class Discovery:
    """What the folders hold. A file is opened once, and again when it has changed."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = tuple(folders)
        self.found: Mapping[str, Found] = {}
        """By name in lower case."""
        self._opened: dict[_Version, tuple[str | None, str | None] | None] = {}

    def look(self) -> None:
        """Takes its time: not for the event loop."""
        found: dict[str, Found] = {}
        opened: dict[_Version, tuple[str | None, str | None] | None] = {}
        end = time.monotonic() + MAX_LOOK_SECONDS
        skipped = 0
        for entry in _entries(self.folders):
            version = _version(entry)
            if version is None:
                continue
            if version not in self._opened and time.monotonic() > end:
                skipped += 1
                continue
            opened[version] = known = self._opened[version] if version in self._opened else _opened(entry)
            if known is not None:
                size = sum(size for size, _, _ in version[1])
                found.setdefault(entry.name.lower(), Found(entry.name, str(entry.path), entry.kind, size, *known))
        if skipped:
            log.warning(
                "%d new files in the models folders are read later: the look took more than %g s",
                skipped,
                MAX_LOOK_SECONDS,
            )
        self.found, self._opened = found, opened

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


def _version(entry: _Entry) -> _Version | None:
    """None if the model has just been removed."""
    try:
        stats = [file.stat() for file in entry.files]
    except OSError:
        return None
    return str(entry.path), tuple((status.st_size, status.st_mtime_ns, status.st_ino) for status in stats)


def _entries(folders: Sequence[Path]) -> Iterator[_Entry]:
    """The second walk follows links, so that a file is listed under its own name rather than that of a link."""
    seen: set[tuple[int, int]] = set()
    for follow_links in (False, True):
        for folder in folders:
            try:
                root = folder.resolve(strict=True)
            except OSError:
                # A folder that is not there yet has no models.
                continue
            yield from _unique(_below(_Walk(root), root, DEEPEST, follow_links), seen)


def _unique(entries: Iterator[_Entry], seen: set[tuple[int, int]]) -> Iterator[_Entry]:
    for entry in entries:
        try:
            status = entry.path.stat()
        except OSError:
            continue
        if (status.st_dev, status.st_ino) not in seen:
            seen.add((status.st_dev, status.st_ino))
            yield entry


class _Walk:
    """The state of one walk through the folders below a root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folders: set[Path] = set()
        self.entries_left = MOST_FILES


def _below(walk: _Walk, folder: Path, depth: int, follow_links: bool) -> Iterator[_Entry]:
    real = folder.resolve()
    if real in walk.folders:
        return
    walk.folders.add(real)
    root = walk.root
    files, folders = _listed(walk, folder, follow_links)
    weights = tuple(path for path in files if path.suffix in (".safetensors", ".bin"))
    if folder != root and weights and any(folder / name in files for name in DESCRIPTIONS):
        yield _Entry(_name(root, folder), folder, "folder", weights)
    yield from _ggufs(root, [path for path in files if path.suffix.lower() == ".gguf"], follow_links)
    if depth:
        for path in folders:
            yield from _below(walk, path, depth - 1, follow_links)


def _listed(walk: _Walk, folder: Path, follow_links: bool) -> tuple[list[Path], list[Path]]:
    """Regular files and folders in a folder that do not lead out of the root, in order. Hidden ones are left out."""
    try:
        with os.scandir(folder) as scanned:
            names = sorted(entry.name for entry in islice(scanned, walk.entries_left))
    except OSError as error:
        _warn_once(f"the folder {str(folder)!a} cannot be read: {error.strerror}")
        return [], []
    walk.entries_left -= len(names)
    if not walk.entries_left:
        _warn_once(f"{str(walk.root)!a} has more than {MOST_FILES} files and folders; the rest is ignored")
    files, folders = [], []
    for name in names:
        path = folder / name
        if name.startswith(".") or not _is_utf8(path) or not _is_inside(walk.root, path, follow_links):
            continue
        try:
            mode = path.stat().st_mode
        except OSError:
            continue
        if stat.S_ISREG(mode):
            files.append(path)
        elif stat.S_ISDIR(mode):
            folders.append(path)
    return files, folders


def _is_utf8(path: Path) -> bool:
    try:
        path.name.encode()
    except UnicodeEncodeError:
        _warn_once(f"{str(path)!a} is not served: its name is not UTF-8")
        return False
    return True


def _is_inside(root: Path, path: Path, follow_links: bool) -> bool:
    try:
        return not path.is_symlink() or (follow_links and path.resolve(strict=True).is_relative_to(root))
    except (OSError, RuntimeError):
        # It leads nowhere, or round and round.
        return False


def _ggufs(root: Path, files: Sequence[Path], follow_links: bool) -> Iterator[_Entry]:
    for path in files:
        part = PART.fullmatch(path.stem)
        if part is None:
            yield _Entry(_name(root, path.with_suffix("")), path, "gguf", (path,))
        elif int(part["at"]) == 1:
            wanted = parts_of(path)
            missing = [file.name for file in wanted if file not in files]
            if missing:
                # Only the second walk follows links to the other parts.
                if follow_links:
                    _warn_once(f"{path} is not complete: {', '.join(missing[:3])} missing")
                continue
            yield _Entry(_name(root, path.with_name(part["stem"])), path, "gguf", tuple(wanted))


@lru_cache(maxsize=1000)
def _warn_once(words: str) -> None:
    """The folders are looked at again and again."""
    log.warning("%s", words)


def _name(root: Path, path: Path) -> str:
    return re.sub(r"[\s\x00-\x1f\x7f-\x9f]+", "-", path.relative_to(root).as_posix())


def _opened(entry: _Entry) -> tuple[str | None, str | None] | None:
    """Architecture and quantisation; None for what is no model."""
    try:
        return _of_folder(entry.path) if entry.kind == "folder" else _of_gguf(entry, read_metadata(entry.path, KEYS))
    except ConfigError as error:
        _warn_once(str(error))
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
        config = json.loads(read_description(folder / "config.json"))
        named = config.get("architectures") or [config.get("model_type")]
        quantised = config.get("quantization_config") or {}
        kind = quantised.get("quant_method") or config.get("torch_dtype") or config.get("dtype")
        return (None if named[0] is None else str(named[0])), (None if kind is None else str(kind))
    except (OSError, ValueError, AttributeError, IndexError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{folder}/config.json cannot be read: {error}") from error


def read_description(path: Path) -> str:
    """The text of a small file beside a model's weights. Raises ValueError if it is too large."""
    with path.open("rb") as file:
        content = file.read(LARGEST_DESCRIPTION + 1)
    if len(content) > LARGEST_DESCRIPTION:
        raise ValueError(f"it has more than {LARGEST_DESCRIPTION >> 20} MiB")
    return content.decode("utf-8")
