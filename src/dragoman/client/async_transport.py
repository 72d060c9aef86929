"""Calls as they leave by httpx, and what comes back: what is awaited, in one place.

`AsyncClient` is made of it, and so is every other place that asks servers from within an event loop.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from functools import partial

import httpx

from dragoman.client import http_settings
from dragoman.client.call import MOST_BYTES, MOST_ERROR_BYTES, Exchange
from dragoman.client.decompression import Unpack, unpacker
from dragoman.client.planner import Arrived, Call, Missed, Opening, Talk, Wait
from dragoman.core.errors import BadAnswer, Unreachable
from dragoman.core.events import Event, Listener, TextDelta

Answer = Arrived[httpx.Response]
Pour = Callable[[Callable[[bytes], bool]], Awaitable[bool]]
"""Calls a function with pieces of a body as they come, until it says no or there are no more: whether there may be."""
POUR = "dragoman.pour"
"""An extension of httpx's responses: the `Pour` of a transport that calls in the moment in which a piece arrives."""


class Line:
    def __init__(self, talk: Talk, http: httpx.AsyncClient) -> None:
        self.talk = talk
        self._http = http
        self._lingering: set[asyncio.Task[None]] = set()

    async def open(self, topic: str, calls: Sequence[Call]) -> tuple[Call, Answer]:
        """The answer to the first call that the server takes, when its head has come."""
        steps: Opening[httpx.Response] = self.talk.opening(topic, calls)
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
                opened: tuple[Call, Answer] = done.value
                return opened

    async def events(self, exchange: Exchange, arrived: Answer) -> AsyncGenerator[Sequence[Event], None]:
        """The reply, in lists that may be empty. To close the generator ends the generation over there."""
        exchange.head(arrived.status, arrived.headers)
        response = arrived.response
        pieces = _pieces(response)
        is_read = False
        try:
            try:
                async for piece in pieces:
                    yield exchange.feed(piece)
                    if exchange.finished:
                        break
                ended = exchange.end()
            except httpx.HTTPError as error:
                error.request = response.request
                ended = http_settings.broken(exchange, error)
            for events in ended:
                yield events
            is_read = True
            await _lingered(response, pieces)
        finally:
            if exchange.finished and not is_read:
                # Whoever has the whole reply need not wait until the server has ended its answer.
                self._linger(response, pieces)
            else:
                await response.aclose()

    async def tell(self, exchange: Exchange, arrived: Answer, listener: Listener) -> None:
        """The same reply, for a listener. Where the transport can, it is called as soon as the bytes are there."""
        exchange.head(arrived.status, arrived.headers)
        response = arrived.response
        handing = _Handing(exchange, listener)
        try:
            try:
                await handing.over(_pouring(response))
                ended = exchange.end()
            except httpx.HTTPError as error:
                error.request = response.request
                ended = http_settings.broken(exchange, error)
            for events in ended:
                await handing.out(events)
        finally:
            if exchange.finished and not _is_packed(response):
                self._linger(response, _pieces(response))
            else:
                await response.aclose()

    async def json(self, topic: str, calls: Sequence[Call]) -> bytes:
        _, arrived = await self.open(topic, calls)
        async with aclosing(arrived.response) as response:
            body, why = await _read(response, MOST_BYTES)
        if why:
            raise BadAnswer(f"the answer broke off: {why}")
        return body

    async def aclose(self) -> None:
        for task in self._lingering:
            task.cancel()
        await asyncio.gather(*self._lingering, return_exceptions=True)
        await self._http.aclose()

    async def _send(self, call: Call) -> Answer | Missed:
        if self._http.is_closed:
            raise Unreachable("this client has been closed")
        request = self._http.build_request(call.method, call.url, headers=call.headers, content=call.body)
        try:
            response = await self._http.send(request, stream=True)
        except httpx.HTTPError as error:
            return http_settings.missed(error)
        headers = http_settings.lower(response.headers)
        if response.is_success:
            return Arrived(response.status_code, headers, response)
        async with aclosing(response):
            body, _ = await _read(response, MOST_ERROR_BYTES)
            return Arrived(response.status_code, headers, response, body)

    def _linger(self, response: httpx.Response, pieces: AsyncIterator[bytes]) -> None:
        task = asyncio.create_task(_lingered(response, pieces))
        self._lingering.add(task)
        task.add_done_callback(self._lingering.discard)


class _Handing:
    """Events on their way to a listener who may want a pause."""

    def __init__(self, exchange: Exchange, listener: Listener) -> None:
        self._exchange = exchange
        self._listener = listener
        self._pause: Awaitable[None] | None = None

    async def over(self, pour: Pour) -> None:
        """All that comes, until the reply is complete."""
        try:
            while await pour(self._take):
                pause, self._pause = self._pause, None
                if pause is not None:
                    await pause
                if self._exchange.finished:
                    return
        finally:
            if isinstance(self._pause, Coroutine):
                # Whoever is cancelled waits for nothing any more.
                self._pause.close()

    def _take(self, piece: bytes) -> bool:
        events = self._exchange.feed(piece)
        if events:
            self._pause = pause = self._listener(events)
            if pause is None and type(events[-1]) is TextDelta:
                return True  # nearly always
        return self._pause is None and not self._exchange.finished

    async def out(self, events: Sequence[Event]) -> None:
        if events and (pause := self._listener(events)) is not None:
            await pause


def _pouring(response: httpx.Response) -> Pour:
    pour: Pour | None = response.extensions.get(POUR)
    return partial(_pour, _pieces(response)) if pour is None or _is_packed(response) else pour


async def _pour(pieces: AsyncIterator[bytes], take: Callable[[bytes], bool]) -> bool:
    async for piece in pieces:
        if not take(piece):
            return True
    return False


def _pieces(response: httpx.Response) -> AsyncIterator[bytes]:
    unpack = unpacker(response.headers)
    if unpack is not None:
        return _unpacked(response, unpack)
    # Where nothing has to be unpacked, each piece is spared two layers.
    return aiter(response.stream) if isinstance(response.stream, AsyncIterable) else response.aiter_raw()


async def _unpacked(response: httpx.Response, unpack: Unpack) -> AsyncIterator[bytes]:
    async for data in response.aiter_raw():
        for piece in unpack(data):
            yield piece
            # There may be a thousand pieces in what came as one: others want to do something, too.
            await asyncio.sleep(0)


def _is_packed(response: httpx.Response) -> bool:
    return "content-encoding" in response.headers


async def _lingered(response: httpx.Response, pieces: AsyncIterator[bytes]) -> None:
    """Reads what follows a complete reply, so that the connection can be used again, but not for long."""
    try:
        async with asyncio.timeout(http_settings.LINGER_SECONDS):
            async for _ in pieces:
                pass
    except (httpx.HTTPError, TimeoutError):
        pass  # all that matters has been read
    finally:
        await response.aclose()


async def _read(response: httpx.Response, most: int) -> tuple[bytes, str]:
    """As much of a body as came and is of use, and why it is not all of it."""
    body = bytearray()
    try:
        async for piece in _pieces(response):
            body += piece
            if len(body) > most:
                return bytes(body), f"it has more than {most} bytes"
    except httpx.HTTPError as error:
        return bytes(body), http_settings.words(error)
    return bytes(body), ""
