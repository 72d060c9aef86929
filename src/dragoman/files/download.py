"""Downloads a model file over HTTP: resumed, verified, and renamed into place in one step.

    .NAME.part         the bytes received so far
    .NAME.part.json    which version of which file they belong to
    .NAME.json         size and hash of the finished file

Rules
1. The file gets its name only when it is complete and is a GGUF file with the expected size and hash.
2. An interrupted download resumes where it ended if the server still has the same file. Otherwise it starts again.
3. An existing file stays in place until its replacement has been checked.
4. Of two downloads of one file at the same time, the second waits and uses the result of the first.
5. Credentials go only to the scheme, host and port they were given for, even after a redirect. Redirects lead only to
   http and https, and at most `MAX_REDIRECTS` are followed. No file and no message contains credentials
   or the query of an address.
6. A download that fails leaves nothing, except the bytes from which the next one can resume.
7. A download ends: the server must answer within `TIMEOUT_SECONDS`, then send at least `MIN_BYTES` in each such
   period. The body is no longer than announced, and `RESERVED_BYTES` of the disk stay free.
"""

import asyncio
import fcntl
import hashlib
import http
import logging
import math
import os
import shutil
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO
from urllib.parse import urlsplit, urlunsplit

import msgspec

from dragoman.core.errors import DECODE_ERRORS, ConfigError
from dragoman.core.urls import basic_authorization, display_source
from dragoman.files.gguf import MAGIC, check_gguf

if TYPE_CHECKING:
    import httpx

log = logging.getLogger("dragoman.files.sources")

Progress = Callable[[str], object]
TIMEOUT_SECONDS = 60.0
MIN_BYTES = 64 * 1024
"""The minimum in each period of `TIMEOUT_SECONDS`, and in an attempt that counts as progress."""
MAX_REDIRECTS = 10
MAX_PORT = 65_535
RESERVED_BYTES = 256 * 1024 * 1024
ATTEMPTS = 5
"""In a row without progress."""
PROGRESS_SECONDS = 5.0
MAX_EXCERPT = 60
"""Characters of an unexpected body in an error."""


class Download(msgspec.Struct, frozen=True):
    """A file to download. `sha256` and `size` are the expected values, if known. `url` may contain a login."""

    url: str
    path: Path
    sha256: str | None = None
    size: int | None = None
    headers: Mapping[str, str] = {}


class DownloadState(msgspec.Struct, frozen=True):
    """The stored state of a file or of a partial file. `address` is a digest, because an address may be secret."""

    address: str
    version: str | None = None
    sha256: str | None = None
    size: int | None = None


def is_complete(path: Path) -> bool:
    """Whether the file exists with the size that it had when it was verified."""
    if not path.is_file():
        return False
    state = _read_state(path)
    if state is not None and state.size is not None and state.size != path.stat().st_size:
        log.warning("%s is damaged: it has %d bytes, not %d", path, path.stat().st_size, state.size)
        return False
    return True


def is_intact(path: Path, sha256: str | None = None) -> bool:
    """Whether the file is complete and has the expected hash, if one is known."""
    state = _read_state(path)
    expected = sha256 or (state.sha256 if state else None)
    return is_complete(path) and (expected is None or hash_file(path) == expected)


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download_file(download: Download, progress: Progress) -> Path:
    """Download the file to its path. Do not call this in a thread with a running event loop."""
    path = download.path
    missing = [folder for folder in path.parents if not folder.exists()]
    try:
        with _lock(path):
            if not is_intact(path, download.sha256):
                _download_locked(download, progress)
    finally:
        for folder in missing:
            with suppress(OSError):
                # Fails if the folder has files.
                folder.rmdir()
    return path


def _download_locked(download: Download, progress: Progress) -> None:
    part = _sibling(download.path, "part")
    try:
        _download_part(download, part, progress)
        digest = _verify(download, part)
        part.replace(download.path)
        size = download.path.stat().st_size
        _write_state(download.path, DownloadState(_hash_url(download.url), sha256=digest, size=size))
    finally:
        if not part.is_file() or not part.stat().st_size:
            part.unlink(missing_ok=True)
            _sibling(part, "json").unlink(missing_ok=True)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Wait for the lock file, and remove it at the end. A process that waited for a removed file locks a new one."""
    file = _sibling(path, "lock")
    is_current = False
    while not is_current:
        with _create(file) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            is_current = file.exists() and os.path.samestat(file.stat(), os.fstat(lock.fileno()))
            if is_current:
                try:
                    yield
                finally:
                    file.unlink(missing_ok=True)


def _create(file: Path) -> BinaryIO:
    """Open a file in a folder that another download may remove at the same time."""
    for _ in range(ATTEMPTS):
        with suppress(FileNotFoundError):
            file.parent.mkdir(parents=True, exist_ok=True)
            return file.open("wb")
    raise ConfigError(f"cannot create the folder {file.parent}")


def _download_part(download: Download, part: Path, progress: Progress) -> None:
    """Resume until the file is complete. Give up after `ATTEMPTS` without progress."""
    # Importing httpx takes a quarter of the time that a server needs to start, and few downloads happen.
    import httpx

    attempts = 0
    while True:
        before = part.stat().st_size if part.is_file() else 0
        try:
            if asyncio.run(_receive(download, part, progress)):
                return
            reason = "the connection ended early"
        except _RetryError as error:
            reason = str(error)
        except TimeoutError:
            reason = f"the server sent less than {MIN_BYTES} bytes in {TIMEOUT_SECONDS:g} s"
        except httpx.InvalidURL as error:
            raise ConfigError(f"{display_source(download.url)} is not a valid address: {error}") from error
        except httpx.TransportError as error:
            reason = str(error) or type(error).__name__
        after = part.stat().st_size if part.is_file() else 0
        attempts = 0 if after >= before + MIN_BYTES else attempts + 1
        if attempts >= ATTEMPTS:
            kept = "; the part received is kept: try again to resume" if after else ""
            raise ConfigError(f"{display_source(download.url)}: {reason}{kept}")
        time.sleep(min(2.0, 0.1 * 2**attempts))


class _RetryError(Exception):
    """A response that may differ at the next attempt."""


async def _receive(download: Download, part: Path, progress: Progress) -> bool:
    """Make one attempt. Return whether the file is complete."""
    import httpx

    offset, version = _find_resume_point(download, part)
    # A compressed body could not be resumed, and could expand to more bytes than announced.
    headers = {**download.headers, "accept-encoding": "identity"}
    if offset and version:
        headers |= {"range": f"bytes={offset}-", "if-range": version}
    timeout = httpx.Timeout(TIMEOUT_SECONDS)
    async with httpx.AsyncClient(timeout=timeout, verify=ssl.create_default_context()) as client:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            response = await _send_request(client, download, headers)
        try:
            return await _save(download, response, part, offset, progress)
        finally:
            await response.aclose()


def _find_resume_point(download: Download, part: Path) -> tuple[int, str | None]:
    """Return the number of bytes received so far, and the version they belong to."""
    known = _read_state(part)
    if known is None or known.address != _hash_url(download.url) or not part.is_file():
        return 0, None
    return part.stat().st_size, known.version


async def _send_request(
    client: "httpx.AsyncClient", download: Download, headers: Mapping[str, str]
) -> "httpx.Response":
    """Follow redirects and return the response, with its body unread."""
    login = basic_authorization(urlsplit(download.url))
    request = client.build_request(
        "GET", _without_login(download.url), headers={**headers, "authorization": login} if login else headers
    )
    for _ in range(MAX_REDIRECTS + 1):
        response = await client.send(request, auth=None, stream=True, follow_redirects=False)
        following = response.next_request
        if following is None:
            return response
        await response.aclose()
        if following.url.scheme not in ("http", "https") or (following.url.port or 0) > MAX_PORT:
            target = display_source(response.headers["location"])
            raise ConfigError(
                f"{display_source(download.url)}: the server redirects to {target!a}, which is not an http(s) address"
            )
        if _origin(following.url) != _origin(request.url):
            following.headers.pop("authorization", None)
        request = following
    raise ConfigError(f"{display_source(download.url)}: the server redirects more than {MAX_REDIRECTS} times")


def _origin(url: "httpx.URL") -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port or {"http": 80, "https": 443}.get(url.scheme)


async def _save(download: Download, response: "httpx.Response", part: Path, offset: int, progress: Progress) -> bool:
    if response.status_code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
        return _check_unsatisfiable(response, part, offset)
    file, total = _open_part(download, response, part, offset)
    with file:
        try:
            await _copy(download, response, file, total, progress)
        finally:
            file.flush()
            os.fsync(file.fileno())
        return total is None or file.tell() == total


def _check_unsatisfiable(response: "httpx.Response", part: Path, offset: int) -> bool:
    """Return whether the part is the whole file. Otherwise it belongs to another version and is removed."""
    if response.headers.get("content-range", "").rpartition("/")[2] == str(offset):
        return True
    part.unlink(missing_ok=True)
    return False


def _open_part(download: Download, response: "httpx.Response", part: Path, offset: int) -> tuple[BinaryIO, int | None]:
    """Open the file for the body. Also return its final size, if the server announces one."""
    if not response.is_success:
        message = f"the server answered {response.status_code} {response.reason_phrase[:100]}"
        if response.is_server_error:
            raise _RetryError(message)
        raise ConfigError(f"{display_source(download.url)}: {message}")
    is_partial = response.status_code == http.HTTPStatus.PARTIAL_CONTENT
    if is_partial and not response.headers.get("content-range", "").startswith(f"bytes {offset}-"):
        part.unlink(missing_ok=True)
        raise _RetryError("the server sent another range than requested")
    start = offset if is_partial else 0
    length = response.headers.get("content-length")
    total = start + int(length) if length is not None else None
    if (total or 0) > (download.size or math.inf):
        raise ConfigError(f"{display_source(download.url)}: the server sends {total} bytes, not {download.size}")
    _check_disk_space(part, (total or start) - start)
    version = response.headers.get("etag") or response.headers.get("last-modified")
    _write_state(part, DownloadState(_hash_url(download.url), version=version))
    return part.open("ab" if is_partial else "wb"), total


async def _copy(
    download: Download, response: "httpx.Response", file: BinaryIO, total: int | None, progress: Progress
) -> None:
    blocks = response.aiter_raw()
    reported_at = time.monotonic()
    block: bytes | None = b"" if file.tell() else await _read_head(download, response, blocks)
    while True:
        received = 0
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while received < MIN_BYTES:
                if block is None:
                    return
                received += len(block)
                file.write(block)
                block = await anext(blocks, None)
                if file.tell() > (download.size or math.inf):
                    file.truncate(0)
                    raise ConfigError(
                        f"{display_source(download.url)}: the server sends more than the file's {download.size} bytes"
                    )
        _check_disk_space(download.path, 0)
        if time.monotonic() - reported_at > PROGRESS_SECONDS:
            reported_at = time.monotonic()
            share = f" of {total / 1e6:.0f}" if total else ""
            progress(f"{file.tell() / 1e6:.0f}{share} MB of {download.path.name}")


async def _read_head(download: Download, response: "httpx.Response", blocks: AsyncIterator[bytes]) -> bytes:
    """Return the first blocks, which must be those of a GGUF file."""
    head = b""
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while len(head) < len(MAGIC) and (block := await anext(blocks, None)):
            head += block
    if not head.startswith(MAGIC):
        raise _not_gguf(download, response, head)
    return head


def _check_disk_space(part: Path, needed: int) -> None:
    free = shutil.disk_usage(part.parent).free
    if needed > free - RESERVED_BYTES:
        more = f"{needed / 1e6:.0f} MB are needed, " if needed else ""
        raise ConfigError(
            f"{part.parent}: {more}{free / 1e6:.0f} MB are free, of which {RESERVED_BYTES / 1e6:.0f} MB must stay free"
        )


def _not_gguf(download: Download, response: "httpx.Response", head: bytes) -> ConfigError:
    """Describe what the server sent instead of a GGUF file."""
    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()[:MAX_EXCERPT]
    text = head.lstrip()[:MAX_EXCERPT].decode("utf-8", "replace")
    if not head:
        content = "nothing"
    elif kind == "text/html" or text.lower().startswith(("<!doctype", "<html")):
        content = "an HTML page; perhaps the file needs a login, or the address is that of a page about it"
    elif text.startswith("version https://git-lfs"):
        content = "a Git LFS pointer instead of the file"
    else:
        content = f"{kind or 'a body of unknown type'} that begins with {text!a}"
    return ConfigError(f"{display_source(download.url)} is not a GGUF file: the server sent {content}")


def _verify(download: Download, part: Path) -> str:
    digest = hash_file(part)
    size = part.stat().st_size
    if (download.sha256 or digest) != digest or (download.size or size) != size:
        part.unlink()
        difference = f"expected sha256 {download.sha256 or 'any'}, found {digest}"
        if (download.size or size) != size:
            difference = f"expected {download.size} bytes, found {size}"
        raise ConfigError(f"{display_source(download.url)} is not the expected file ({difference}); it was deleted")
    try:
        check_gguf(part, display_source(download.url))
    except ConfigError as error:
        part.unlink()
        raise ConfigError(f"{error}; it was deleted") from error
    return digest


def _sibling(path: Path, ending: str) -> Path:
    return path.with_name(f".{path.name.removeprefix('.')}.{ending}")


def _read_state(path: Path) -> DownloadState | None:
    try:
        return msgspec.json.decode(_sibling(path, "json").read_bytes(), type=DownloadState)
    except (OSError, *DECODE_ERRORS):
        return None


def _write_state(path: Path, state: DownloadState) -> None:
    fresh = _sibling(path, "json.new")
    fresh.write_bytes(msgspec.json.encode(state))
    fresh.replace(_sibling(path, "json"))


def _hash_url(url: str) -> str:
    """Hash the address without its login: a short password could be guessed from the hash."""
    return hashlib.sha256(_without_login(url).encode()).hexdigest()


def _without_login(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
