"""The client for programs that do other things meanwhile."""

import asyncio
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Self, Unpack

import httpx

from dragoman.client import listing, transport
from dragoman.client.address import DEFAULT
from dragoman.client.exchange import MOST_BYTES, MOST_ERROR_BYTES
from dragoman.client.gathering import Gathering
from dragoman.client.listing import Embeddings, Model
from dragoman.client.loop import STEPS, Invocation, Outcome, loop
from dragoman.client.options import Messages, Options, Question, question
from dragoman.client.retry import Retries
from dragoman.client.talk import Arrived, Call, Missed, Opening, ProtocolName, Talk, Wait
from dragoman.conversation import ToolResult
from dragoman.errors import BadAnswer, DragomanError
from dragoman.events import Event
from dragoman.reply import Reply

Heard = Callable[[Event | ToolResult], Awaitable[object] | object]


class AsyncStream:
    """The events of one reply as they come. To close it, or to leave the `async with`, ends the generation over there;
    so does a cancellation."""

    def __init__(self, events: AsyncGenerator[Sequence[Event], None], gathering: Gathering) -> None:
        self._batches = events
        self._gathering = gathering
        self._ready: list[Event] = []

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        while not self._ready:
            self._ready = list(await anext(self._batches))[::-1]
        return self._ready.pop()

    def reply(self) -> Reply:
        """The whole reply, once all events have come."""
        return self._gathering.reply()

    async def aclose(self) -> None:
        await self._batches.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()


class AsyncClient:
    """As `Client`; `run` takes async functions as tools, too. It belongs to one event loop."""

    def __init__(
        self,
        url: str = DEFAULT,
        *,
        model: str = "",
        api_key: str | None = None,
        protocol: ProtocolName = "auto",
        timeout: float = 600,
        connect_timeout: float = 10,
        retries: int | Retries = 2,
        headers: Mapping[str, str] | None = None,
        http: httpx.AsyncClient | None = None,
    ) -> None:
        repeated = retries if isinstance(retries, Retries) else Retries(retries)
        self._talk = Talk(url, model=model, api_key=api_key, protocol=protocol, retries=repeated, extra_headers=headers)
        self._http = http or httpx.AsyncClient(**transport.settings(self._talk.site, timeout, connect_timeout))

    @property
    def protocol(self) -> str | None:
        """The one that is spoken; None as long as nobody knows."""
        return self._talk.protocol

    async def complete(self, messages: Messages, **options: Unpack[Options]) -> Reply:
        return await self._complete(question(messages, self._talk.model, options))

    def stream(self, messages: Messages, **options: Unpack[Options]) -> AsyncStream:
        return self._stream(question(messages, self._talk.model, options))

    async def run(
        self, messages: Messages, *, steps: int = STEPS, on_event: Heard | None = None, **options: Unpack[Options]
    ) -> Outcome:
        """As `Client.run`. Calls run at the same time, async functions in this event loop and others in threads."""
        turns = loop(question(messages, self._talk.model, options), steps)
        wanted = next(turns)
        while True:
            if isinstance(wanted, Question):
                came: Any = await self._turn(wanted, on_event)
            else:
                came = await _invoke(wanted, on_event)
            try:
                wanted = turns.send(came)
            except StopIteration as done:
                outcome: Outcome = done.value
                return outcome

    async def embed(self, texts: str | Sequence[str], *, model: str = "", dimensions: int | None = None) -> Embeddings:
        given = [texts] if isinstance(texts, str) else list(texts)
        body = await self._json("embeddings", [listing.embeddings_call(self._talk, given, model, dimensions)])
        return listing.read_embeddings(body, len(given))

    async def models(self) -> tuple[Model, ...]:
        found: list[Model] = []
        after: str | None = None
        while True:
            page = listing.read_models(await self._json("models", [listing.models_call(self._talk, after)]))
            found += page.models
            if page.next is None or page.next == after:
                return tuple(found)
            after = page.next

    async def count_tokens(self, messages: Messages, **options: Unpack[Options]) -> int:
        request = question(messages, self._talk.model, options).request
        return listing.read_count(await self._json("count", listing.count_calls(self._talk, request)))

    async def aclose(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def _turn(self, asked: Question, on_event: Heard | None) -> Reply:
        """One reply of a loop, in which malformed arguments are for the model to hear of."""
        if on_event is None:
            return await self._complete(asked, check_calls=False)
        async with self._stream(asked, check_calls=False) as events:
            async for event in events:
                await _tell(on_event, event)
            return events.reply()

    async def _complete(self, asked: Question, check_calls: bool = True) -> Reply:
        gathering = Gathering(asked.shape)
        async for _ in self._batches(asked, gathering, False, check_calls):
            pass
        return gathering.reply()

    def _stream(self, asked: Question, check_calls: bool = True) -> AsyncStream:
        gathering = Gathering(asked.shape)
        return AsyncStream(self._batches(asked, gathering, True, check_calls), gathering)

    async def _batches(
        self, asked: Question, gathering: Gathering, stream: bool, check_calls: bool
    ) -> AsyncGenerator[Sequence[Event], None]:
        call, arrived = await self._open(
            "generate", self._talk.questions(asked.request, stream=stream, check_calls=check_calls)
        )
        exchange, response = call.exchange, arrived.response
        assert exchange is not None
        exchange.head(arrived.status, arrived.headers)
        try:
            pieces = response.aiter_bytes()
            try:
                async for piece in pieces:
                    yield gathering.add(exchange.feed(piece))
                    if exchange.finished:
                        break
                ended = exchange.end()
            except httpx.HTTPError as error:
                ended = transport.broken(exchange, error)
            for events in ended:
                yield gathering.add(events)
            await _linger(pieces)
        except DragomanError as error:
            gathering.note(error)
            raise
        finally:
            await response.aclose()

    async def _open(self, topic: str, calls: Sequence[Call]) -> tuple[Call, Arrived[httpx.Response]]:
        """The answer to the first call that the server takes, when its head has come."""
        steps: Opening[httpx.Response] = self._talk.opening(topic, calls)
        step = next(steps)
        while True:
            came: object = None
            if isinstance(step, Wait):
                await asyncio.sleep(step.seconds)
            else:
                came = await self._send(step.call)
            try:
                step = steps.send(came)
            except StopIteration as done:
                opened: tuple[Call, Arrived[httpx.Response]] = done.value
                return opened

    async def _send(self, call: Call) -> Arrived[httpx.Response] | Missed:
        request = self._http.build_request(call.method, call.url, headers=call.headers, content=call.body)
        try:
            response = await self._http.send(request, stream=True)
        except httpx.HTTPError as error:
            return transport.missed(error)
        headers = transport.lower(response.headers)
        if response.is_success:
            return Arrived(response.status_code, headers, response)
        async with aclosing(response):
            body, _ = await _read(response, MOST_ERROR_BYTES)
            return Arrived(response.status_code, headers, response, body)

    async def _json(self, topic: str, calls: Sequence[Call]) -> bytes:
        _, arrived = await self._open(topic, calls)
        async with aclosing(arrived.response) as response:
            body, why = await _read(response, MOST_BYTES)
        if why:
            raise BadAnswer(f"the answer broke off: {why}")
        return body


async def _read(response: httpx.Response, most: int) -> tuple[bytes, str]:
    """As much of a body as came and is of use, and why it is not all of it."""
    body = bytearray()
    try:
        async for piece in response.aiter_bytes():
            body += piece
            if len(body) > most:
                return bytes(body), f"it has more than {most} bytes"
    except httpx.HTTPError as error:
        return bytes(body), transport.words(error)
    return bytes(body), ""


async def _linger(pieces: AsyncIterator[bytes]) -> None:
    """Reads what follows a complete reply, so that the connection can be used again, but waits for nobody."""
    try:
        async with asyncio.timeout(transport.LINGER_SECONDS):
            async for _ in pieces:
                pass
    except (httpx.HTTPError, TimeoutError):
        pass  # all that matters has been read


async def _tell(on_event: Heard, event: Event | ToolResult) -> None:
    told = on_event(event)
    if inspect.isawaitable(told):
        await told


async def _invoke(calls: Sequence[Invocation], on_event: Heard | None) -> list[ToolResult]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(call.run_async()) for call in calls]
    results = [task.result() for task in tasks]
    for result in results:
        if on_event is not None:
            await _tell(on_event, result)
    return results
