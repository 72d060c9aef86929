"""The client for programs that wait."""

import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, Self, Unpack

import httpx

from dragoman.client import http_settings, rest_calls
from dragoman.client.call import MOST_BYTES, MOST_ERROR_BYTES
from dragoman.client.collector import Gathering
from dragoman.client.decompression import unpacker
from dragoman.client.options import Messages, Options, Question, question
from dragoman.client.planner import Arrived, Call, Missed, Opening, ProtocolName, Talk, Wait
from dragoman.client.rest_calls import Embeddings, Model
from dragoman.client.tool_loop import STEPS, Invocation, Outcome, loop
from dragoman.core.errors import BadAnswer, DragomanError, Unreachable
from dragoman.core.events import Event
from dragoman.core.reply import Reply
from dragoman.core.request import ToolResult
from dragoman.core.urls import DEFAULT
from dragoman.protocols.client.retry import Retries

Heard = Callable[[Event | ToolResult], object]


class Stream:
    """The events of one reply as they come. To close it, or to leave the `with`, ends the generation over there."""

    def __init__(self, events: Generator[Sequence[Event], None, None], gathering: Gathering) -> None:
        self._batches = events
        self._gathering = gathering
        self._events = self._flat()

    def _flat(self) -> Iterator[Event]:
        for batch in self._batches:
            yield from batch

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        return next(self._events)

    def reply(self) -> Reply:
        """The whole reply, once all events have come."""
        return self._gathering.reply()

    def close(self) -> None:
        self._batches.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Client:
    """`timeout` is for how long a server may be silent. `retries` is how often a request is repeated that cannot have
    run. Threads may share a client; they share its connections, too."""

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
        http: httpx.Client | None = None,
    ) -> None:
        self._talk = Talk(url, model=model, api_key=api_key, protocol=protocol, retries=retries, extra_headers=headers)
        self._http = http or httpx.Client(**http_settings.settings(self._talk.site, timeout, connect_timeout))

    @property
    def protocol(self) -> str | None:
        """The one that is spoken; None as long as nobody knows."""
        return self._talk.protocol

    def complete(self, messages: Messages, **options: Unpack[Options]) -> Reply:
        return self._complete(question(messages, self._talk.model, options))

    def stream(self, messages: Messages, **options: Unpack[Options]) -> Stream:
        return self._stream(question(messages, self._talk.model, options))

    def run(
        self, messages: Messages, *, steps: int = STEPS, on_event: Heard | None = None, **options: Unpack[Options]
    ) -> Outcome:
        """Lets the model call the functions among the tools until it has an answer. With `on_event` every reply is
        streamed, and its events and the results of the calls are told as they come."""
        turns = loop(question(messages, self._talk.model, options), steps)
        wanted = next(turns)
        while True:
            came: Any = self._turn(wanted, on_event) if isinstance(wanted, Question) else _invoke(wanted, on_event)
            try:
                wanted = turns.send(came)
            except StopIteration as done:
                outcome: Outcome = done.value
                return outcome

    def embed(self, texts: str | Sequence[str], *, model: str = "", dimensions: int | None = None) -> Embeddings:
        given = rest_calls.texts(texts)
        body = self._json("embeddings", [rest_calls.embeddings_call(self._talk, given, model, dimensions)])
        return rest_calls.read_embeddings(body, len(given)).plain

    def models(self) -> tuple[Model, ...]:
        found: list[Model] = []
        after: str | None = None
        while True:
            page = rest_calls.read_models(self._json("models", [rest_calls.models_call(self._talk, after)]))
            found += page.models
            if page.next is None or page.next == after:
                return tuple(found)
            after = page.next

    def count_tokens(self, messages: Messages, **options: Unpack[Options]) -> int:
        request = question(messages, self._talk.model, options).request
        return rest_calls.read_count(self._json("count", rest_calls.count_calls(self._talk, request)))

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _turn(self, asked: Question, on_event: Heard | None) -> Reply:
        """One reply of a loop, in which malformed arguments are for the model to hear of."""
        if on_event is None:
            return self._complete(asked, check_calls=False)
        with self._stream(asked, check_calls=False) as events:
            for event in events:
                on_event(event)
            return events.reply()

    def _complete(self, asked: Question, check_calls: bool = True) -> Reply:
        gathering = Gathering(asked.shape)
        for _ in self._batches(asked, gathering, False, check_calls):
            pass
        return gathering.reply()

    def _stream(self, asked: Question, check_calls: bool = True) -> Stream:
        gathering = Gathering(asked.shape)
        return Stream(self._batches(asked, gathering, True, check_calls), gathering)

    def _batches(
        self, asked: Question, gathering: Gathering, stream: bool, check_calls: bool
    ) -> Generator[Sequence[Event], None, None]:
        call, arrived = self._open(
            "generate", self._talk.questions(asked.request, stream=stream, check_calls=check_calls)
        )
        exchange, response = call.exchange, arrived.response
        assert exchange is not None
        exchange.head(arrived.status, arrived.headers)
        try:
            pieces = _pieces(response)
            try:
                for piece in pieces:
                    yield gathering.add(exchange.feed(piece))
                    if exchange.finished:
                        break
                ended = exchange.end()
            except httpx.HTTPError as error:
                ended = http_settings.broken(exchange, error)
            for events in ended:
                yield gathering.add(events)
            _linger(response, pieces)
        except DragomanError as error:
            gathering.note(error)
            raise
        finally:
            response.close()

    def _open(self, topic: str, calls: Sequence[Call]) -> tuple[Call, Arrived[httpx.Response]]:
        """The answer to the first call that the server takes, when its head has come."""
        steps: Opening[httpx.Response] = self._talk.opening(topic, calls)
        step = next(steps)
        while True:
            came: object = None
            if isinstance(step, Wait):
                time.sleep(step.seconds)
            else:
                came = self._send(step.call)
            try:
                step = steps.send(came)
            except StopIteration as done:
                opened: tuple[Call, Arrived[httpx.Response]] = done.value
                return opened

    def _send(self, call: Call) -> Arrived[httpx.Response] | Missed:
        if self._http.is_closed:
            raise Unreachable("this client has been closed")
        request = self._http.build_request(call.method, call.url, headers=call.headers, content=call.body)
        try:
            response = self._http.send(request, stream=True)
        except httpx.HTTPError as error:
            return http_settings.missed(error)
        headers = http_settings.lower(response.headers)
        if response.is_success:
            return Arrived(response.status_code, headers, response)
        with closing(response):
            body, _ = _read(response, MOST_ERROR_BYTES)
            return Arrived(response.status_code, headers, response, body)

    def _json(self, topic: str, calls: Sequence[Call]) -> bytes:
        _, arrived = self._open(topic, calls)
        with closing(arrived.response) as response:
            body, why = _read(response, MOST_BYTES)
        if why:
            raise BadAnswer(f"the answer broke off: {why}")
        return body


def _pieces(response: httpx.Response) -> Iterator[bytes]:
    unpack = unpacker(response.headers)
    raw = response.iter_raw()
    return raw if unpack is None else (piece for data in raw for piece in unpack(data))


def _read(response: httpx.Response, most: int) -> tuple[bytes, str]:
    """As much of a body as came and is of use, and why it is not all of it."""
    body = bytearray()
    try:
        for piece in _pieces(response):
            body += piece
            if len(body) > most:
                return bytes(body), f"it has more than {most} bytes"
    except httpx.HTTPError as error:
        return bytes(body), http_settings.words(error)
    return bytes(body), ""


def _linger(response: httpx.Response, pieces: Iterator[bytes]) -> None:
    """Reads what follows a complete reply, so that the connection can be used again, but waits for nobody."""
    if response.is_stream_consumed and response.is_closed:
        return
    timer = threading.Timer(http_settings.LINGER_SECONDS, _hang_up, [response])
    timer.daemon = True
    timer.start()
    try:
        for _ in pieces:
            pass
    except httpx.HTTPError:
        pass  # all that matters has been read
    finally:
        timer.cancel()


def _hang_up(response: httpx.Response) -> None:
    socket = response.extensions["network_stream"].get_extra_info("socket")
    try:
        socket.shutdown(2)
    except OSError:
        pass  # somebody was faster


def _invoke(calls: Sequence[Invocation], on_event: Heard | None) -> list[ToolResult]:
    with ThreadPoolExecutor(max_workers=max(1, min(32, len(calls)))) as pool:
        results = list(pool.map(Invocation.run, calls))
    for result in results:
        if on_event is not None:
            on_event(result)
    return results
