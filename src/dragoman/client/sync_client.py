"""The synchronous client."""

import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, Self, Unpack

import httpx

from dragoman.client import http_settings, rest_calls
from dragoman.client.call import MAX_BODY_BYTES, MAX_ERROR_BYTES, ReplyCollector
from dragoman.client.decompression import decompressor
from dragoman.client.options import ClientRequest, Messages, Options, build_request
from dragoman.client.planner import (
    CallPlan,
    CallPlanner,
    FailedAttempt,
    OpenedResponse,
    PlannedCall,
    ProtocolName,
    Wait,
)
from dragoman.client.rest_calls import Embeddings, ServerModel
from dragoman.client.tool_loop import DEFAULT_STEPS, Invocation, Outcome, run_steps
from dragoman.core.errors import BadAnswer, DragomanError, Unreachable
from dragoman.core.events import Event
from dragoman.core.reply import Reply
from dragoman.core.request import ToolResult
from dragoman.core.urls import DEFAULT
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
    only requests that cannot have run are repeated.
    """

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
        self._planner = CallPlanner(
            url, model=model, api_key=api_key, protocol=protocol, retries=retries, extra_headers=headers
        )
        self._http = http or httpx.Client(
            **http_settings.client_settings(self._planner.address, timeout, connect_timeout)
        )

    @property
    def protocol(self) -> str | None:
        """The protocol in use; None until the server has answered."""
        return self._planner.protocol

    def complete(self, messages: Messages, **options: Unpack[Options]) -> Reply:
        return self._complete(build_request(messages, self._planner.model, options))

    def stream(self, messages: Messages, **options: Unpack[Options]) -> Stream:
        return self._stream(build_request(messages, self._planner.model, options))

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
        loop = run_steps(build_request(messages, self._planner.model, options), steps)
        step = next(loop)
        while True:
            result: Any = (
                self._run_turn(step, on_event) if isinstance(step, ClientRequest) else _run_calls(step, on_event)
            )
            try:
                step = loop.send(result)
            except StopIteration as done:
                outcome: Outcome = done.value
                return outcome

    def embed(self, texts: str | Sequence[str], *, model: str = "", dimensions: int | None = None) -> Embeddings:
        inputs = rest_calls.check_texts(texts)
        body = self._read_json("embeddings", [rest_calls.embeddings_call(self._planner, inputs, model, dimensions)])
        return rest_calls.read_embeddings(body, len(inputs)).as_floats()

    def models(self) -> tuple[ServerModel, ...]:
        models: list[ServerModel] = []
        after: str | None = None
        while True:
            page = rest_calls.read_models(self._read_json("models", [rest_calls.models_call(self._planner, after)]))
            models += page.models
            if page.next is None or page.next == after:
                return tuple(models)
            after = page.next

    def count_tokens(self, messages: Messages, **options: Unpack[Options]) -> int:
        request = build_request(messages, self._planner.model, options).request
        return rest_calls.read_count(self._read_json("count", rest_calls.count_calls(self._planner, request)))

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
        call, opened = self._open(
            "generate", self._planner.generation_calls(request.request, stream=stream, check_calls=check_calls)
        )
        client_call, response = call.client_call, opened.response
        assert client_call is not None
        client_call.head(opened.status, opened.headers)
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

    def _open(self, topic: str, calls: Sequence[PlannedCall]) -> tuple[PlannedCall, OpenedResponse[httpx.Response]]:
        """Return the first call that the server supports and its response, after the headers have arrived."""
        plan: CallPlan[httpx.Response] = self._planner.plan(topic, calls)
        step = next(plan)
        while True:
            result: object = None
            if isinstance(step, Wait):
                time.sleep(step.seconds)
            else:
                result = self._send(step.call)
            try:
                step = plan.send(result)
            except StopIteration as done:
                opened: tuple[PlannedCall, OpenedResponse[httpx.Response]] = done.value
                return opened

    def _send(self, call: PlannedCall) -> OpenedResponse[httpx.Response] | FailedAttempt:
        if self._http.is_closed:
            raise Unreachable("this client has been closed")
        request = self._http.build_request(call.method, call.url, headers=call.headers, content=call.body)
        try:
            response = self._http.send(request, stream=True)
        except httpx.HTTPError as error:
            return http_settings.failed_attempt(error)
        headers = dict(response.headers)
        if response.is_success:
            return OpenedResponse(response.status_code, headers, response)
        with closing(response):
            body, _ = _read_body(response, MAX_ERROR_BYTES)
            return OpenedResponse(response.status_code, headers, response, body)

    def _read_json(self, topic: str, calls: Sequence[PlannedCall]) -> bytes:
        _, opened = self._open(topic, calls)
        with closing(opened.response) as response:
            body, problem = _read_body(response, MAX_BODY_BYTES)
        if problem:
            raise BadAnswer(f"the response is incomplete: {problem}")
        return body


def _iter_chunks(response: httpx.Response) -> Iterator[bytes]:
    decompress = decompressor(response.headers)
    raw = response.iter_raw()
    return raw if decompress is None else (chunk for data in raw for chunk in decompress(data))


def _read_body(response: httpx.Response, limit: int) -> tuple[bytes, str]:
    """Return the body, and why it is incomplete, or an empty string."""
    body = bytearray()
    try:
        for chunk in _iter_chunks(response):
            body += chunk
            if len(body) > limit:
                return bytes(body), f"it is larger than {limit} bytes"
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
