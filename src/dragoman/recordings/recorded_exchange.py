"""The lines of a recording: one JSON object for each exchange, a request and its reply.

    time, id, method, path       when it began (Unix time), the id of the request, its route without the query
    headers                      those of `HEADERS`
    request                      the JSON body, or a text if it is not JSON
    status, model                the HTTP status, the model that answered
    reply or stream              the body, as that of the request, or the pieces of a stream: [seconds, text]
    usage                        the tokens of the request
    duration                     seconds
    job                          what the server sent itself: `background` or `batch`
    disconnected                 whether the client left before the end
    cut                          the bodies of which the end is missing: `request`, `reply`

Fields with default values are left out. Seconds count from the start of the request.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from dragoman.core.errors import DECODE_ERRORS, ConfigError, parse_validation_error

HEADERS = frozenset(
    {
        *("user-agent", "anthropic-version", "anthropic-beta", "openai-beta"),
        *("x-dragoman-strict", "x-dragoman-timeout"),
    }
)
"""The headers that are recorded: those that can change a reply, and the name of the client. None of them has a key."""


NOTHING = msgspec.Raw(b"null")


class TokenCounts(msgspec.Struct, frozen=True, omit_defaults=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class RecordedExchange(msgspec.Struct, frozen=True, omit_defaults=True):
    time: float
    id: str
    method: str
    path: str
    headers: Mapping[str, str] = {}
    request: msgspec.Raw = NOTHING
    status: int = 0
    model: str | None = None
    reply: msgspec.Raw = NOTHING
    stream: tuple[tuple[float, str], ...] = ()
    usage: TokenCounts | None = None
    duration: float = 0.0
    job: Literal["background", "batch"] | None = None
    disconnected: bool = False
    cut: tuple[Literal["request", "reply"], ...] = ()

    @property
    def body(self) -> dict[str, Any]:
        """The body of the request; empty if it is not a JSON object."""
        try:
            parsed = msgspec.json.decode(self.request)
        except DECODE_ERRORS:
            return {}  # a number that no server accepts
        return parsed if isinstance(parsed, dict) else {}


def encode_body(body: bytes) -> msgspec.Raw:
    """JSON without whitespace, so that it is part of one line; any other text as a JSON string."""
    try:
        body.decode()
        shortened = msgspec.json.format(body, indent=-1)
        if b"\n" not in shortened:
            return msgspec.Raw(shortened)
    except DECODE_ERRORS:
        pass  # written as a text
    return msgspec.Raw(msgspec.json.encode(body.decode("utf-8", "replace")))


def read_recording(path: str) -> Iterator[tuple[int, RecordedExchange]]:
    """The exchanges of a file, with the numbers of their lines. A server may be writing it: what is added meanwhile is
    not read, and a last line that is incomplete is skipped."""
    decoder = msgspec.json.Decoder(RecordedExchange)
    try:
        with Path(path).open("rb") as file:
            left = os.fstat(file.fileno()).st_size
            for number, line in enumerate(file, 1):
                left -= len(line)
                if left < 0 or not line.endswith(b"\n"):
                    return
                if not line.strip():
                    continue
                try:
                    yield number, decoder.decode(line)
                except DECODE_ERRORS as error:
                    where, what = parse_validation_error(error)
                    raise ConfigError(
                        f"{path}:{number}: not a recorded exchange: {where.lstrip('.')} {what}".replace(":  ", ": ")
                    ) from error
    except OSError as error:
        raise ConfigError(f"cannot read the recording {path}: {error.strerror}") from error
