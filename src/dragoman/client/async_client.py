"""The client for programs that do other things meanwhile."""

import asyncio
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Self, Unpack

import httpx

from dragoman.client import http_settings, rest_calls
from dragoman.client.async_transport import Line
from dragoman.client.collector import Gathering
from dragoman.client.options import Messages, Options, Question, question
from dragoman.client.planner import ProtocolName, Talk
from dragoman.client.rest_calls import Embeddings, Model
from dragoman.client.tool_loop import STEPS, Invocation, Outcome, loop
from dragoman.core.errors import DragomanError
from dragoman.core.events import Event
from dragoman.core.reply import Reply
from dragoman.core.request import ToolResult
from dragoman.core.urls import DEFAULT
from dragoman.protocols.client.retry import Retries

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
        self._talk = Talk(url, model=model, api_key=api_key, protocol=protocol, retries=retries, extra_headers=headers)
        settings = http_settings.settings(self._talk.site, timeout, connect_timeout)
        self._line = Line(self._talk, http or httpx.AsyncClient(**settings))

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
        given = rest_calls.texts(texts)
        body = await self._line.json("embeddings", [rest_calls.embeddings_call(self._talk, given, model, dimensions)])
        return rest_calls.read_embeddings(body, len(given)).plain

    async def models(self) -> tuple[Model, ...]:
        found: list[Model] = []
        after: str | None = None
        while True:
            page = rest_calls.read_models(await self._line.json("models", [rest_calls.models_call(self._talk, after)]))
            found += page.models
            if page.next is None or page.next == after:
                return tuple(found)
            after = page.next

    async def count_tokens(self, messages: Messages, **options: Unpack[Options]) -> int:
        request = question(messages, self._talk.model, options).request
        return rest_calls.read_count(await self._line.json("count", rest_calls.count_calls(self._talk, request)))

    async def aclose(self) -> None:
        await self._line.aclose()

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
        calls = self._talk.questions(asked.request, stream=stream, check_calls=check_calls)
        call, arrived = await self._line.open("generate", calls)
        assert call.exchange is not None
        try:
            async with aclosing(self._line.events(call.exchange, arrived)) as events:
                async for batch in events:
                    yield gathering.add(batch)
        except DragomanError as error:
            gathering.note(error)
            raise


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
