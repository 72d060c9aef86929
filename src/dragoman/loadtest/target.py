"""Sends requests to the server under test and records when the pieces of each reply arrive.

Only the measured parts of a frame are parsed: output, finish reason, usage, error. A reply is complete when its finish
reason and its usage have arrived.

Optional fields are sent until the server rejects them by name with a 400 or 422.
"""

import ssl
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import msgspec

from dragoman.client.http_settings import NO_RESPONSE, describe
from dragoman.client.http_transport import HttpTransport, ResponseBody, StaleConnection
from dragoman.client.planner import request_headers
from dragoman.core.errors import DECODE_ERRORS, ConfigError
from dragoman.core.urls import parse_address
from dragoman.loadtest.figures import Sample, SampleUsage
from dragoman.protocols.sse import FrameTooLong, SseDecoder, SseFrame

LENGTH_FIELDS = ("ignore_eos", "min_tokens")
"""Optional fields that keep a reply from ending early."""
REJECTED_STATUSES = (400, 422)
MAX_ERROR_LENGTH = 300
CONNECT_SECONDS = 10
HEADERS = {"accept-encoding": "identity", "user-agent": "dragoman-bench"}


class FrameDelta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class FrameChoice(msgspec.Struct, frozen=True):
    delta: FrameDelta | None = None
    finish_reason: str | None = None


class CachedTokens(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class WireUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: CachedTokens | None = None


class ChatFrame(msgspec.Struct, frozen=True):
    choices: tuple[FrameChoice, ...] | None = None
    usage: WireUsage | None = None
    error: Any = None


class ListedModel(msgspec.Struct, frozen=True):
    id: str


class ModelList(msgspec.Struct, frozen=True):
    data: tuple[ListedModel, ...]


FRAMES = msgspec.json.Decoder(ChatFrame)


class StreamParser:
    """Parses a stream of server-sent events, without I/O."""

    def __init__(self) -> None:
        self.arrivals: list[float] = []
        self.usage: SampleUsage | None = None
        self.finished = False
        self.error: str | None = None
        self.has_frames = False
        self._decoder = SseDecoder()
        self._last = 0.0

    def feed(self, data: bytes, at: float) -> None:
        self._last = at
        self._read_frames(self._decoder.feed, data)

    def find_error(self) -> str | None:
        """Return the error of a stream that has ended."""
        self._read_frames(self._decoder.end)
        if self.error is not None:
            return self.error
        if not self.finished:
            return "the stream was cut off" if self.arrivals else "the reply is not a stream"
        return "the stream has no usage" if self.usage is None else None

    def _read_frames(self, decode: Callable[..., Sequence[SseFrame]], *data: bytes) -> None:
        try:
            frames = decode(*data)
        except FrameTooLong as error:
            self.error = self.error or str(error)
            return
        for frame in frames:
            self.has_frames = True
            if frame.event == "error":
                self.error = self.error or read_error(frame.data.encode())
            elif frame.data != "[DONE]":
                self._read_data(frame.data)

    def _read_data(self, data: str) -> None:
        try:
            frame = FRAMES.decode(data)
        except DECODE_ERRORS as error:
            self.error = self.error or f"malformed chat completion frame: {error}"
            return
        if frame.error is not None:
            self.error = self.error or extract_message(frame.error)
        if (usage := frame.usage) is not None:
            details = usage.prompt_tokens_details
            cached = details.cached_tokens if details else None
            self.usage = SampleUsage(usage.prompt_tokens, usage.completion_tokens, cached)
        for choice in frame.choices or ():
            # Some servers send an empty finish reason before the end.
            self.finished |= bool(choice.finish_reason)
            delta = choice.delta
            if delta and (delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls):
                self.arrivals.append(self._last)


def read_error(body: bytes) -> str:
    """Return the message of an error body of any known shape, or else the body itself."""
    try:
        return extract_message(msgspec.json.decode(body))
    except DECODE_ERRORS:
        return extract_message(body.decode(errors="replace"))


def extract_message(value: Any) -> str:
    while isinstance(value, dict):
        value = next((value[name] for name in ("error", "message", "detail") if value.get(name)), str(value))
    return " ".join(str(value).split())[:MAX_ERROR_LENGTH]


class Target:
    def __init__(self, url: str, key: str | None, model: str | None, silence_seconds: float) -> None:
        self.url = url
        self.model = model
        self.length_fields: tuple[str, ...] = LENGTH_FIELDS
        address = parse_address(url)
        self._api = address.api
        self._headers = request_headers(address, key, "chat") | HEADERS
        self._timeouts = {"connect": CONNECT_SECONDS, "read": silence_seconds}
        # A general-purpose client needs about 100 µs per stream piece and would distort the results.
        self.transport = HttpTransport(ssl.create_default_context() if address.is_tls else None)

    async def request(self, method: str, route: str, feed: Callable[[bytes, float], object], body: bytes = b"") -> int:
        """Send a request, call `feed` with each part of the response and its time of arrival; return the status."""
        request = httpx.Request(
            method,
            f"{self._api}/{route}",
            headers=self._headers,
            content=body,
            extensions={"timeout": self._timeouts},
        )
        response = await self._open(request)
        stream = response.stream
        assert isinstance(stream, ResponseBody)

        def receive(data: bytes) -> bool:
            feed(data, stream.connection.received_at)
            return True

        try:
            await stream.push(receive)
        finally:
            await response.aclose()
        return response.status_code

    async def _open(self, request: httpx.Request) -> httpx.Response:
        while True:
            try:
                return await self.transport.handle_async_request(request)
            except StaleConnection:
                pass  # try the next connection

    async def choose_model(self) -> str:
        """Use the first listed model, unless one was named."""
        if self.model is None:
            body = bytearray()
            try:
                status = await self.request("GET", "models", lambda data, _: body.extend(data))
            except NO_RESPONSE as error:
                raise self._config_error(None, describe(error)) from error
            if status != 200:
                raise self._config_error(status, f"{status} {read_error(bytes(body))}")
            self.model = self._first_model(bytes(body))
        return self.model

    async def count_tokens(self, text: str) -> int:
        """Return the tokens of a prompt with this text. Also finds out which fields the server accepts."""
        sample = await self.send_first(text, 1)
        assert sample.usage is not None
        return sample.usage.prompt

    async def send_first(self, text: str, tokens: int) -> Sample:
        """Like `send`, before the measurement: an error is raised as an error of the flags."""
        while (sample := await self.send(text, tokens)).error is not None:
            is_rejected = sample.status in REJECTED_STATUSES
            rejected = [name for name in self.length_fields if is_rejected and name in sample.error]
            if not rejected:
                raise self._config_error(sample.status, sample.error)
            self.length_fields = tuple(name for name in self.length_fields if name not in rejected)
        return sample

    async def send(self, text: str, tokens: int) -> Sample:
        body = msgspec.json.encode(self._build_body(text, tokens))
        parser, status, received = StreamParser(), None, bytearray()
        start = time.perf_counter()

        def feed(data: bytes, at: float) -> None:
            parser.feed(data, at - start)
            if not parser.has_frames:
                received.extend(data)

        try:
            status = await self.request("POST", "chat/completions", feed, body)
            error = parser.find_error() if status == 200 else f"{status} {read_error(bytes(received))}"
        except NO_RESPONSE as failure:
            error = parser.find_error() and (parser.error or describe(failure))
        return Sample(time.perf_counter() - start, tuple(parser.arrivals), parser.usage, status, error)

    def _build_body(self, text: str, tokens: int) -> dict[str, Any]:
        lengths = {"ignore_eos": True, "min_tokens": tokens}
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **{name: lengths[name] for name in self.length_fields},
        }

    def _first_model(self, body: bytes) -> str:
        try:
            listing = msgspec.json.decode(body, type=ModelList)
        except DECODE_ERRORS as error:
            raise ConfigError(f"--url {self.url}: the answer is not a list of models") from error
        if not listing.data:
            raise ConfigError(f"--url {self.url}: the server lists no models; give --model")
        return listing.data[0].id

    def _config_error(self, status: int | None, message: str) -> ConfigError:
        if status is None:
            return ConfigError(f"--url {self.url}: no answer: {message}")
        if status == 200:
            return ConfigError(f"--url {self.url}: {message}")
        if status in REJECTED_STATUSES:
            return ConfigError(f"the server answered {message}")
        if status == 404 and self.model is not None and self.model in message:
            return ConfigError(f"--model {self.model}: the server answered {message}")
        hint = "; give --api-key" if status == 401 else ""
        return ConfigError(f"--url {self.url}: the server answered {message}{hint}")
