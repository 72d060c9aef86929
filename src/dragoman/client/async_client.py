"""The asyncio client."""

import asyncio
import inspect
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Self, Unpack

import httpx

from dragoman.client import http_settings, rest_calls
from dragoman.client.addresses import find_server
from dragoman.client.async_transport import AsyncTransport
from dragoman.client.call import ReplyCollector
from dragoman.client.options import ClientRequest, Messages, Options, build_request, check_options
from dragoman.client.planner import CallPlanner, ProtocolName, run_steps_async
from dragoman.client.rest_calls import Embeddings, ServerModel
from dragoman.client.tool_loop import DEFAULT_STEPS, Invocation, LoopStep, Outcome, run_tool_loop
from dragoman.core.engine import RenderedPrompt
from dragoman.core.errors import DragomanError
from dragoman.core.events import Event
from dragoman.core.reply import Reply
from dragoman.core.request import ToolResult
from dragoman.protocols.retry import Retries

AsyncEventCallback = Callable[[Event | ToolResult], Awaitable[object] | object]


class AsyncStream:
    """Iterates over the events of one reply. Closing it, leaving the `async with` block or cancelling the task stops
    the generation."""

    def __init__(self, batches: AsyncGenerator[Sequence[Event], None], collector: ReplyCollector) -> None:
        self._batches = batches
        self._collector = collector
        self._events = (event async for batch in batches for event in batch)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        return await anext(self._events)

    def reply(self) -> Reply:
        """Return the whole reply. Raises `StreamCutOff` if not all events have been read."""
        return self._collector.reply()

    async def aclose(self) -> None:
        await self._batches.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()


class AsyncClient:
    """The asyncio version of `Client`, for use in one event loop. The tools of `run` may be async functions."""

    def __init__(
        self,
        url: str | None = None,
        *,
        api_key: str | None = None,
        protocol: ProtocolName = "auto",
        timeout: float = 600,
        connect_timeout: float = 10,
        retries: int | Retries = 2,
        headers: Mapping[str, str] | None = None,
        http: httpx.AsyncClient | None = None,
        **defaults: Unpack[Options],
    ) -> None:
        self._defaults = check_options(defaults)
        url, api_key = find_server(url, api_key, os.environ)
        self._planner = CallPlanner(
            url,
            model=defaults.get("model") or "",
            api_key=api_key,
            protocol=protocol,
            retries=retries,
            extra_headers=headers,
        )
        settings = http_settings.client_settings(self._planner.address, timeout, connect_timeout)
        self._transport = AsyncTransport(http or httpx.AsyncClient(**settings))

    @property
    def protocol(self) -> str | None:
        """The protocol in use; None until the server has answered."""
        return self._planner.protocol

    async def complete(self, messages: Messages, **options: Unpack[Options]) -> Reply:
        return await self._complete(build_request(messages, {**self._defaults, **options}))

    def stream(self, messages: Messages, **options: Unpack[Options]) -> AsyncStream:
        return self._stream(build_request(messages, {**self._defaults, **options}))

    async def run(
        self,
        messages: Messages,
        *,
        steps: int = DEFAULT_STEPS,
        on_event: AsyncEventCallback | None = None,
        **options: Unpack[Options],
    ) -> Outcome:
        """Like `Client.run`. Async functions run in this event loop, other functions in threads."""

        async def perform(step: LoopStep) -> object:
            if isinstance(step, ClientRequest):
                return await self._run_turn(step, on_event)
            return await _run_calls(step, on_event)

        request = build_request(messages, {**self._defaults, **options})
        return await run_steps_async(run_tool_loop(request, steps), perform)

    async def embed(self, texts: str | Sequence[str], *, model: str = "", dimensions: int | None = None) -> Embeddings:
        return await self._transport.run(rest_calls.embed_texts(self._planner, texts, model, dimensions))

    async def models(self) -> tuple[ServerModel, ...]:
        return await self._transport.run(rest_calls.list_models(self._planner))

    async def count_tokens(self, messages: Messages, **options: Unpack[Options]) -> int:
        request = build_request(messages, {**self._defaults, **options}).request
        return await self._transport.run(rest_calls.count_tokens(self._planner, request))

    async def render(self, messages: Messages, **options: Unpack[Options]) -> RenderedPrompt:
        request = build_request(messages, {**self._defaults, **options}).request
        return await self._transport.run(rest_calls.render(self._planner, request))

    async def aclose(self) -> None:
        await self._transport.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def _run_turn(self, request: ClientRequest, on_event: AsyncEventCallback | None) -> Reply:
        """Get one reply of the tool loop. The loop reports malformed arguments to the model itself."""
        if on_event is None:
            return await self._complete(request, check_calls=False)
        async with self._stream(request, check_calls=False) as events:
            async for event in events:
                await _call_back(on_event, event)
            return events.reply()

    async def _complete(self, request: ClientRequest, check_calls: bool = True) -> Reply:
        collector = ReplyCollector(request.output_type)
        async for _ in self._batches(request, collector, False, check_calls):
            pass
        return collector.reply()

    def _stream(self, request: ClientRequest, check_calls: bool = True) -> AsyncStream:
        collector = ReplyCollector(request.output_type)
        return AsyncStream(self._batches(request, collector, True, check_calls), collector)

    async def _batches(
        self, request: ClientRequest, collector: ReplyCollector, stream: bool, check_calls: bool
    ) -> AsyncGenerator[Sequence[Event], None]:
        calls = self._planner.generation_calls(request.request, stream=stream, check_calls=check_calls)
        call, response = await self._transport.run(self._planner.open("generate", calls))
        assert call.client_call is not None
        collector.client_call = call.client_call
        try:
            async with aclosing(self._transport.events(call.client_call, response)) as events:
                async for batch in events:
                    yield collector.add(batch)
        except DragomanError as error:
            collector.attach_to(error)
            raise


async def _call_back(on_event: AsyncEventCallback, event: Event | ToolResult) -> None:
    result = on_event(event)
    if inspect.isawaitable(result):
        await result


async def _run_calls(calls: Sequence[Invocation], on_event: AsyncEventCallback | None) -> list[ToolResult]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(call.run_async()) for call in calls]
    results = [task.result() for task in tasks]
    for result in results:
        if on_event is not None:
            await _call_back(on_event, result)
    return results
