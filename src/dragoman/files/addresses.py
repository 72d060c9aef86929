"""Addresses of model files: where they are stored here, and how they are downloaded.

    address := ("https" | "http") "://" ...
             | "hf:" org "/" repo ["/" path of a .gguf] ["@" revision]     the Hugging Face hub, or $HF_ENDPOINT
    both may be followed by "#sha256=" and the expected hash of the file

The hub provides the address and the hash of a file; `download` downloads it. The path may be omitted if the repository
has one .gguf file.
"""

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import msgspec

from dragoman.core.errors import ConfigError, quote
from dragoman.core.urls import display_source
from dragoman.files.download import Download
from dragoman.files.gguf import PART

T = TypeVar("T")
HUB = "hf:"
URL_PREFIXES = ("https:", "http:")
MAX_NAME_BYTES = 200
"""Bytes of the name of a file or folder. The names of the files beside it are a little longer; 255 is the limit."""
NAME_SUFFIX_LENGTH = 160
"""Characters of the end of a longer name that are kept."""
MAX_PATH_LENGTH = 2000
"""Characters of a path."""
_HUB_NAME = re.compile(
    r"hf:(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:/(?P<file>[\w.-]+(?:/[\w.-]+)*))?(?:@(?P<revision>[\w./-]+))?"
)
_HASH = re.compile(r"[0-9a-f]{64}")


def is_address(source: str) -> bool:
    return source.startswith((HUB, *URL_PREFIXES))


def split_hash(source: str) -> tuple[str, str | None]:
    """Split `#sha256=...` from a source."""
    plain, mark, digest = source.partition("#sha256=")
    if mark and not _HASH.fullmatch(digest.lower()):
        raise ConfigError(f"{display_source(plain)}: expected 64 hexadecimal digits after #sha256=")
    return plain, digest.lower() if mark else None


def local_path(source: str, folder: Path) -> Path | None:
    """Return where an address is stored; None if the hub must be asked which file is meant."""
    if not source.startswith(HUB):
        return _url_path(source, folder)
    repo, file, revision = _parse_hub_name(source)
    if file is not None:
        return _hub_path(folder / repo / file, revision)
    present = sorted((folder / repo).glob("*.gguf"))
    return present[0] if len(present) == 1 else None


def build_download(source: str, sha256: str | None, folder: Path) -> Download:
    if not source.startswith(HUB):
        return Download(source, _url_path(source, folder), sha256)
    download = _find_hub_file(source, folder)
    return msgspec.structs.replace(download, sha256=sha256 or download.sha256)


def _url_path(url: str, folder: Path) -> Path:
    """Return the path for an address: the host, then the directories of its path."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"{display_source(url)} is not a valid address: {error}") from error
    names = [_safe_name(name) for name in unquote(parts.path).split("/") if name.strip(". ")]
    if not host or not names:
        raise ConfigError(f"{display_source(url)}: expected the address of a .gguf file")
    last = names[-1].removesuffix(".gguf")
    if parts.query:
        last += "-" + hashlib.sha256(parts.query.encode()).hexdigest()[:8]
    path = folder.joinpath(_safe_name(parts.netloc.rpartition("@")[2]), *names[:-1], f"{last}.gguf")
    if len(str(path)) > MAX_PATH_LENGTH:
        raise ConfigError(f"{display_source(url)}: the address is too long for a path here")
    return path


def _safe_name(name: str) -> str:
    """Return a valid file name. A long name keeps its end, which has the number of a split file."""
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", name).lstrip(".") or "_"
    if len(safe) <= MAX_NAME_BYTES:
        return safe
    return f"{hashlib.sha256(safe.encode()).hexdigest()[:12]}-{safe[-NAME_SUFFIX_LENGTH:]}"


def _hub_path(path: Path, revision: str | None) -> Path:
    """Add the revision to the name. The number of a split file stays at the end, where `list_parts` looks for it."""
    if revision is None:
        return path
    part = PART.fullmatch(path.stem)
    stem, number = (part["stem"], f"-{part['at']}-of-{part['of']}") if part else (path.stem, "")
    return path.with_name(f"{stem}@{revision.replace('/', '_')}{number}.gguf")


def _find_hub_file(source: str, folder: Path) -> Download:
    """Ask the hub for the address, the size and the hash of a file."""
    hub = _import_hub()
    repo, file, revision = _parse_hub_name(source)
    if file is None:
        file = _find_only_file(hub, repo, revision)
    url = hub.hf_hub_url(repo, file, revision=revision)
    metadata = _call_hub(source, lambda: hub.get_hf_file_metadata(url))
    sha256 = metadata.etag if metadata.etag and _HASH.fullmatch(metadata.etag) else None
    path = _hub_path(folder / repo / file, revision)
    return Download(url, path, sha256, metadata.size, hub.utils.build_hf_headers())


def _find_only_file(hub: Any, repo: str, revision: str | None) -> str:
    names = _call_hub(f"hf:{repo}", lambda: hub.HfApi().list_repo_files(repo, revision=revision))
    files = [name for name in names if name.endswith(".gguf")]
    if len(files) == 1:
        return str(files[0])
    available = ", ".join(files[:10]) or "none"
    raise ConfigError(f"hf:{repo}: name one of its .gguf files, as hf:{repo}/FILE; available: {available}")


def _parse_hub_name(source: str) -> tuple[str, str | None, str | None]:
    parsed = _HUB_NAME.fullmatch(source)
    if parsed is None or ".." in source or (parsed["file"] and not parsed["file"].endswith(".gguf")):
        raise ConfigError(f"{quote(source)} is not a source; write hf:ORG/REPO/FILE.gguf")
    if any(len(name.encode()) > MAX_NAME_BYTES for name in source.split("/")):
        raise ConfigError(f"{quote(source)}: a name in it is longer than {MAX_NAME_BYTES} bytes")
    return parsed["repo"], parsed["file"], parsed["revision"]


def _import_hub() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.utils
    except ImportError:
        raise ConfigError("hf: needs the package huggingface_hub; pip install 'dragoman[hf]'") from None
    return huggingface_hub


def _call_hub(source: str, call: Callable[[], T]) -> T:
    try:
        return call()
    except Exception as error:
        lines = str(error).strip().splitlines()
        raise ConfigError(f"{source}: the hub answered: {lines[0] if lines else type(error).__name__}") from error
