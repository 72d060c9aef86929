"""The synchronous client."""

import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Self, Unpack

import httpx

from dragoman.client import http_settings, rest_calls
from dragoman.client.addresses import find_server
from dragoman.client.call import ReplyCollector
from dragoman.client.options import ClientRequest, Messages, Options, build_request, check_options
from dragoman.client.planner import (
    CallPlanner,
    FailedAttempt,
    PlannedCall,
    ProtocolName,
    ReadBody,
    Step,
    run_steps,
)
from dragoman.client.rest_calls import Embeddings, ServerModel
from dragoman.client.tool_loop import DEFAULT_STEPS, Invocation, LoopStep, Outcome, run_tool_loop
from dragoman.core.engine import RenderedPrompt
from dragoman.core.errors import DragomanError, Unreachable
from dragoman.core.events import Event
from dragoman.core.reply import Reply
from dragoman.core.request import ToolResult
from dragoman.protocols.retry import Retries

EventCallback = Callable[[Event | ToolResult], object]


class Stream:
    """Iterates over the events of one reply. Closing it, or leaving the `with` block, stops the generation."""

    def __init__(self, batches: Generator[Sequence[Event], None, None], collector: ReplyCollector) -> None:
        self._batches = batches
        self._collector = collector
        self._events = (event for batch in batches for event in batch)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        return next(self._events)

    def reply(self) -> Reply:
        """Return the whole reply. Raises `StreamCutOff` if not all events have been read."""
        return self._collector.reply()

    def close(self) -> None:
        self._batches.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Client:
    """A client for one server. Threads may share a client and its connections.

    `timeout` limits how long the server may be silent, in seconds. `retries` limits how often a request is repeated;
    only requests that cannot have run are repeated. `defaults` are options for all calls. Without `url`, the server and
    its key come from the environment (`client.addresses`).
    """

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
        http: httpx.Client | None = None,
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
        self._http = http or httpx.Client(
            **http_settings.client_settings(self._planner.address, timeout, connect_timeout)
        )

    @property
    def protocol(self) -> str | None:
        """The protocol in use; None until the server has answered."""
        return self._planner.protocol

    def complete(self, messages: Messages, **options: Unpack[Options]) -> Reply:
        return self._complete(build_request(messages, {**self._defaults, **options}))

    def stream(self, messages: Messages, **options: Unpack[Options]) -> Stream:
        return self._stream(build_request(messages, {**self._defaults, **options}))

    def run(
        self,
        messages: Messages,
        *,
        steps: int = DEFAULT_STEPS,
        on_event: EventCallback | None = None,
        **options: Unpack[Options],
    ) -> Outcome:
        """Let the model call the functions in `tools` until it answers without a call.

        With `on_event` every reply is streamed; the callback receives its events and the results of the calls.
        """

        def perform(step: LoopStep) -> object:
            return self._run_turn(step, on_event) if isinstance(step, ClientRequest) else _run_calls(step, on_event)

        request = build_request(messages, {**self._defaults, **options})
        return run_steps(run_tool_loop(request, steps), perform)

    def embed(self, texts: str | Sequence[str], *, model: str = "", dimensions: int | None = None) -> Embeddings:
        return run_steps(rest_calls.embed_texts(self._planner, texts, model, dimensions), self._perform)

    def models(self) -> tuple[ServerModel, ...]:
        return run_steps(rest_calls.list_models(self._planner), self._perform)

    def count_tokens(self, messages: Messages, **options: Unpack[Options]) -> int:
        request = build_request(messages, {**self._defaults, **options}).request
        return run_steps(rest_calls.count_tokens(self._planner, request), self._perform)

    def render(self, messages: Messages, **options: Unpack[Options]) -> RenderedPrompt:
        """Return the prompt that a Dragoman would give to the model."""
        request = build_request(messages, {**self._defaults, **options}).request
        return run_steps(rest_calls.render(self._planner, request), self._perform)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run_turn(self, request: ClientRequest, on_event: EventCallback | None) -> Reply:
        """Get one reply of the tool loop. The loop reports malformed arguments to the model itself."""
        if on_event is None:
            return self._complete(request, check_calls=False)
        with self._stream(request, check_calls=False) as events:
            for event in events:
                on_event(event)
            return events.reply()

    def _complete(self, request: ClientRequest, check_calls: bool = True) -> Reply:
        collector = ReplyCollector(request.output_type)
        for _ in self._batches(request, collector, False, check_calls):
            pass
        return collector.reply()

    def _stream(self, request: ClientRequest, check_calls: bool = True) -> Stream:
        collector = ReplyCollector(request.output_type)
        return Stream(self._batches(request, collector, True, check_calls), collector)

    def _batches(
        self, request: ClientRequest, collector: ReplyCollector, stream: bool, check_calls: bool
    ) -> Generator[Sequence[Event], None, None]:
        calls = self._planner.generation_calls(request.request, stream=stream, check_calls=check_calls)
        call, response = run_steps(self._planner.open("generate", calls), self._perform)
        client_call = call.client_call
        assert client_call is not None
        collector.client_call = client_call
        client_call.head(response.headers)
        try:
            chunks = _iter_chunks(response)
            try:
                for chunk in chunks:
                    yield collector.add(client_call.feed(chunk))
                    if client_call.finished:
                        break
                last = client_call.end()
            except httpx.HTTPError as error:
                last = http_settings.end_interrupted(client_call, error)
            for events in last:
                yield collector.add(events)
            _drain(response, chunks)
        except DragomanError as error:
            collector.attach_to(error)
            raise
        finally:
            response.close()

    def _perform(self, step: Step) -> object:
        if isinstance(step, PlannedCall):
            return self._send(step)
        if isinstance(step, ReadBody):
            return _read_body(step)
        time.sleep(step.seconds)
        return None

    def _send(self, call: PlannedCall) -> httpx.Response | FailedAttempt:
        if self._http.is_closed:
            raise Unreachable("this client has been closed")
        request = self._http.build_request(call.method, call.url, headers=call.headers, content=call.body)
        try:
            return self._http.send(request, stream=True)
        except httpx.HTTPError as error:
            return http_settings.failed_attempt(error)


def _iter_chunks(response: httpx.Response) -> Iterator[bytes]:
    decompress = http_settings.decompressor(response.headers)
    raw = response.iter_raw()
    return raw if decompress is None else (chunk for data in raw for chunk in decompress(data))


def _read_body(step: ReadBody) -> tuple[bytes, str]:
    body = bytearray()
    with closing(step.response):
        try:
            for chunk in _iter_chunks(step.response):
                body += chunk
                if len(body) > step.limit:
                    return bytes(body), f"it is larger than {step.limit} bytes"
        except httpx.HTTPError as error:
            return bytes(body), http_settings.describe(error)
    return bytes(body), ""


def _drain(response: httpx.Response, chunks: Iterator[bytes]) -> None:
    """Read the rest of a complete reply, so that the connection can be reused. Close it after DRAIN_SECONDS."""
    if response.is_stream_consumed and response.is_closed:
        return
    timer = threading.Timer(http_settings.DRAIN_SECONDS, _shut_down, [response])
    timer.daemon = True
    timer.start()
    try:
        for _ in chunks:
            pass
    except httpx.HTTPError:
        pass  # the reply is complete
    finally:
        timer.cancel()


def _shut_down(response: httpx.Response) -> None:
    socket = response.extensions["network_stream"].get_extra_info("socket")
    try:
        socket.shutdown(2)
    except OSError:
        pass  # already closed


def _run_calls(calls: Sequence[Invocation], on_event: EventCallback | None) -> list[ToolResult]:
    with ThreadPoolExecutor(max_workers=max(1, min(32, len(calls)))) as pool:
        results = list(pool.map(Invocation.run, calls))
    for result in results:
        if on_event is not None:
            on_event(result)
    return results
