"""One server under load: what it is asked, and what came when.

Of each frame only what is measured is parsed: whether it brings something of the reply, the finish reason, the usage,
an error. A reply is whole when its finish reason and its usage have come.

Fields that only some servers know are sent until a 400 (or 422) names them; then they are left out.
"""

import time
from typing import Any

import msgspec

from dragoman.core.errors import DECODE_ERRORS, ConfigError
from dragoman.loadtest.connection import Broken, Connections, Feed
from dragoman.loadtest.figures import Sample, Usage

LENGTH_FIELDS = ("ignore_eos", "min_tokens")
"""They keep a reply from ending before it has the wanted length."""
REFUSALS = (400, 422)
WORDS_OF_AN_ERROR = 300


class Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class Choice(msgspec.Struct, frozen=True):
    delta: Delta | None = None
    finish_reason: str | None = None


class CachedTokens(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class WireUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: CachedTokens | None = None


class Frame(msgspec.Struct, frozen=True):
    choices: tuple[Choice, ...] | None = None
    usage: WireUsage | None = None
    error: Any = None


class ListedModel(msgspec.Struct, frozen=True):
    id: str


class Listing(msgspec.Struct, frozen=True):
    data: tuple[ListedModel, ...]


FRAMES = msgspec.json.Decoder(Frame)


class Reading:
    """A stream as it comes in, without any input or output of its own."""

    def __init__(self) -> None:
        self.arrivals: list[float] = []
        self.usage: Usage | None = None
        self.finished = False
        self.error: str | None = None
        self.streams = False
        """Whether a frame has come."""
        self.rest = b""

    def feed(self, data: bytes, at: float) -> None:
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (frame := line[5:].strip()) != b"[DONE]":
                self._frame(frame, at)

    def fault(self) -> str | None:
        """What is wrong with the stream now that it has ended."""
        if self.error is not None:
            return self.error
        if not self.finished:
            return "the stream broke off" if self.arrivals else "no stream came back"
        return "the stream told no usage" if self.usage is None else None

    def _frame(self, data: bytes, at: float) -> None:
        self.streams = True
        try:
            frame = FRAMES.decode(data)
        except DECODE_ERRORS as error:
            self.error = self.error or f"a frame that is none of chat completions: {error}"
            return
        if frame.error is not None:
            self.error = self.error or words_in(frame.error)
        if frame.usage is not None:
            self.usage = _usage(frame.usage)
        for choice in frame.choices or ():
            # Some servers have an empty reason until there is one.
            self.finished |= bool(choice.finish_reason)
            delta = choice.delta
            if delta and (delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls):
                self.arrivals.append(at)


def _usage(wire: WireUsage) -> Usage:
    details = wire.prompt_tokens_details
    return Usage(wire.prompt_tokens, wire.completion_tokens, details.cached_tokens if details else None)


def words_of(body: bytes) -> str:
    """The message of an error body, whichever shape it has; else the body itself."""
    try:
        return words_in(msgspec.json.decode(body))
    except DECODE_ERRORS:
        return words_in(body.decode(errors="replace"))


def words_in(found: Any) -> str:
    while isinstance(found, dict):
        found = next((found[name] for name in ("error", "message", "detail") if found.get(name)), str(found))
    return " ".join(str(found).split())[:WORDS_OF_AN_ERROR]


class Target:
    def __init__(self, url: str, key: str | None, model: str | None, silence_seconds: float) -> None:
        self.url = url
        self.model = model
        self.length_fields: tuple[str, ...] = LENGTH_FIELDS
        self.connections = Connections(url, key, silence_seconds)

    async def choose_model(self) -> str:
        """The model to ask: the first that is listed, unless one was named."""
        if self.model is None:
            body = bytearray()
            try:
                status = await self.connections.ask(self.connections.request("GET", "models"), _collecting(body))
            except Broken as error:
                raise self._refused(None, str(error)) from error
            if status != 200:
                raise self._refused(status, f"{status} {words_of(bytes(body))}")
            self.model = self._first(bytes(body))
        return self.model

    async def count(self, text: str) -> int:
        """The tokens of a prompt with this text. On the way it is learned which fields the server takes."""
        sample = await self.ask_first(text, 1)
        assert sample.usage is not None
        return sample.usage.prompt

    async def ask_first(self, text: str, tokens: int) -> Sample:
        """As `ask`, for a time when nothing is measured yet: an error is one of whoever gave the flags."""
        while (sample := await self.ask(text, tokens)).error is not None:
            refused = [name for name in self.length_fields if sample.status in REFUSALS and name in sample.error]
            if not refused:
                raise self._refused(sample.status, sample.error)
            self.length_fields = tuple(name for name in self.length_fields if name not in refused)
        return sample

    async def ask(self, text: str, tokens: int) -> Sample:
        body = msgspec.json.encode(self._body(text, tokens))
        request = self.connections.request("POST", "chat/completions", body)
        reading, status, received = Reading(), None, bytearray()
        begun = time.perf_counter()

        def feed(data: bytes, at: float) -> None:
            reading.feed(data, at - begun)
            if not reading.streams:
                received.extend(data)

        try:
            status = await self.connections.ask(request, feed)
            error = reading.fault() if status == 200 else f"{status} {words_of(bytes(received))}"
        except Broken as failure:
            error = str(failure)
        return Sample(time.perf_counter() - begun, tuple(reading.arrivals), reading.usage, status, error)

    def _body(self, text: str, tokens: int) -> dict[str, Any]:
        lengths = {"ignore_eos": True, "min_tokens": tokens}
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **{name: lengths[name] for name in self.length_fields},
        }

    def _first(self, body: bytes) -> str:
        try:
            listing = msgspec.json.decode(body, type=Listing)
        except DECODE_ERRORS as error:
            raise ConfigError(f"--url {self.url}: what answers there is no list of models") from error
        if not listing.data:
            raise ConfigError(f"--url {self.url}: no model is listed there; name one with --model")
        return listing.data[0].id

    def _refused(self, status: int | None, words: str) -> ConfigError:
        if status is None:
            return ConfigError(f"--url {self.url}: no answer: {words}")
        if status == 200:
            return ConfigError(f"--url {self.url}: {words}")
        if status in REFUSALS:
            return ConfigError(f"the server answered {words}")
        if status == 404 and self.model is not None and self.model in words:
            return ConfigError(f"--model {self.model}: the server answered {words}")
        way_out = "; give --api-key" if status == 401 else ""
        return ConfigError(f"--url {self.url}: the server answered {words}{way_out}")


def _collecting(body: bytearray) -> Feed:
    def feed(data: bytes, _: float) -> None:
        body.extend(data)

    return feed
