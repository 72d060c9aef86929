"""The admin token: the credential for `/admin` if no keys are configured. It is stored in a file of the server's owner.

    $DRAGOMAN_HOME/run/HOST_PORT.token          for a server at an address
    $DRAGOMAN_HOME/run/unix_DIGEST.token        for a server at a Unix socket; the digest is that of its path

The origin of a connection proves nothing: a reverse proxy on the same machine connects from loopback, or to the same
socket, on behalf of anyone. Only the owner can read the file. `dragoman models` and `dragoman drain` read it
automatically.

Rules
1. Each run of a server has a new token. The server removes the file when it stops.
2. The file appears in one step, and only its owner may read it. Links are not followed.
3. A file or folder that other users may read or write is not used.
4. A server that cannot write the file still serves, but without keys its `/admin` is closed.
"""

import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from dragoman.files.sources import home_directory

log = logging.getLogger("dragoman.auth")

ADMIN_TOKEN_HEADER = "X-Dragoman-Admin-Token"  # noqa: S105 (the name of a header)
_HEADER_BYTES = ADMIN_TOKEN_HEADER.lower().encode()
_LOCAL = ("127.0.0.1", "::1", "localhost")
_ANY = ("0.0.0.0", "::")  # noqa: S104 (names of files)
MAX_LENGTH = 200
"""Characters of a host in a file name, and bytes of a token."""


def has_token(headers: Mapping[bytes, bytes], token: str) -> bool:
    return hmac.compare_digest(headers.get(_HEADER_BYTES, b""), token.encode())


class TokenFile:
    """The file of a running server; `socket` is the path of its Unix socket, if it has one."""

    def __init__(self, token: str, host: str, port: int, socket: str | None) -> None:
        self._token = token
        self._path = _socket_path(socket) if socket is not None else _address_path(host, port)
        try:
            self._write()
        except OSError as error:
            log.warning("no admin token in %s: %s; /admin needs a key", self._path, error.strerror or error)

    def _write(self) -> None:
        folder = self._path.parent
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _check_private(os.lstat(folder), "folder")
        new_file = folder / f".{secrets.token_hex(8)}"
        try:
            with os.fdopen(os.open(new_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as file:
                file.write(self._token)
            new_file.replace(self._path)
        finally:
            new_file.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the file, unless another server at the same address has replaced it."""
        if _read(self._path) == self._token:
            self._path.unlink(missing_ok=True)


def find_admin_token(host: str, port: int) -> str | None:
    """The token of this user's server at an address of this machine, if one runs there."""
    return next((token for path in _candidates(host, port) if (token := _read(path)) is not None), None)


def find_socket_admin_token(socket: str) -> str | None:
    return _read(_socket_path(socket))


def _candidates(host: str, port: int) -> Iterator[Path]:
    """The files for the address, for its other names, and for a server that listens on all addresses."""
    others = _LOCAL if host in _LOCAL else ()
    for name in dict.fromkeys((host, *others, *_ANY)):
        yield _address_path(name, port)


def _address_path(host: str, port: int) -> Path:
    return home_directory() / "run" / f"{re.sub(r'[^A-Za-z0-9.-]', '_', host)[:MAX_LENGTH]}_{port}.token"


def _socket_path(socket: str) -> Path:
    absolute = os.fsencode(Path(socket).expanduser().resolve())
    return home_directory() / "run" / f"unix_{hashlib.sha256(absolute).hexdigest()[:16]}.token"


def _read(path: Path) -> str | None:
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            _check_private(os.fstat(file.fileno()), "file")
            return file.read(MAX_LENGTH).decode("ascii")
    except (OSError, ValueError):
        # The file does not exist, or other users can access it.
        return None


def _check_private(status: os.stat_result, kind: str) -> None:
    if stat.S_ISLNK(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(0, f"the {kind} must belong to this user, without access for others")
