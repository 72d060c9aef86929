"""Sends calls with `httpx.AsyncClient` and reads their responses.

`AsyncClient` and the upstream engine are built on it.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from functools import partial
from typing import TypeVar

import httpx

from dragoman.client import http_settings
from dragoman.client.call import ClientCall
from dragoman.client.planner import FailedAttempt, PlannedCall, ReadBody, Step, Steps, run_steps_async
from dragoman.core.errors import Unreachable
from dragoman.core.events import Event, Listener, TextDelta

T = TypeVar("T")
PushBody = Callable[[Callable[[bytes], bool]], Awaitable[bool]]
"""Calls a function with each chunk of a body until it returns False. Returns whether there may be more chunks."""
PUSH_BODY = "dragoman.push_body"
"""An httpx response extension: the `PushBody` of a transport that delivers each chunk as soon as it arrives."""


class AsyncTransport:
    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self._draining: set[asyncio.Task[None]] = set()

    async def run(self, steps: Steps[T]) -> T:
        return await run_steps_async(steps, self._perform)

    async def events(self, client_call: ClientCall, response: httpx.Response) -> AsyncGenerator[Sequence[Event], None]:
        """Yield the events of the reply in lists, which may be empty. Closing the generator stops the generation."""
        client_call.head(response.headers)
        chunks = _iter_chunks(response)
        is_read = False
        try:
            try:
                async for chunk in chunks:
                    yield client_call.feed(chunk)
                    if client_call.finished:
                        break
                last = client_call.end()
            except httpx.HTTPError as error:
                error.request = response.request
                last = http_settings.end_interrupted(client_call, error)
            for events in last:
                yield events
            is_read = True
            await _drain(response, chunks)
        finally:
            if client_call.finished and not is_read:
                # The reply is complete: the caller need not wait until the server ends the response.
                self._drain_in_background(response, chunks)
            else:
                await response.aclose()

    async def deliver(self, client_call: ClientCall, response: httpx.Response, listener: Listener) -> None:
        """Pass the events of the reply to a listener, immediately on arrival if the transport supports that."""
        client_call.head(response.headers)
        feed = _ListenerFeed(client_call, listener)
        try:
            try:
                await feed.read(_body_pusher(response))
                last = client_call.end()
            except httpx.HTTPError as error:
                error.request = response.request
                last = http_settings.end_interrupted(client_call, error)
            for events in last:
                if events and (pause := listener(events)) is not None:
                    await pause
        finally:
            if client_call.finished and not _is_compressed(response):
                self._drain_in_background(response, _iter_chunks(response))
            else:
                await response.aclose()

    async def aclose(self) -> None:
        for task in self._draining:
            task.cancel()
        await asyncio.gather(*self._draining, return_exceptions=True)
        await self._http.aclose()

    async def _perform(self, step: Step) -> object:
        if isinstance(step, PlannedCall):
            return await self._send(step)
        if isinstance(step, ReadBody):
            return await _read_body(step)
        await asyncio.sleep(step.seconds)
        return None

    async def _send(self, call: PlannedCall) -> httpx.Response | FailedAttempt:
        if self._http.is_closed:
            raise Unreachable("this client has been closed")
        request = self._http.build_request(call.method, call.url, headers=call.headers, content=call.body)
        try:
            return await self._http.send(request, stream=True)
        except httpx.HTTPError as error:
            return http_settings.failed_attempt(error)

    def _drain_in_background(self, response: httpx.Response, chunks: AsyncIterator[bytes]) -> None:
        task = asyncio.create_task(_drain(response, chunks))
        self._draining.add(task)
        task.add_done_callback(self._draining.discard)


class _ListenerFeed:
    """Passes events to a listener, which may ask for a pause by returning an awaitable."""

    def __init__(self, client_call: ClientCall, listener: Listener) -> None:
        self._client_call = client_call
        self._listener = listener
        self._pause: Awaitable[None] | None = None

    async def read(self, push_body: PushBody) -> None:
        """Read until the reply is complete or the body ends."""
        try:
            while await push_body(self._receive):
                pause, self._pause = self._pause, None
                if pause is not None:
                    await pause
                if self._client_call.finished:
                    return
        finally:
            if isinstance(self._pause, Coroutine):
                # Cancelled: the pause is never awaited.
                self._pause.close()

    def _receive(self, chunk: bytes) -> bool:
        events = self._client_call.feed(chunk)
        if events:
            self._pause = pause = self._listener(events)
            if pause is None and type(events[-1]) is TextDelta:
                return True  # the most common case
        return self._pause is None and not self._client_call.finished


def _body_pusher(response: httpx.Response) -> PushBody:
    push_body: PushBody | None = response.extensions.get(PUSH_BODY)
    if push_body is None or _is_compressed(response):
        return partial(_push_chunks, _iter_chunks(response))
    return push_body


async def _push_chunks(chunks: AsyncIterator[bytes], receive: Callable[[bytes], bool]) -> bool:
    async for chunk in chunks:
        if not receive(chunk):
            return True
    return False


def _iter_chunks(response: httpx.Response) -> AsyncIterator[bytes]:
    decompress = http_settings.decompressor(response.headers)
    if decompress is not None:
        return _decompressed(response, decompress)
    # Without decompression each chunk can skip two layers of httpx.
    return aiter(response.stream) if isinstance(response.stream, AsyncIterable) else response.aiter_raw()


async def _decompressed(response: httpx.Response, decompress: http_settings.Decompress) -> AsyncIterator[bytes]:
    async for data in response.aiter_raw():
        for piece in decompress(data):
            yield piece
            # One compressed chunk may expand to a thousand: let other tasks run.
            await asyncio.sleep(0)


def _is_compressed(response: httpx.Response) -> bool:
    return "content-encoding" in response.headers


async def _drain(response: httpx.Response, chunks: AsyncIterator[bytes]) -> None:
    """Read the rest of a complete reply, so that the connection can be reused. Close it after DRAIN_SECONDS."""
    try:
        async with asyncio.timeout(http_settings.DRAIN_SECONDS):
            async for _ in chunks:
                pass
    except (httpx.HTTPError, TimeoutError):
        pass  # the reply is complete
    finally:
        await response.aclose()


async def _read_body(step: ReadBody) -> tuple[bytes, str]:
    body = bytearray()
    async with aclosing(step.response):
        try:
            async for chunk in _iter_chunks(step.response):
                body += chunk
                if len(body) > step.limit:
                    return bytes(body), f"it is larger than {step.limit} bytes"
        except httpx.HTTPError as error:
            return bytes(body), http_settings.describe(error)
    return bytes(body), ""
