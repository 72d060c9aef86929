"""One question and its answer, without a socket: bytes in, events out.

    exchange = Exchange(PROTOCOLS["chat"], request, stream=True)
    send exchange.body as JSON to the API's address + exchange.path
    exchange.head(status, headers)
    for data in what comes back:  for event in exchange.feed(data): …
    for event in exchange.end(): …

Rules
1. `feed` and `end` give the events of one reply, from `Started` to `Finished`, or raise one of `errors`. Nothing
   follows `Finished`; `finished` tells that it has come, and the rest of the answer need not be read.
2. A status that is no success raises at `end`, when all that the server says has been read.
3. What the answer is, a stream or a JSON body, is seen in its first character, whatever was asked for and whatever the
   headers say.
4. `end` of a stream that is not complete raises `StreamCutOff`; so does `broken`, which says that the connection is
   lost, unless the reply was complete but for that.
5. However the bytes are cut, the events are the same.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from dragoman.client import chat, messages, reading, responses, saying, wording
from dragoman.client.calls import NewId, new_id
from dragoman.conversation import GenerationRequest
from dragoman.errors import BadAnswer, DragomanError, StreamCutOff, Unreachable
from dragoman.events import Event
from dragoman.sse import Decoder, Frame, FrameTooLong

MOST_BYTES = 64 * 1024 * 1024
"""Of a body that is not a stream."""
MOST_ERROR_BYTES = 1024 * 1024
BLANK = b" \t\r\n\xef\xbb\xbf"


class Reader(Protocol):
    """Reads one reply of one protocol."""

    @property
    def finished(self) -> bool: ...

    @property
    def knows_end(self) -> bool:
        """Whether nothing that matters is still to come."""

    def frame(self, frame: Frame) -> list[Event]: ...

    def whole(self, body: Mapping[str, Any]) -> list[Event]: ...

    def end(self) -> list[Event]: ...


class Spoken(msgspec.Struct, frozen=True):
    """A protocol as one who asks speaks it. `path` is below the address of the API."""

    name: str
    path: str
    says: frozenset[str]
    encode: Callable[[GenerationRequest, bool], dict[str, Any]]
    reader: Callable[[NewId, bool], Reader]


PROTOCOLS = {
    "chat": Spoken("chat", chat.PATH, chat.SAYS, chat.encode, chat.Reader),
    "messages": Spoken("messages", messages.PATH, messages.SAYS, messages.encode, messages.Reader),
    "responses": Spoken("responses", responses.PATH, responses.SAYS, responses.encode, responses.Reader),
}
"""By name, in the order in which a server is asked for them."""


class Exchange:
    """`check_calls`: whether malformed arguments of a tool call are an error or told as they came."""

    def __init__(
        self,
        protocol: Spoken,
        request: GenerationRequest,
        *,
        stream: bool,
        check_calls: bool = True,
        make_id: NewId = new_id,
    ) -> None:
        saying.check(request, protocol.name, protocol.says)
        self.protocol = protocol
        self.path = protocol.path
        self.body = protocol.encode(request, stream)
        self.request_id: str | None = None
        self._reader = protocol.reader(make_id, check_calls)
        self._status = 200
        self._headers: Mapping[str, str] = {}
        self._frames: Decoder | None = None
        self._whole = bytearray()
        self._is_whole = False
        """Whether the answer is not a stream, or cannot be told yet."""

    @property
    def finished(self) -> bool:
        return self._reader.finished

    @property
    def is_error(self) -> bool:
        return not 200 <= self._status < 300

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        """Names of headers are in lower case."""
        self._status, self._headers = status, headers
        self._is_whole = self.is_error
        self.request_id = headers.get("x-request-id") or headers.get("request-id")

    def feed(self, data: bytes) -> list[Event]:
        if self.finished:
            return []
        if self._frames is not None:
            return self._read(self._frames.feed, data)
        self._whole += data
        if not self._is_whole:
            return self._begin()
        most = MOST_ERROR_BYTES if self.is_error else MOST_BYTES
        if len(self._whole) > most:
            if self.is_error:
                raise wording.of_response(self._status, self._headers, bytes(self._whole))
            raise BadAnswer(f"the answer has more than {most} bytes")
        return []

    def end(self) -> list[Event]:
        if self.is_error:
            raise wording.of_response(self._status, self._headers, bytes(self._whole))
        if self.finished:
            return []
        if self._frames is not None:
            events = self._read(self._frames.end)
            return events if self.finished else [*events, *self._reader.end()]
        if not self._whole.strip(BLANK):
            raise BadAnswer("the server answered without a word")
        body = reading.parse_object(bytes(self._whole.lstrip(BLANK)))
        error = wording.of_frame(body, "", self._whole.decode("utf-8", "replace"), self.request_id)
        if error is not None:
            raise error
        return self._reader.whole(body)

    def broken(self, why: str) -> list[Event]:
        """The connection is lost, after the head of the answer has come."""
        if self.is_error:
            raise wording.of_response(self._status, self._headers, bytes(self._whole))
        if self.finished:
            return []
        if self._frames is not None and self._reader.knows_end:
            return self._reader.end()
        raise self._lost(why)

    def _lost(self, why: str) -> DragomanError:
        return StreamCutOff(f"the connection was lost before the reply was complete: {why}")

    def _begin(self) -> list[Event]:
        """Looks at the first character: JSON begins with a bracket, as does a page, and a stream with a word."""
        seen = self._whole.lstrip(BLANK)
        if not seen:
            return []
        if seen.startswith((b"{", b"[", b"<")):
            self._is_whole = True
            return []
        self._frames = Decoder()
        data = bytes(self._whole)
        self._whole.clear()
        return self._read(self._frames.feed, data)

    def _read(self, decode: Callable[..., list[Frame]], *data: bytes) -> list[Event]:
        events: list[Event] = []
        try:
            for frame in decode(*data):
                events += self._reader.frame(frame)
        except FrameTooLong as error:
            raise BadAnswer(str(error)) from error
        return events


def unreachable(url: str, why: str) -> Unreachable:
    return Unreachable(f"no answer from {url}: {why}")
