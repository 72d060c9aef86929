"""Files of the Hugging Face hub, or of another that speaks like it ($HF_ENDPOINT).

    source := "hf:" org "/" repo ["/" path of a .gguf] ["@" revision]

The hub says where a file is and what its hash is; bringing it is `download`'s work. Where the repository has one .gguf,
its path can be left out.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from dragoman.core.errors import ConfigError, quote
from dragoman.files.download import LONGEST_NAME, Wanted

T = TypeVar("T")
PREFIX = "hf:"
_SOURCE = re.compile(
    r"hf:(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:/(?P<file>[\w.-]+(?:/[\w.-]+)*))?(?:@(?P<revision>[\w./-]+))?"
)
_HASH = re.compile(r"[0-9a-f]{64}")


def place_of(source: str, folder: Path) -> Path | None:
    """Where the file is kept; None where only the hub knows which one is meant."""
    repo, file, revision = _parsed(source)
    if file is None:
        here = sorted((folder / repo).glob("*.gguf"))
        return here[0] if len(here) == 1 else None
    kept = folder / repo / file
    return kept if revision is None else kept.with_name(f"{kept.stem}@{revision.replace('/', '_')}.gguf")


def wanted(source: str, folder: Path) -> Wanted:
    """What to bring, as the hub says."""
    hub = _hub()
    repo, file, revision = _parsed(source)
    if file is None:
        file = _only_file(hub, repo, revision)
    url = hub.hf_hub_url(repo, file, revision=revision)
    found = _asked(source, lambda: hub.get_hf_file_metadata(url))
    place = place_of(f"hf:{repo}/{file}" + (f"@{revision}" if revision else ""), folder)
    assert place is not None
    sha256 = found.etag if found.etag and _HASH.fullmatch(found.etag) else None
    return Wanted(url, place, sha256, found.size, hub.utils.build_hf_headers())


def _only_file(hub: Any, repo: str, revision: str | None) -> str:
    names = _asked(f"hf:{repo}", lambda: hub.HfApi().list_repo_files(repo, revision=revision))
    found = [name for name in names if name.endswith(".gguf")]
    if len(found) == 1:
        return str(found[0])
    shown = ", ".join(found[:10]) or "none"
    raise ConfigError(f"hf:{repo}: name one of its .gguf files, as hf:{repo}/FILE; there are: {shown}")


def _parsed(source: str) -> tuple[str, str | None, str | None]:
    parsed = _SOURCE.fullmatch(source)
    if parsed is None or ".." in source or (parsed["file"] and not parsed["file"].endswith(".gguf")):
        raise ConfigError(f"{quote(source)} is not a source; write hf:ORG/REPO/FILE.gguf")
    if any(len(name.encode()) > LONGEST_NAME for name in source.split("/")):
        raise ConfigError(f"{quote(source)}: a name in it is longer than {LONGEST_NAME} bytes")
    return parsed["repo"], parsed["file"], parsed["revision"]


def _hub() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.utils
    except ImportError:
        raise ConfigError("hf: needs the package huggingface_hub; pip install 'dragoman[hf]'") from None
    return huggingface_hub


def _asked(source: str, ask: Callable[[], T]) -> T:
    try:
        return ask()
    except Exception as error:
        words = str(error).strip().splitlines()
        raise ConfigError(f"{source}: the hub says: {words[0] if words else type(error).__name__}") from error
