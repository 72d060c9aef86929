"""Finds files on the Hugging Face hub, or on a compatible one ($HF_ENDPOINT).

    source := "hf:" org "/" repo ["/" path of a .gguf] ["@" revision]

The hub provides the address and the hash of a file; `download` downloads it. The path may be omitted if the repository
has one .gguf file.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from dragoman.core.errors import ConfigError, quote
from dragoman.files.download import MAX_NAME_BYTES, Download

T = TypeVar("T")
PREFIX = "hf:"
_SOURCE = re.compile(
    r"hf:(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:/(?P<file>[\w.-]+(?:/[\w.-]+)*))?(?:@(?P<revision>[\w./-]+))?"
)
_HASH = re.compile(r"[0-9a-f]{64}")


def local_path(source: str, folder: Path) -> Path | None:
    """Return the path of the file on disk; None if the hub must be asked which file is meant."""
    repo, file, revision = _parse(source)
    if file is None:
        present = sorted((folder / repo).glob("*.gguf"))
        return present[0] if len(present) == 1 else None
    path = folder / repo / file
    return path if revision is None else path.with_name(f"{path.stem}@{revision.replace('/', '_')}.gguf")


def find_file(source: str, folder: Path) -> Download:
    """Ask the hub for the address, the size and the hash of a file."""
    hub = _import_hub()
    repo, file, revision = _parse(source)
    if file is None:
        file = _find_only_file(hub, repo, revision)
    url = hub.hf_hub_url(repo, file, revision=revision)
    metadata = _call_hub(source, lambda: hub.get_hf_file_metadata(url))
    path = local_path(f"hf:{repo}/{file}" + (f"@{revision}" if revision else ""), folder)
    assert path is not None
    sha256 = metadata.etag if metadata.etag and _HASH.fullmatch(metadata.etag) else None
    return Download(url, path, sha256, metadata.size, hub.utils.build_hf_headers())


def _find_only_file(hub: Any, repo: str, revision: str | None) -> str:
    names = _call_hub(f"hf:{repo}", lambda: hub.HfApi().list_repo_files(repo, revision=revision))
    files = [name for name in names if name.endswith(".gguf")]
    if len(files) == 1:
        return str(files[0])
    available = ", ".join(files[:10]) or "none"
    raise ConfigError(f"hf:{repo}: name one of its .gguf files, as hf:{repo}/FILE; available: {available}")


def _parse(source: str) -> tuple[str, str | None, str | None]:
    parsed = _SOURCE.fullmatch(source)
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
