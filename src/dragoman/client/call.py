"""One question and its answer, without a socket: bytes in, events out.

    exchange = Exchange(PROTOCOLS["chat"], request, stream=True)
    send exchange.body as JSON to the API's address + exchange.path
    exchange.head(status, headers)
    for data in what comes back, until exchange.finished:  events = exchange.feed(data) …
    for events in exchange.end(): …

Rules
1. `feed` and `end` give the events of one reply, from `Started` to `Finished`; nothing follows that. Once `finished` is
   true the rest of the answer need not be read, and `end` can be called.
2. Only `end` raises, one of `errors`, after all events that came before the failure have been given. So does a status
   that is no success.
3. What the answer is, a stream or a JSON body, is seen in its first character, whatever was asked for and whatever the
   headers say.
4. `end` of a stream that is not complete raises `StreamCutOff`; so does `broken`, which says that the connection is
   lost, unless the reply was complete but for that.
5. However the bytes are cut, the events are the same.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from dragoman.core.errors import BadAnswer, DragomanError, StreamCutOff
from dragoman.core.events import Event
from dragoman.core.request import GenerationRequest
from dragoman.protocols.chat import client as chat
from dragoman.protocols.client import error_classifier, reply_fields, request_fields
from dragoman.protocols.client.frame_template import Mould
from dragoman.protocols.client.tool_calls import NewId, new_id
from dragoman.protocols.completions import client as completions
from dragoman.protocols.messages import client as messages
from dragoman.protocols.responses import client as responses
from dragoman.protocols.sse import MOST_NOTHING, Decoder, Frame, FrameTooLong

MOST_BYTES = 64 * 1024 * 1024
"""Of a body that is not a stream."""
MOST_ERROR_BYTES = 1024 * 1024
EXCERPT = 400
BLANK = b" \t\r\n\xef\xbb\xbf"


class Reader(Protocol):
    """Reads one reply of one protocol."""

    @property
    def finished(self) -> bool: ...

    @property
    def knows_end(self) -> bool:
        """Whether nothing that matters is still to come."""

    def take(self) -> list[Event]: ...

    def frame(self, frame: Frame) -> list[Event]: ...

    def plain(self, frame: Frame) -> str | None:
        """The text of a frame that has one and nothing else, whatever came before it; else None."""

    def say(self, texts: Sequence[str]) -> list[Event]:
        """Texts of such frames."""

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
COMPLETIONS = Spoken("completions", completions.PATH, completions.SAYS, completions.encode, completions.Reader)
"""For what is no conversation."""


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
        request_fields.check(request, protocol.name, protocol.says)
        self.protocol = protocol
        self.path = protocol.path
        self.body = protocol.encode(request, stream)
        self.request_id: str | None = None
        self._reader = protocol.reader(make_id, check_calls)
        self._mould = Mould(self._reader.plain)
        self._status = 200
        self._headers: Mapping[str, str] = {}
        self._failure: DragomanError | None = None
        self._frames: Decoder | None = None
        self._first = ""
        """How it begins, until there is a frame."""
        self._is_between = False
        """Whether what comes next begins a frame, and more is wanted."""
        self._blanks = 0
        self._whole = bytearray()
        self._is_whole = False
        """Whether the answer is not a stream, or cannot be told yet."""

    @property
    def finished(self) -> bool:
        """Whether the reply is complete, or has failed."""
        return self._reader.finished or self._failure is not None

    @property
    def is_error(self) -> bool:
        return not 200 <= self._status < 300

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        """Names of headers are in lower case."""
        self._status, self._headers = status, headers
        self._is_whole = self.is_error
        self.request_id = headers.get("x-request-id") or headers.get("request-id")

    def feed(self, data: bytes) -> list[Event]:
        if self._is_between:
            texts = self._mould.texts(data)
            if texts is not None:
                return self._reader.say(texts)
        if self.finished:
            return []
        if self._frames is not None:
            return self._read_with_care(self._frames, data)
        if not self._is_whole and not self._whole:
            data = self._without_blanks(data)
        self._whole += data
        if not self._is_whole:
            return self._begin()
        most = MOST_ERROR_BYTES if self.is_error else MOST_BYTES
        if len(self._whole) > most:
            self._failure = BadAnswer(f"the answer has more than {most} bytes")
        return []

    def end(self) -> Iterator[list[Event]]:
        """The answer has come to its end, or nobody wants more of it."""
        if self.is_error:
            raise error_classifier.of_response(self._status, self._headers, bytes(self._whole))
        if not self.finished:
            if self._frames is None:
                yield self._read_whole()
            else:
                yield self._read_last(self._frames)
        if not self.finished:
            yield self._attempt(self._reader.end)
        if self._failure is not None:
            raise self._failure

    def broken(self, why: str) -> Iterator[list[Event]]:
        """The connection is lost, after the head of the answer has come."""
        if self._frames is not None and not self.finished and self._reader.knows_end:
            yield self._attempt(self._reader.end)
        elif not self.is_error and not self.finished:
            self._failure = StreamCutOff(f"the connection was lost before the reply was complete: {why}")
        yield from self.end()

    def _without_blanks(self, data: bytes) -> bytes:
        """Nobody keeps what comes before an answer begins; but that must not go on for ever either."""
        seen = data.lstrip(BLANK)
        self._blanks += len(data) - len(seen)
        if self._blanks > MOST_NOTHING:
            self._failure = BadAnswer(f"more than {MOST_NOTHING} bytes came that say nothing")
            return b""
        return seen

    def _begin(self) -> list[Event]:
        """Looks at the first character: JSON begins with a bracket, as does a page, and a stream with a word."""
        if not self._whole:
            return []
        if self._whole.startswith((b"{", b"[", b"<")):
            self._is_whole = True
            return []
        self._frames = Decoder()
        self._first = reply_fields.excerpt(bytes(self._whole[:EXCERPT]))
        data = bytes(self._whole)
        self._whole.clear()
        return self._read_with_care(self._frames, data)

    def _read_with_care(self, frames: Decoder, data: bytes) -> list[Event]:
        was_between = self._is_between
        read = self._decoded(frames.feed, data)
        if was_between and len(read) == 1 and frames.is_between:
            self._mould.learn(data, read[0])
        events = self._read(read)
        self._is_between = frames.is_between and not self.finished
        return events

    def _decoded(self, decode: Callable[..., list[Frame]], *data: bytes) -> list[Frame]:
        try:
            return decode(*data)
        except FrameTooLong as error:
            self._failure = BadAnswer(str(error))
            return []

    def _read(self, frames: Sequence[Frame]) -> list[Event]:
        events: list[Event] = []
        if frames:
            self._first = ""
        for frame in frames:
            events += self._attempt(self._reader.frame, frame)
        return events

    def _read_last(self, frames: Decoder) -> list[Event]:
        events = self._read(self._decoded(frames.end))
        if type(self._failure) is BadAnswer:
            # Half a frame: what that means is for the reader to say, who knows whether more had to come.
            self._failure = None
        if self._first and "json" in self._headers.get("content-type", ""):
            self._failure = BadAnswer(f"the server sent what is no JSON: {self._first!r}")
        return events

    def _read_whole(self) -> list[Event]:
        if not self._whole.strip(BLANK):
            self._failure = BadAnswer("the server answered without a word")
            return []
        return self._attempt(self._body, bytes(self._whole.lstrip(BLANK)))

    def _body(self, data: bytes) -> list[Event]:
        body = reply_fields.parse_object(data)
        error = error_classifier.of_frame(body, "", data.decode("utf-8", "replace"), self.request_id)
        if error is not None:
            raise error
        return self._reader.whole(body)

    def _attempt(self, read: Callable[..., list[Event]], *given: object) -> list[Event]:
        """What is read; a failure waits until all that came before it has been told."""
        if self.finished:
            return []
        try:
            return read(*given)
        except DragomanError as error:
            self._failure = error
            return self._reader.take()
