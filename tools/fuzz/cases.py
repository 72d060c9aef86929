"""What one case is.

    HttpCase   requests on one connection, one after the other, each with the statuses it may get
    RawCase    bytes on one connection; how many responses must come back, where that is known
    SocketCase bytes on one connection that becomes a WebSocket
    Input      any other: a value for an in-process target

A case is a function of the target, the seed and its number. It is stored as JSON: in findings, and in the corpus.
"""

from random import Random

import msgspec

OK = frozenset({200})
CLIENT_ERRORS = frozenset({400, 404, 413, 501})
"""What a mutated request may get instead of a reply. 501: the model cannot do this at all."""
ANY = OK | CLIENT_ERRORS
BUSY = frozenset({503, 529})
LAST_ID = b"@last-id@"
"""In a path or a body: the `id` of the latest reply on this connection."""


class Request(msgspec.Struct, frozen=True, omit_defaults=True):
    method: str
    path: str
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    expect: frozenset[int] = OK
    stream: bool = False
    """Whether a 200 has to be a stream."""
    fault: bool = False
    """Whether the model is one that fails on purpose: an error frame may end the stream."""
    leave_after: int | None = None
    """Disconnect after so many bytes of the response; a negative number: of the request."""


class HttpCase(msgspec.Struct, frozen=True, omit_defaults=True):
    requests: tuple[Request, ...]


class RawCase(msgspec.Struct, frozen=True, omit_defaults=True):
    """`writes` are sent one after the other. `pause` is the seconds between them."""

    writes: tuple[bytes, ...]
    expect: tuple[frozenset[int], ...] | None = None
    """The statuses of each response; None: any documented ones, in any number."""
    pause: float = 0.0
    leave: bool = False
    """Whether to disconnect after the last write instead of reading on."""


class SocketCase(msgspec.Struct, frozen=True, omit_defaults=True):
    """`writes` begin with a handshake. After the answers, if their number is known, comes a close frame."""

    writes: tuple[bytes, ...]
    answers: int | None = None
    """How many responses and error events there are; None where that is not known."""
    pongs: int | None = None
    codes: frozenset[int] | None = None
    """The codes that the server's close frame may have; None: any, or no close frame."""
    pause: float = 0.0
    leave: bool = False


class Input(msgspec.Struct, frozen=True):
    value: msgspec.Raw
    """JSON of whatever the target takes."""


Case = HttpCase | RawCase | SocketCase | Input


def random_for(target: str, seed: str, number: int) -> Random:
    return Random(f"{seed}/{target}/{number}")
