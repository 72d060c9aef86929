"""One request to a server and its reply, without I/O: bytes in, events out.

    client_call = ClientCall(CLIENT_PROTOCOLS["chat"], request, stream=True)
    send client_call.body as JSON to the base URL of the API + client_call.path
    client_call.head(headers)
    for data in the response body, until client_call.finished:  events = client_call.feed(data) …
    for events in client_call.end(): …

Rules
1. `feed` and `end` return the events of one reply, from `Started` to `Finished`. Once `finished` is true the rest of
   the response can be skipped and `end` can be called.
2. Only `end` raises: one of `core.errors`, after all events before the failure have been returned.
3. The first character decides whether the response is a stream or a JSON body. The request and the headers do not.
4. `end` raises `StreamCutOff` for an incomplete stream. `broken`, for a lost connection, does the same unless only the
   end marker was missing.
5. The events do not depend on how the bytes are split.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from dragoman.client.python_types import OutputType
from dragoman.core.errors import BadAnswer, DragomanError, OutputMismatch, StreamCutOff
from dragoman.core.events import Event, Finished
from dragoman.core.reply import Reply, ReplyBuilder
from dragoman.core.request import GenerationRequest
from dragoman.protocols import errors, reply_fields, request_fields
from dragoman.protocols.reply_reader import ClientProtocol, NewId, new_id
from dragoman.protocols.sse import MAX_EMPTY_BYTES, FrameTemplate, FrameTooLong, SseDecoder, SseFrame

MAX_BODY_BYTES = 64 * 1024 * 1024
"""For a body that is not a stream."""
EXCERPT_BYTES = 400
BLANK = b" \t\r\n\xef\xbb\xbf"


class ClientCall:
    """`check_calls` decides whether malformed arguments of a tool call are an error or passed on unchanged."""

    def __init__(
        self,
        protocol: ClientProtocol,
        request: GenerationRequest,
        *,
        stream: bool,
        check_calls: bool = True,
        make_id: NewId = new_id,
    ) -> None:
        request_fields.check_supported(request, protocol.name, protocol.supported_fields)
        self.path = protocol.path
        self.body = protocol.encode(request, stream)
        self._request_id: str | None = None
        self._reader = protocol.reader(make_id, check_calls)
        self._template = FrameTemplate(self._reader.plain_text)
        self._headers: Mapping[str, str] = {}
        self._failure: DragomanError | None = None
        self._decoder: SseDecoder | None = None
        self._first = ""
        """The start of a stream, until its first frame is complete."""
        self._is_between_frames = False
        """Whether the next byte starts a frame and the reply is incomplete."""
        self._blanks = 0
        self._body = bytearray()
        self._is_body = False
        """Whether the response is known to be a body and not a stream."""

    @property
    def finished(self) -> bool:
        """Whether the reply is complete or has failed."""
        return self._reader.finished or self._failure is not None

    @property
    def streams_usage(self) -> bool | None:
        """Whether a complete stream had its usage where the protocol has it; None for any other response."""
        return self._reader.has_usage if self._decoder is not None and self._reader.finished else None

    def describe(self, reply: Reply) -> Reply:
        """Add to the reply what its events do not contain."""
        reader = self._reader
        return msgspec.structs.replace(
            reply,
            id=reader.id,
            model=reader.model,
            raw=reader.raw,
            unknown_parts=tuple(reader.unknown_parts),
        )

    def head(self, headers: Mapping[str, str]) -> None:
        """Set the headers, whose names are in lower case, of a response with a status of 2xx."""
        self._headers = headers
        self._request_id = headers.get("x-request-id") or headers.get("request-id")

    def feed(self, data: bytes) -> list[Event]:
        if self._is_between_frames:
            texts = self._template.match(data)
            if texts is not None:
                return self._reader.add_texts(texts)
        if self.finished:
            return []
        if self._decoder is not None:
            return self._decode(self._decoder, data)
        if not self._is_body and not self._body:
            data = self._strip_blanks(data)
        self._body += data
        if not self._is_body:
            return self._detect_kind()
        if len(self._body) > MAX_BODY_BYTES:
            self._failure = BadAnswer(f"the response is larger than {MAX_BODY_BYTES} bytes")
        return []

    def end(self) -> Iterator[list[Event]]:
        """Finish after the end of the response, or once `finished` is true."""
        if not self.finished:
            yield self._read_body() if self._decoder is None else self._read_last_frames(self._decoder)
        if not self.finished:
            yield self._attempt(self._reader.end)
        if self._failure is not None:
            raise self._failure

    def broken(self, reason: str) -> Iterator[list[Event]]:
        """Finish after the connection was lost while the body was read."""
        if self._decoder is not None and not self.finished and self._reader.can_finish:
            yield self._attempt(self._reader.end)
        elif not self.finished:
            self._failure = StreamCutOff(f"the connection was lost before the reply was complete: {reason}")
        yield from self.end()

    def _strip_blanks(self, data: bytes) -> bytes:
        """Remove whitespace before the response, up to a limit."""
        stripped = data.lstrip(BLANK)
        self._blanks += len(data) - len(stripped)
        if self._blanks > MAX_EMPTY_BYTES:
            self._failure = BadAnswer(f"the response starts with more than {MAX_EMPTY_BYTES} bytes of whitespace")
            return b""
        return stripped

    def _detect_kind(self) -> list[Event]:
        """Look at the first character: JSON and HTML start with a bracket, a stream with a field name."""
        if not self._body:
            return []
        if self._body.startswith((b"{", b"[", b"<")):
            self._is_body = True
            return []
        self._decoder = SseDecoder()
        self._first = reply_fields.excerpt(bytes(self._body[:EXCERPT_BYTES]))
        data = bytes(self._body)
        self._body.clear()
        return self._decode(self._decoder, data)

    def _decode(self, decoder: SseDecoder, data: bytes) -> list[Event]:
        was_between_frames = self._is_between_frames
        frames = self._decode_frames(decoder.feed, data)
        if was_between_frames and len(frames) == 1 and decoder.is_between_frames:
            self._template.learn(data, frames[0])
        events = self._read_frames(frames)
        self._is_between_frames = decoder.is_between_frames and not self.finished
        return events

    def _decode_frames(self, decode: Callable[..., list[SseFrame]], *data: bytes) -> list[SseFrame]:
        try:
            return decode(*data)
        except FrameTooLong as error:
            self._failure = BadAnswer(str(error))
            return []

    def _read_frames(self, frames: Sequence[SseFrame]) -> list[Event]:
        events: list[Event] = []
        if frames:
            self._first = ""
        for frame in frames:
            events += self._attempt(self._reader.read_frame, frame)
        return events

    def _read_last_frames(self, decoder: SseDecoder) -> list[Event]:
        events = self._read_frames(self._decode_frames(decoder.end))
        if type(self._failure) is BadAnswer:
            # Half a frame: the reader knows whether more was needed.
            self._failure = None
        if self._first and "json" in self._headers.get("content-type", ""):
            self._failure = BadAnswer(f"the server sent invalid JSON: {self._first!r}")
        return events

    def _read_body(self) -> list[Event]:
        if not self._body.strip(BLANK):
            self._failure = BadAnswer("the server sent an empty response")
            return []
        return self._attempt(self._parse_body, bytes(self._body.lstrip(BLANK)))

    def _parse_body(self, data: bytes) -> list[Event]:
        body = reply_fields.parse_object(data)
        error = errors.error_from_frame(body, "", data.decode("utf-8", "replace"), self._request_id)
        if error is not None:
            raise error
        return self._reader.read_body(body)

    def _attempt(self, read: Callable[..., list[Event]], *arguments: object) -> list[Event]:
        """Read some events. An error is kept until `end`, so that earlier events are returned first."""
        if self.finished:
            return []
        try:
            return read(*arguments)
        except DragomanError as error:
            self._failure = error
            return self._reader.take_events()


class ReplyCollector:
    """Collects the events of one reply and converts its text to the requested output type."""

    def __init__(self, output_type: OutputType | None) -> None:
        self._output_type = output_type
        self._builder = ReplyBuilder()
        self._is_complete = False
        self.client_call: ClientCall | None = None

    def add(self, events: Sequence[Event]) -> Sequence[Event]:
        self._builder.add(0, events)
        self._is_complete = self._is_complete or (bool(events) and type(events[-1]) is Finished)
        return events

    def attach_to(self, error: DragomanError) -> None:
        """Record in the error what had arrived before it."""
        error.arrived = self._builder.arrived()

    def reply(self) -> Reply:
        if not self._is_complete:
            incomplete = StreamCutOff(
                "no reply yet: read all events of the stream first, and do not close it before that"
            )
            self.attach_to(incomplete)
            raise incomplete
        reply = self._builder.reply()
        if self.client_call is not None:
            reply = self.client_call.describe(reply)
        if self._output_type is None or (reply.tool_calls and not reply.text):
            return reply
        try:
            output = self._output_type.read(reply.text)
        except ValueError as error:
            hint = "; it was cut short by max_tokens" if reply.reason == "length" else ""
            mismatch = OutputMismatch(f"the reply is not a valid {self._output_type.name}: {error}{hint}")
            self.attach_to(mismatch)
            raise mismatch from error
        return msgspec.structs.replace(reply, output=output)
