"""A model's file from an address: picked up where it was left, checked, and there in one step.

    .NAME.part         what has come so far
    .NAME.part.json    of which version of the file that is
    .NAME.json         what the finished file must be

Rules
1. The file has its name only when it is complete and has been checked.
2. A download that was interrupted goes on where it ended, if the other side still has the same file; else it begins
   anew.
3. A file that is in its place already stays until the new one has been checked.
4. Two at once: the second waits, and finds what the first has brought.
"""

import fcntl
import hashlib
import http.client
import logging
import os
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from dragoman.address import public
from dragoman.errors import ConfigError
from dragoman.gguf import MAGIC, read_metadata

log = logging.getLogger("dragoman.sources")

Progress = Callable[[str], object]
BLOCK = 1 << 20
PATIENCE_SECONDS = 60
TRIES = 5
"""In a row without anything coming."""
TELL_SECONDS = 5.0
_HASH = re.compile(r"[0-9a-f]{64}")


class Wanted(msgspec.Struct, frozen=True):
    """A file to bring. `sha256` and `size`: what it must be, where that is known beforehand."""

    url: str
    place: Path
    sha256: str | None = None
    size: int | None = None
    headers: Mapping[str, str] = {}


class Kept(msgspec.Struct, frozen=True):
    """What is known of a file, or of the part of it that is here."""

    url: str
    version: str | None = None
    sha256: str | None = None
    size: int | None = None


def split_hash(source: str) -> tuple[str, str | None]:
    """A source without its `#sha256=...`, and that."""
    plain, mark, digest = source.partition("#sha256=")
    if mark and not _HASH.fullmatch(digest.lower()):
        raise ConfigError(f"{source}: expected 64 hexadecimal digits after #sha256=")
    return plain, digest.lower() if mark else None


def is_whole(place: Path) -> bool:
    """Whether the file is here, in the size in which it was checked."""
    if not place.is_file():
        return False
    kept = _kept(place)
    if kept is not None and kept.size is not None and kept.size != place.stat().st_size:
        log.warning("%s is damaged: it has %d bytes, not %d", place, place.stat().st_size, kept.size)
        return False
    return True


def is_sound(place: Path, sha256: str | None = None) -> bool:
    """The same, byte by byte, where its hash is known."""
    kept = _kept(place)
    wanted = sha256 or (kept.sha256 if kept else None)
    return is_whole(place) and (wanted is None or digest_of(place) == wanted)


def digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def bring(wanted: Wanted, progress: Progress) -> Path:
    """The file, in its place."""
    wanted.place.parent.mkdir(parents=True, exist_ok=True)
    with _alone(wanted.place):
        if is_whole(wanted.place) and is_sound(wanted.place, wanted.sha256):
            return wanted.place
        part = _beside(wanted.place, "part")
        _fill(wanted, part, progress)
        digest = _checked(wanted, part)
        part.replace(wanted.place)
        size = wanted.place.stat().st_size
        _keep(wanted.place, Kept(wanted.url, sha256=digest, size=size))
        _beside(part, "json").unlink(missing_ok=True)
    return wanted.place


@contextmanager
def _alone(place: Path) -> Iterator[None]:
    with _beside(place, "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fill(wanted: Wanted, part: Path, progress: Progress) -> None:
    """Go on until it is whole; give up when nothing comes any more."""
    tries = 0
    while True:
        before = part.stat().st_size if part.is_file() else 0
        try:
            if _receive(wanted, part, progress):
                return
            reason = "the connection ended early"
        except urllib.error.HTTPError as error:
            if error.code < 500:
                raise ConfigError(f"{public(wanted.url)}: the server answered {error.code} {error.reason}") from error
            reason = f"the server answered {error.code}"
        except (OSError, http.client.HTTPException) as error:
            reason = str(getattr(error, "reason", error)) or type(error).__name__
        tries = 0 if part.is_file() and part.stat().st_size > before else tries + 1
        if tries >= TRIES:
            raise ConfigError(f"{public(wanted.url)}: {reason}; what has come is kept: try again to go on")
        time.sleep(min(2.0, 0.1 * 2**tries))


def _receive(wanted: Wanted, part: Path, progress: Progress) -> bool:
    """Whether the file is whole after this."""
    known = _kept(part)
    have = part.stat().st_size if part.is_file() and known is not None and known.url == wanted.url else 0
    headers = dict(wanted.headers)
    if have and known is not None and known.version:
        headers |= {"range": f"bytes={have}-", "if-range": known.version}
    request = urllib.request.Request(wanted.url, headers=headers)  # noqa: S310 (it is http or https)
    try:
        response = urllib.request.urlopen(request, timeout=PATIENCE_SECONDS)  # noqa: S310
    except urllib.error.HTTPError as error:
        if error.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise
        # It is complete already, or another file than the part is of.
        if error.headers.get("content-range", "").rpartition("/")[2] == str(have):
            return True
        part.unlink()
        return False
    with response:
        goes_on = response.status == http.HTTPStatus.PARTIAL_CONTENT
        version = response.headers.get("etag") or response.headers.get("last-modified")
        _keep(part, Kept(wanted.url, version=version))
        total = _total(response, have if goes_on else 0)
        with part.open("ab" if goes_on else "wb") as file:
            _copy(wanted, response, file, total, progress)
            return total is None or file.tell() == total


def _total(response: Any, have: int) -> int | None:
    length = response.headers.get("content-length")
    return None if length is None else have + int(length)


def _copy(wanted: Wanted, response: Any, file: BinaryIO, total: int | None, progress: Progress) -> None:
    told = time.monotonic()
    while block := response.read(BLOCK):
        if file.tell() == 0 and not block.startswith(MAGIC):
            raise ConfigError(f"{public(wanted.url)} is not a GGUF file")
        file.write(block)
        if time.monotonic() - told > TELL_SECONDS:
            told = time.monotonic()
            share = f" of {total / 1e6:.0f}" if total else ""
            progress(f"{file.tell() / 1e6:.0f}{share} MB of {wanted.place.name}")
    file.flush()
    os.fsync(file.fileno())


def _checked(wanted: Wanted, part: Path) -> str:
    digest = digest_of(part)
    size = part.stat().st_size
    if (wanted.sha256 or digest) != digest or (wanted.size or size) != size:
        part.unlink()
        told = f"expected sha256 {wanted.sha256 or 'any'}, found {digest}"
        if (wanted.size or size) != size:
            told = f"expected {wanted.size} bytes, found {size}"
        raise ConfigError(f"{public(wanted.url)} is not what it should be ({told}); it was thrown away")
    try:
        read_metadata(part)
    except ConfigError as error:
        part.unlink()
        raise ConfigError(f"{public(wanted.url)} is not a GGUF file that can be read: {error}") from error
    return digest


def _beside(place: Path, ending: str) -> Path:
    return place.with_name(f".{place.name.removeprefix('.')}.{ending}")


def _kept(place: Path) -> Kept | None:
    try:
        return msgspec.json.decode(_beside(place, "json").read_bytes(), type=Kept)
    except (OSError, msgspec.DecodeError):
        return None


def _keep(place: Path, kept: Kept) -> None:
    fresh = _beside(place, "json.new")
    fresh.write_bytes(msgspec.json.encode(kept))
    fresh.replace(_beside(place, "json"))


def place_of(url: str, folder: Path) -> Path:
    """The address as a path: host, then the folders that it names."""
    parts = urllib.parse.urlsplit(url)
    names = [_safe(name) for name in urllib.parse.unquote(parts.path).split("/") if name.strip(". ")]
    if not parts.hostname or not names:
        raise ConfigError(f"{public(url)}: expected the address of a .gguf file")
    last = names[-1].removesuffix(".gguf")
    if parts.query:
        last += "-" + hashlib.sha256(parts.query.encode()).hexdigest()[:8]
    return folder.joinpath(_safe(parts.netloc.rpartition("@")[2]), *names[:-1], f"{last}.gguf")


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", name).lstrip(".") or "_"
