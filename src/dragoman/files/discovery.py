"""Finds the models in the models directories: GGUF files, and directories in the layout of Hugging Face or Mistral.

    name := the path within the directory, without ".gguf" and without "-00001-of-00003"     `org/Model-Q4_K_M`
    a requested name, in any case, matches
        -> the name, or its last part if that is unique
        -> base[:tag]: the name without its quantization; the tag is the quantization, an unknown tag is ignored
        -> architecture[:tag], as in `llama`, `llama:8b`; the tag is the size of the model, or as above. `gemma3_text`,
           the name of a text model beside one with images, means `gemma3` too
        -> nothing, if it means several models

Rules
1. A requested name is compared with the names that were found. It is never used as a path.
2. A file or directory that a link places outside of the models directory is not served.
3. A model in several files is one model, if all of them are present.
4. Without a tag, the largest quantization is used.
5. Each file and directory is listed once, under its own name rather than that of a link. So a link to a parent
   directory does not repeat the walk.
6. Only regular files are opened, and again only after a change. Little is read of each (see `gguf`). A scan that takes
   longer than `MAX_SCAN_SECONDS` leaves new files to the next scan.
7. A damaged file is not listed; `problems` says what is wrong with it. Whether all tensors are there is checked only
   during the first `MAX_CHECK_SECONDS` of a scan. The models found afterwards are checked when they are loaded.
8. A file whose name is not UTF-8 is not served. Spaces and control characters in names become `-`.
"""

import json
import logging
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Literal

import msgspec

from dragoman.core.errors import ConfigError
from dragoman.files.gguf import PART, Value, check_model, list_parts, read_metadata
from dragoman.files.sources import DESCRIPTION_FILES

log = logging.getLogger("dragoman.files.discovery")

MAX_DEPTH = 4
MAX_FILES = 20_000
"""Files and directories below one models directory."""
MAX_SCAN_SECONDS = 5.0
MAX_CHECK_SECONDS = 2.0
MAX_DESCRIPTION_BYTES = 16 << 20
"""Bytes of a file such as config.json."""
KEYS = ("general.architecture", "general.type", "general.file_type", "general.size_label")
"""Metadata that is read of a GGUF file."""
_QUANTIZATION = re.compile(r"(?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|NVFP4|BF16|F16|F32|FP16|FP32)", re.IGNORECASE)
_SIZE = re.compile(r"(?:\d+x)?\d+(?:\.\d+)?[kmbt](?:-a\d+(?:\.\d+)?[mb])?")
"""As in 8b, 8x7b or 30b-a3b, in lower case."""
_SUFFIX = re.compile(rf"(?P<base>.+)[-._](?P<tag>{_QUANTIZATION.pattern})", re.IGNORECASE)
_FILE_TYPES = """
    0=F32 1=F16 2=Q4_0 3=Q4_1 7=Q8_0 8=Q5_0 9=Q5_1 10=Q2_K 11=Q3_K_S 12=Q3_K_M 13=Q3_K_L 14=Q4_K_S 15=Q4_K_M 16=Q5_K_S
    17=Q5_K_M 18=Q6_K 19=IQ2_XXS 20=IQ2_XS 21=Q2_K_S 22=IQ3_XS 23=IQ3_XXS 24=IQ1_S 25=IQ4_NL 26=IQ3_S 27=IQ3_M 28=IQ2_S
    29=IQ2_M 30=IQ4_XS 31=IQ1_M 32=BF16 36=TQ1_0 37=TQ2_0 38=MXFP4
"""
FILE_TYPES = {int(number): name for number, _, name in (entry.partition("=") for entry in _FILE_TYPES.split())}
"""`general.file_type` of a GGUF."""
NOT_MODELS = ("clip", "adapter", "imatrix")
"""Architectures of files that only accompany a model."""


class DiscoveredModel(msgspec.Struct, frozen=True):
    name: str
    path: str
    kind: Literal["gguf", "folder"]
    size: int
    """Bytes of all its files."""
    architecture: str | None = None
    quantization: str | None = None
    family: str | None = None
    """The architecture as GGUF files and `model_type` name it."""
    size_label: str | None = None
    """Such as 8B."""

    @property
    def base(self) -> str:
        """The name without its quantization."""
        cut = _SUFFIX.fullmatch(self.name)
        return cut["base"] if cut else self.name

    def is_of(self, family: str, tag: str) -> bool:
        """Whether the name of an architecture, and a size if the tag is one, mean this model. Both are lower case."""
        if self.family is None or family not in (self.family.lower(), f"{self.family.lower()}_text"):
            return False
        if not _SIZE.fullmatch(tag):
            return True
        sizes = [self.size_label.lower()] if self.size_label else re.split(r"[-_./]", self.name.lower())
        return tag in sizes


class _Entry(msgspec.Struct, frozen=True):
    """A model whose files have not been opened."""

    name: str
    path: Path
    kind: Literal["gguf", "folder"]
    files: tuple[Path, ...]


_Version = tuple[str, tuple[tuple[int, int, int], ...]]
"""The path of a model, and the size, modification time and inode of each of its files."""
_Description = tuple[str | None, str | None, str | None, str | None]
"""Architecture, quantization, family and size."""
_Result = _Description | str | None
"""A str says what is wrong with a damaged model; None means that the file is not a model."""


class Discovery:
    """The models in some directories. A file is opened once, and again after a change."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = tuple(folders)
        self.found: Mapping[str, DiscoveredModel] = {}
        """By name in lower case."""
        self.problems: Mapping[str, str] = {}
        """What is wrong with damaged models, by path."""
        self._results: dict[_Version, _Result] = {}

    def scan(self) -> None:
        """Scan the directories. This blocks: do not call it in the event loop."""
        models: dict[str, DiscoveredModel] = {}
        problems: dict[str, str] = {}
        results: dict[_Version, _Result] = {}
        start = time.monotonic()
        skipped = 0
        for entry in _find_entries(self.folders):
            version = _read_version(entry)
            if version is None:
                continue
            seconds = time.monotonic() - start
            if version in self._results:
                known = self._results[version]
            elif seconds > MAX_SCAN_SECONDS:
                skipped += 1
                continue
            else:
                known = _describe(entry, check_tensors=seconds < MAX_CHECK_SECONDS)
            results[version] = known
            if isinstance(known, str):
                problems[str(entry.path)] = known
            elif known is not None:
                size = sum(size for size, _, _ in version[1])
                models.setdefault(
                    entry.name.lower(), DiscoveredModel(entry.name, str(entry.path), entry.kind, size, *known)
                )
        if skipped:
            log.warning(
                "%d new files in the models directories are left to the next scan: this one took more than %g s",
                skipped,
                MAX_SCAN_SECONDS,
            )
        self.found, self.problems, self._results = models, problems, results

    def resolve(self, name: str) -> DiscoveredModel | None:
        """Return the model for a name in lower case."""
        if name in self.found:
            return self.found[name]
        by_last_part = [model for model in self.found.values() if _last_part(model.name) == name]
        if len(by_last_part) == 1:
            return by_last_part[0]
        models = self.find_all(name)
        is_unique = len({model.base.lower() for model in models}) == 1
        return max(models, key=lambda model: model.size) if is_unique else None

    def find_all(self, name: str) -> list[DiscoveredModel]:
        """Return all models that a name in lower case may mean. Different base names mean that it is ambiguous."""
        base, _, tag = name.partition(":")
        tagged = [
            model
            for model in self.found.values()
            if not _QUANTIZATION.fullmatch(tag) or (model.quantization or "").lower() == tag
        ]
        exact = [model for model in tagged if base in (model.name.lower(), model.base.lower())]
        named = exact or [model for model in tagged if base in (_last_part(model.name), _last_part(model.base))]
        return named or [model for model in tagged if model.is_of(base, tag)]


def _last_part(name: str) -> str:
    return name.lower().rpartition("/")[2]


def list_names(folders: Sequence[Path]) -> set[str]:
    """Return the names of all models in lower case, without opening files."""
    return {entry.name.lower() for entry in _find_entries(folders)}


def _read_version(entry: _Entry) -> _Version | None:
    """Return None if the model was removed after the walk."""
    try:
        stats = [file.stat() for file in entry.files]
    except OSError:
        return None
    return str(entry.path), tuple((status.st_size, status.st_mtime_ns, status.st_ino) for status in stats)


def _find_entries(folders: Sequence[Path]) -> Iterator[_Entry]:
    """Walk twice. Only the second walk follows links, so that a file is listed under its own name."""
    seen: set[tuple[int, int]] = set()
    for follow_links in (False, True):
        for folder in folders:
            try:
                walk = _Walk(folder.resolve(strict=True), follow_links)
            except OSError:
                continue  # the directory does not exist yet
            for entry in walk.find(walk.root, MAX_DEPTH):
                try:
                    status = entry.path.stat()
                except OSError:
                    continue
                if (status.st_dev, status.st_ino) not in seen:
                    seen.add((status.st_dev, status.st_ino))
                    yield entry


class _Walk:
    """One walk below a root."""

    def __init__(self, root: Path, follow_links: bool) -> None:
        self.root = root
        self._follow_links = follow_links
        self._visited: set[Path] = set()
        self._entries_left = MAX_FILES

    def find(self, folder: Path, depth: int) -> Iterator[_Entry]:
        real = folder.resolve()
        if real in self._visited:
            return
        self._visited.add(real)
        paths = self._list(folder)
        files = [path for path, mode in paths.items() if stat.S_ISREG(mode)]
        weights = tuple(path for path in files if path.suffix in (".safetensors", ".bin"))
        if folder != self.root and weights and any(folder / name in files for name in DESCRIPTION_FILES):
            yield _Entry(self._name(folder), folder, "folder", weights)
        yield from self._gguf_entries([path for path in files if path.suffix.lower() == ".gguf"])
        for path, mode in paths.items():
            if depth and stat.S_ISDIR(mode):
                yield from self.find(path, depth - 1)

    def _list(self, folder: Path) -> dict[Path, int]:
        """Return the sorted paths that are inside the root, with their modes. Hidden ones are left out."""
        try:
            with os.scandir(folder) as scanned:
                names = sorted(entry.name for entry in islice(scanned, self._entries_left))
        except OSError as error:
            _warn_once(f"the directory {str(folder)!a} cannot be read: {error.strerror}")
            return {}
        self._entries_left -= len(names)
        if not self._entries_left:
            _warn_once(f"{str(self.root)!a} has more than {MAX_FILES} files and directories; the rest is ignored")
        found = {}
        for path in (folder / name for name in names if not name.startswith(".")):
            # A broken link or a loop is left out.
            with suppress(OSError, RuntimeError):
                if _is_utf8(path) and self._is_inside(path):
                    found[path] = path.stat().st_mode
        return found

    def _is_inside(self, path: Path) -> bool:
        return not path.is_symlink() or (self._follow_links and path.resolve(strict=True).is_relative_to(self.root))

    def _gguf_entries(self, files: Sequence[Path]) -> Iterator[_Entry]:
        for path in files:
            part = PART.fullmatch(path.stem)
            if part is None:
                yield _Entry(self._name(path.with_suffix("")), path, "gguf", (path,))
            elif int(part["at"]) == 1:
                parts = list_parts(path)
                missing = [file.name for file in parts if file not in files]
                if not missing:
                    yield _Entry(self._name(path.with_name(part["stem"])), path, "gguf", tuple(parts))
                elif self._follow_links:
                    # Only this walk follows links to the other parts.
                    _warn_once(f"{path} is not complete: {', '.join(missing[:3])} missing")

    def _name(self, path: Path) -> str:
        return re.sub(r"[\s\x00-\x1f\x7f-\x9f]+", "-", path.relative_to(self.root).as_posix())


def _is_utf8(path: Path) -> bool:
    try:
        path.name.encode()
    except UnicodeEncodeError:
        _warn_once(f"{str(path)!a} is not served: its name is not UTF-8")
        return False
    return True


@lru_cache(maxsize=1000)
def _warn_once(message: str) -> None:
    """Log a warning once, although the directories are scanned again and again."""
    log.warning("%s", message)


def _describe(entry: _Entry, check_tensors: bool) -> _Result:
    try:
        if entry.kind == "folder":
            return _describe_directory(entry.path)
        described = _describe_gguf(entry, read_metadata(entry.path, KEYS))
        if described is not None and check_tensors:
            check_model(entry.path)
        return described
    except ConfigError as error:
        return str(error)


def _describe_gguf(entry: _Entry, metadata: Mapping[str, Value]) -> _Description | None:
    """Return None if the file is not a model."""
    architecture = metadata.get("general.architecture")
    if architecture in NOT_MODELS or metadata.get("general.type", "model") != "model":
        return None
    file_type = metadata.get("general.file_type")
    suffix = _SUFFIX.fullmatch(entry.name)
    by_name = suffix["tag"].upper() if suffix else None
    by_type = FILE_TYPES.get(file_type) if isinstance(file_type, int) else None
    family, label = (_text(metadata.get(key)) for key in ("general.architecture", "general.size_label"))
    return family, by_name or by_type, family, label


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _describe_directory(folder: Path) -> _Description:
    if not (folder / "config.json").is_file():
        return None, None, None, None  # params.json has nothing of this
    try:
        config = json.loads(read_description(folder / "config.json"))
        architectures = config.get("architectures") or [config.get("model_type")]
        quantization = config.get("quantization_config") or {}
        kind = quantization.get("quant_method") or config.get("torch_dtype") or config.get("dtype")
        return _text(architectures[0]), _text(kind), _text(config.get("model_type")), None
    except (OSError, ValueError, AttributeError, IndexError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{folder}/config.json cannot be read: {error}") from error


def read_description(path: Path) -> str:
    """Read a small file beside a model's weights. Raises ValueError if it is too large."""
    with path.open("rb") as file:
        content = file.read(MAX_DESCRIPTION_BYTES + 1)
    if len(content) > MAX_DESCRIPTION_BYTES:
        raise ValueError(f"it has more than {MAX_DESCRIPTION_BYTES >> 20} MiB")
    return content.decode("utf-8")
