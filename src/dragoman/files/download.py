"""Download a model file over HTTP: resumed, checked, and renamed into place in one step.

    .NAME.part         the bytes received so far
    .NAME.part.json    which version of which file they belong to
    .NAME.json         size and hash of the finished file

Rules
1. The file gets its name only when it is complete and is a GGUF file with the expected size and hash.
2. An interrupted download resumes where it ended if the server still has the same file. Otherwise it starts again.
3. An existing file stays in place until its replacement has been checked.
4. Of two downloads of one file at the same time, the second waits and uses the result of the first.
5. Credentials go only to the scheme, host and port they were given for, even after a redirect. Redirects lead only to
   http and https, and at most `MOST_REDIRECTS` are followed. No file and no message contains credentials
   or the query of an address.
6. A download ends: the server must answer within `PATIENCE_SECONDS`, then send at least `LEAST_BYTES` in each such
   period. The body is no longer than announced, and `SPARE_BYTES` of the disk stay free.
"""

import asyncio
import fcntl
import hashlib
import http
import logging
import math
import os
import re
import shutil
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit, urlunsplit

import httpx
import msgspec

from dragoman.core.errors import DECODE_ERRORS, ConfigError, cut
from dragoman.core.urls import basic_authorization
from dragoman.files.gguf import MAGIC, check_gguf

log = logging.getLogger("dragoman.files.sources")

Progress = Callable[[str], object]
PATIENCE_SECONDS = 60.0
LEAST_BYTES = 64 * 1024
"""Received in each period of `PATIENCE_SECONDS`, and in an attempt that counts as progress."""
MOST_REDIRECTS = 10
LARGEST_PORT = 65_535
SPARE_BYTES = 256 * 1024 * 1024
ATTEMPTS = 5
"""In a row without progress."""
TELL_SECONDS = 5.0
LONGEST_NAME = 200
"""Bytes of the name of a file or folder. The names of the files beside it are a little longer; 255 is the limit."""
KEPT_END = 160
"""Characters that are kept of the end of a longer name."""
LONGEST_PLACE = 2000
"""Characters of a path."""
SHOWN = 60
"""Characters of an unexpected body in an error."""
_HASH = re.compile(r"[0-9a-f]{64}")


class Wanted(msgspec.Struct, frozen=True):
    """A file to download. `sha256` and `size` are what it must have, where known. `url` may contain a login."""

    url: str
    place: Path
    sha256: str | None = None
    size: int | None = None
    headers: Mapping[str, str] = {}


class Kept(msgspec.Struct, frozen=True):
    """What is known of a file, or of the part of it that is here. `address` is a digest: an address may be secret."""

    address: str
    version: str | None = None
    sha256: str | None = None
    size: int | None = None


def split_hash(source: str) -> tuple[str, str | None]:
    """A source without its `#sha256=...`, and that."""
    plain, mark, digest = source.partition("#sha256=")
    if mark and not _HASH.fullmatch(digest.lower()):
        raise ConfigError(f"{display_source(plain)}: expected 64 hexadecimal digits after #sha256=")
    return plain, digest.lower() if mark else None


def display_source(source: str) -> str:
    """A source for messages: an address without its login and query."""
    try:
        parts = urlsplit(source)
    except ValueError:
        return "an address that cannot be read"
    if not parts.netloc:
        return cut(source)
    query = "..." if parts.query else ""
    login = "***@" if "@" in parts.netloc else ""
    host = parts.netloc.rpartition("@")[2]
    return cut(urlunsplit((parts.scheme, login + host, parts.path, query, "")))


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
    """The file, in its place. Not for a thread with a running event loop."""
    wanted.place.parent.mkdir(parents=True, exist_ok=True)
    with _alone(wanted.place):
        if is_whole(wanted.place) and is_sound(wanted.place, wanted.sha256):
            return wanted.place
        part = _beside(wanted.place, "part")
        _fill(wanted, part, progress)
        digest = _checked(wanted, part)
        part.replace(wanted.place)
        size = wanted.place.stat().st_size
        _keep(wanted.place, Kept(_address(wanted.url), sha256=digest, size=size))
        _beside(part, "json").unlink(missing_ok=True)
    return wanted.place


@contextmanager
def _alone(place: Path) -> Iterator[None]:
    with _beside(place, "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fill(wanted: Wanted, part: Path, progress: Progress) -> None:
    """Resume until the file is complete. Give up after `ATTEMPTS` without progress."""
    attempts = 0
    while True:
        before = part.stat().st_size if part.is_file() else 0
        try:
            if asyncio.run(_receive(wanted, part, progress)):
                return
            reason = "the connection ended early"
        except _RetryError as error:
            reason = str(error)
        except TimeoutError:
            reason = f"the server sent less than {LEAST_BYTES} bytes in {PATIENCE_SECONDS:g} s"
        except httpx.InvalidURL as error:
            raise ConfigError(f"{display_source(wanted.url)} is not a valid address: {error}") from error
        except httpx.TransportError as error:
            reason = str(error) or type(error).__name__
        after = part.stat().st_size if part.is_file() else 0
        attempts = 0 if after >= before + LEAST_BYTES else attempts + 1
        if attempts >= ATTEMPTS:
            raise ConfigError(f"{display_source(wanted.url)}: {reason}; the part received is kept: try again to resume")
        time.sleep(min(2.0, 0.1 * 2**attempts))


class _RetryError(Exception):
    """A response that may differ at the next attempt."""


async def _receive(wanted: Wanted, part: Path, progress: Progress) -> bool:
    """Whether the file is complete after this attempt."""
    have, version = _resumable(wanted, part)
    # A compressed body could not be resumed, and could expand to more bytes than announced.
    headers = {**wanted.headers, "accept-encoding": "identity"}
    if have and version:
        headers |= {"range": f"bytes={have}-", "if-range": version}
    timeout = httpx.Timeout(PATIENCE_SECONDS)
    async with httpx.AsyncClient(timeout=timeout, verify=ssl.create_default_context()) as client:
        async with asyncio.timeout(PATIENCE_SECONDS):
            response = await _answer(client, wanted, headers)
        try:
            return await _save(wanted, response, part, have, progress)
        finally:
            await response.aclose()


def _resumable(wanted: Wanted, part: Path) -> tuple[int, str | None]:
    """How many bytes of the file are here, and of which version."""
    known = _kept(part)
    if known is None or known.address != _address(wanted.url) or not part.is_file():
        return 0, None
    return part.stat().st_size, known.version


async def _answer(client: httpx.AsyncClient, wanted: Wanted, headers: Mapping[str, str]) -> httpx.Response:
    """The first response that is not a redirect; its body is not read yet."""
    login = basic_authorization(urlsplit(wanted.url))
    request = client.build_request(
        "GET", _without_login(wanted.url), headers={**headers, "authorization": login} if login else headers
    )
    for _ in range(MOST_REDIRECTS + 1):
        response = await client.send(request, auth=None, stream=True, follow_redirects=False)
        following = response.next_request
        if following is None:
            return response
        await response.aclose()
        if following.url.scheme not in ("http", "https") or (following.url.port or 0) > LARGEST_PORT:
            target = display_source(response.headers["location"])
            raise ConfigError(
                f"{display_source(wanted.url)}: the server redirects to {target!a}, which is not an http(s) address"
            )
        if _origin(following.url) != _origin(request.url):
            following.headers.pop("authorization", None)
        request = following
    raise ConfigError(f"{display_source(wanted.url)}: the server redirects more than {MOST_REDIRECTS} times")


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port or {"http": 80, "https": 443}.get(url.scheme)


async def _save(wanted: Wanted, response: httpx.Response, part: Path, have: int, progress: Progress) -> bool:
    if response.status_code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
        return _is_complete(response, part, have)
    file, total = _open_part(wanted, response, part, have)
    with file:
        try:
            await _copy(wanted, response, file, total, progress)
        finally:
            file.flush()
            os.fsync(file.fileno())
        return total is None or file.tell() == total


def _is_complete(response: httpx.Response, part: Path, have: int) -> bool:
    """Nothing follows the part: it is the whole file, or it belongs to another one and is removed."""
    if response.headers.get("content-range", "").rpartition("/")[2] == str(have):
        return True
    part.unlink(missing_ok=True)
    return False


def _open_part(wanted: Wanted, response: httpx.Response, part: Path, have: int) -> tuple[BinaryIO, int | None]:
    """The file to write the body to, and its final size if the server announces one."""
    if not response.is_success:
        told = f"the server answered {response.status_code} {response.reason_phrase[:100]}"
        if response.is_server_error:
            raise _RetryError(told)
        raise ConfigError(f"{display_source(wanted.url)}: {told}")
    resumes = response.status_code == http.HTTPStatus.PARTIAL_CONTENT
    if resumes and not response.headers.get("content-range", "").startswith(f"bytes {have}-"):
        part.unlink(missing_ok=True)
        raise _RetryError("the server sent another range than the one asked for")
    start = have if resumes else 0
    length = response.headers.get("content-length")
    total = start + int(length) if length is not None else None
    if (total or 0) > (wanted.size or math.inf):
        raise ConfigError(f"{display_source(wanted.url)}: the server sends {total} bytes, not {wanted.size}")
    _check_room(part, (total or start) - start)
    version = response.headers.get("etag") or response.headers.get("last-modified")
    _keep(part, Kept(_address(wanted.url), version=version))
    return part.open("ab" if resumes else "wb"), total


async def _copy(
    wanted: Wanted, response: httpx.Response, file: BinaryIO, total: int | None, progress: Progress
) -> None:
    blocks = response.aiter_raw()
    told = time.monotonic()
    head: bytes | None = b"" if file.tell() == 0 else None
    while True:
        received = 0
        async with asyncio.timeout(PATIENCE_SECONDS):
            while received < LEAST_BYTES:
                block = await anext(blocks, None)
                if block is None:
                    if head is not None:
                        raise _not_gguf(wanted, response, head)
                    return
                received += len(block)
                if head is not None:
                    head += block
                    if len(head) < len(MAGIC):
                        continue
                    if not head.startswith(MAGIC):
                        raise _not_gguf(wanted, response, head)
                    block, head = head, None
                file.write(block)
                if file.tell() > (wanted.size or math.inf):
                    raise ConfigError(
                        f"{display_source(wanted.url)}: the server sends more than the file's {wanted.size} bytes"
                    )
        _check_room(wanted.place, 0)
        if time.monotonic() - told > TELL_SECONDS:
            told = time.monotonic()
            share = f" of {total / 1e6:.0f}" if total else ""
            progress(f"{file.tell() / 1e6:.0f}{share} MB of {wanted.place.name}")


def _check_room(part: Path, needed: int) -> None:
    free = shutil.disk_usage(part.parent).free
    if needed > free - SPARE_BYTES:
        more = f"{needed / 1e6:.0f} MB are needed, " if needed else ""
        raise ConfigError(
            f"{part.parent}: {more}{free / 1e6:.0f} MB are free, of which {SPARE_BYTES / 1e6:.0f} MB must stay free"
        )


def _not_gguf(wanted: Wanted, response: httpx.Response, head: bytes) -> ConfigError:
    """The error for a body that is not GGUF: it says what the server sent instead."""
    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()[:SHOWN]
    text = head.lstrip()[:SHOWN].decode("utf-8", "replace")
    if not head:
        came = "nothing"
    elif kind == "text/html" or text.lower().startswith(("<!doctype", "<html")):
        came = "an HTML page; perhaps the file needs a login, or the address is that of a page about it"
    elif text.startswith("version https://git-lfs"):
        came = "a Git LFS pointer, not the file it stands for"
    else:
        came = f"{kind or 'a body of unknown type'} that begins with {text!a}"
    return ConfigError(f"{display_source(wanted.url)} is not a GGUF file: the server sent {came}")


def _checked(wanted: Wanted, part: Path) -> str:
    digest = digest_of(part)
    size = part.stat().st_size
    if (wanted.sha256 or digest) != digest or (wanted.size or size) != size:
        part.unlink()
        told = f"expected sha256 {wanted.sha256 or 'any'}, found {digest}"
        if (wanted.size or size) != size:
            told = f"expected {wanted.size} bytes, found {size}"
        raise ConfigError(f"{display_source(wanted.url)} is not the expected file ({told}); it was deleted")
    try:
        check_gguf(part, display_source(wanted.url))
    except ConfigError as error:
        part.unlink()
        raise ConfigError(f"{error}; it was deleted") from error
    return digest


def _beside(place: Path, ending: str) -> Path:
    return place.with_name(f".{place.name.removeprefix('.')}.{ending}")


def _kept(place: Path) -> Kept | None:
    try:
        return msgspec.json.decode(_beside(place, "json").read_bytes(), type=Kept)
    except (OSError, *DECODE_ERRORS):
        return None


def _keep(place: Path, kept: Kept) -> None:
    fresh = _beside(place, "json.new")
    fresh.write_bytes(msgspec.json.encode(kept))
    fresh.replace(_beside(place, "json"))


def _address(url: str) -> str:
    """A digest of the address without its login: a password is short enough to be guessed from a digest."""
    return hashlib.sha256(_without_login(url).encode()).hexdigest()


def _without_login(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def place_of(url: str, folder: Path) -> Path:
    """The address as a path: host, then the folders that it names."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"{display_source(url)} is not a valid address: {error}") from error
    names = [_safe(name) for name in unquote(parts.path).split("/") if name.strip(". ")]
    if not host or not names:
        raise ConfigError(f"{display_source(url)}: expected the address of a .gguf file")
    last = names[-1].removesuffix(".gguf")
    if parts.query:
        last += "-" + hashlib.sha256(parts.query.encode()).hexdigest()[:8]
    place = folder.joinpath(_safe(parts.netloc.rpartition("@")[2]), *names[:-1], f"{last}.gguf")
    if len(str(place)) > LONGEST_PLACE:
        raise ConfigError(f"{display_source(url)}: the address is too long for a path here")
    return place


def _safe(name: str) -> str:
    """A valid file name. A long one keeps its end, which says which part of a model it is."""
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", name).lstrip(".") or "_"
    if len(safe) <= LONGEST_NAME:
        return safe
    return f"{hashlib.sha256(safe.encode()).hexdigest()[:12]}-{safe[-KEPT_END:]}"
