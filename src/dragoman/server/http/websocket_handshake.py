"""The request that opens a WebSocket, without I/O (RFC 6455, section 4).

    request := GET, HTTP/1.1, no body, Connection: upgrade, Upgrade: websocket, Sec-WebSocket-Version: 13,
               Sec-WebSocket-Key: base64 of 16 bytes
    reply   := 101, Sec-WebSocket-Accept

Rules
1. A request of another form is plain HTTP: `Upgrade` is ignored. With another version or an invalid key it is refused.
2. Extensions and subprotocols that the client offers are not accepted.
"""

import binascii
from collections.abc import Iterable

from wsproto.utilities import generate_accept_token

from dragoman.core.errors import BadRequest, UpgradeRequired
from dragoman.server.http.http1 import RequestHead

KEY, VERSION = b"sec-websocket-key", b"sec-websocket-version"
KEY_BYTES = 16
REFUSAL_LINES = ("upgrade: websocket", "sec-websocket-version: 13")
"""The headers of a 426 for another version."""


def opens_websocket(head: RequestHead) -> bool:
    if head.method != "GET" or head.version != "1.1" or head.content_length or head.is_chunked:
        return False
    return _has_token(head, b"upgrade", b"websocket") and _has_token(head, b"connection", b"upgrade")


def _has_token(head: RequestHead, wanted: bytes, token: bytes) -> bool:
    values = (value for name, value in head.headers if name == wanted)
    return any(part.strip().lower() == token for value in values for part in value.split(b","))


def read_key(head: RequestHead) -> bytes:
    """The key of a request that opens a WebSocket. Raises an error if it is not valid."""
    if [value for name, value in head.headers if name == VERSION] != [b"13"]:
        raise UpgradeRequired("only version 13 of the WebSocket protocol is supported")
    keys = [value for name, value in head.headers if name == KEY]
    if len(keys) != 1 or not _is_key(keys[0]):
        raise BadRequest("Sec-WebSocket-Key must be sent once, with 16 bytes as base64")
    return keys[0]


def _is_key(key: bytes) -> bool:
    try:
        return len(binascii.a2b_base64(key, strict_mode=True)) == KEY_BYTES
    except binascii.Error:
        return False


def encode_acceptance(key: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The head of the 101."""
    lines = [b"HTTP/1.1 101 Switching Protocols", b"upgrade: websocket", b"connection: upgrade"]
    lines.append(b"sec-websocket-accept: " + generate_accept_token(key))
    lines += [b"%b: %b" % header for header in headers]
    return b"\r\n".join(lines) + b"\r\n\r\n"
