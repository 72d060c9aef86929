"""Target `sse`: an upstream server that answers with mutated or hostile bytes.

    prompt := ("answer" | "hang") " " base64

The prompt holds the bytes that the upstream answers with; after `hang` it keeps the connection open. The server in
front of it answers in its own protocol: a whole reply, an error with a status, or a stream that ends with an error
frame.
"""

import asyncio
import base64
import re
import threading
from random import Random
from typing import Any, Self

from tools.fuzz import values
from tools.fuzz.cases import OK, HttpCase, Request, random_for
from tools.fuzz.requests import BEARER, JSON, VERSION
from tools.fuzz.servers import COMMON

PROTOCOLS = ("chat", "messages", "responses")
PLACES = 40
"""Models for each protocol: a server that has failed several times in a row is not asked for a while."""
FAULTS = frozenset({400, 404, 413, 429, 501, 502, 503, 504, 529})
"""What a request may get whose upstream misbehaves. Never 500: nothing failed in the server itself."""
PROMPT = re.compile(rb"(answer|hang) ([A-Za-z0-9+/=]*)")
VALID = 0.4
"""The share of the answers that are as they should be."""
HANG_SECONDS = 1.5
SILENCE_SECONDS = 1.0
STATUSES = (200, 200, 201, 204, 301, 400, 401, 403, 404, 413, 418, 422, 429, 500, 502, 503, 529, 599, 99, 1000)
TYPES = (
    "text/event-stream",
    "application/json",
    "text/html",
    "",
    "text/event-stream; charset=x",
    "application/x-ndjson",
)
ODD_FRAMES = (
    *(
        b"data: [DONE]\n\n",
        b"data:\n\n",
        b"data: {}\n\n",
        b"data: null\n\n",
        b"data: [1]\n\n",
        b"data: {\n\n",
        b"event: x\n\n",
    ),
    *(
        b": comment\n\n",
        b"\n\n\n",
        b"\r\r",
        b"data: \xff\xfe\n\n",
        b"\xef\xbb\xbfdata: {}\n\n",
        b"error: {}\n\n",
        b"id: \x00\n",
    ),
    *(b'data: {"error": {"message": "x", "type": "y", "code": 429}}\n\n', b'data: {"error": "x"}\n\n', b"retry: 1\n\n"),
    *(b'event: error\ndata: {"type": "error", "error": {"type": "overloaded_error", "message": "x"}}\n\n', b"junk\n\n"),
    *(
        b'data: {"choices": []}\n\n',
        b'data: {"choices": [{"delta": {"content": 5}}]}\n\n',
        b": " + b"a" * 70_000 + b"\n\n",
    ),
    *(
        b'data: {"type": "ping"}\n\n',
        b'data: {"type": "response.completed"}\n\n',
        b'data: {"type": "message_stop"}\n\n',
    ),
)


def _frame(protocol: str, event: dict[str, Any]) -> bytes:
    name = b"" if protocol == "chat" else b"event: %b\n" % str(event.get("type", "")).encode()
    return name + b"data: " + values.encoded(event) + b"\n\n"


def _chat_events(random: Random) -> list[dict[str, Any]]:
    stamp = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    call = {"index": 0, "id": "x1", "type": "function", "function": {"name": "t", "arguments": '{"a": 1}'}}
    deltas: list[Any] = [{"role": "assistant", "content": ""}, {"content": "Hello"}, {"content": " world"}]
    if random.random() < 0.3:
        deltas += [{"tool_calls": [call]}, {"reasoning_content": "hm"}]
    events = [{**stamp, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    end = {**stamp, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": usage}
    return [*events, end]


def _message_events(random: Random) -> list[dict[str, Any]]:
    usage = {"input_tokens": 3, "output_tokens": 1}
    message = {"id": "m1", "type": "message", "role": "assistant", "model": "m", "content": [], "usage": usage}
    block: dict[str, Any] = {"type": "text", "text": ""}
    delta: dict[str, Any] = {"type": "text_delta", "text": "Hello"}
    if random.random() < 0.3:
        block = {"type": "tool_use", "id": "t1", "name": "t", "input": {}}
        delta = {"type": "input_json_delta", "partial_json": '{"a": 1}'}
    return [
        {"type": "message_start", "message": message},
        {"type": "content_block_start", "index": 0, "content_block": block},
        {"type": "content_block_delta", "index": 0, "delta": delta},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}},
        {"type": "message_stop"},
    ]


def _response_events(random: Random) -> list[dict[str, Any]]:
    text = {"type": "output_text", "text": "Hello", "annotations": []}
    item = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [text]}
    usage = {"input_tokens": 3, "output_tokens": 2, "total_tokens": 5}
    begun = {"id": "resp_1", "object": "response", "status": "in_progress", "output": []}
    ended = {**begun, "status": "completed", "output": [item], "usage": usage}
    place = {"item_id": "msg_1", "output_index": 0}
    return [
        {"type": "response.created", "response": begun},
        {"type": "response.output_item.added", "output_index": 0, "item": {**item, "content": []}},
        {"type": "response.content_part.added", **place, "content_index": 0, "part": {**text, "text": ""}},
        {"type": "response.output_text.delta", **place, "content_index": 0, "delta": "Hello"},
        {"type": "response.output_text.done", **place, "content_index": 0, "text": "Hello"},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": ended},
    ]


EVENTS = {"chat": _chat_events, "messages": _message_events, "responses": _response_events}


def _stream(random: Random, protocol: str, times: int) -> bytes:
    """The frames of a reply, with so many mutations."""
    events: list[Any] = values.copied(EVENTS[protocol](random))
    done = b"data: [DONE]\n\n" if protocol == "chat" else b""
    if not times:
        return b"".join(_frame(protocol, event) for event in events) + done
    for _ in range(times):
        kind = random.randrange(5)
        at = random.randrange(len(events))
        if kind == 0:
            values.mutate(random, events, 1)
        elif kind == 1:
            events.insert(at, random.choice(events))
        elif kind == 2 and len(events) > 1:
            del events[at]
        elif kind == 3:
            random.shuffle(events)
        else:
            events[at] = values.anything(random)
    frames = [_frame(protocol, event if isinstance(event, dict) else {"x": event}) for event in events]
    if random.random() < 0.4:
        frames.insert(random.randint(0, len(frames)), random.choice(ODD_FRAMES))
    data = b"".join(frames) + (done if random.random() < 0.8 else b"")
    return values.damage(random, data) if random.random() < 0.2 else data


def answer(random: Random, protocol: str) -> tuple[bytes, bool]:
    """The bytes of the upstream's response, and whether it then hangs."""
    if random.random() < VALID:
        return _response(200, "text/event-stream", _stream(random, protocol, 0)), False
    kind = random.random()
    body = _stream(random, protocol, random.randint(1, 3))
    if kind < 0.7:
        return _response(200, random.choice(TYPES[:1] * 8 + TYPES), body), False
    if kind < 0.85:
        error = values.encoded(values.anything(random) if random.random() < 0.5 else {"error": {"message": "no"}})
        return _response(random.choice(STATUSES), random.choice(TYPES), error), False
    whole = _response(200, "text/event-stream", body)
    if kind < 0.95:
        cut = values.damage(random, whole) if random.random() < 0.5 else whole[: random.randrange(len(whole))]
        return cut, False
    return whole[: random.randrange(len(whole))], True


def _response(status: int, media: str, body: bytes) -> bytes:
    lines = [f"HTTP/1.1 {status} X", "connection: close"]
    if media:
        lines.append(f"content-type: {media}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


NOT_FOUND = _response(404, "application/json", b'{"error": {"message": "no"}}')


def case(engine: str, seed: str, number: int) -> HttpCase:
    random = random_for("sse", seed, number)
    protocol = random.choice(PROTOCOLS)
    data, hangs = answer(random, protocol)
    path = random.choice(("/v1/chat/completions", "/v1/messages", "/v1/responses"))
    prompt = f"{'hang' if hangs else 'answer'} {base64.b64encode(data).decode()}"
    return request(path, f"{protocol}-{random.randrange(PLACES)}", prompt, stream=random.random() < 0.7)


def request(path: str, model: str, prompt: str, *, stream: bool) -> HttpCase:
    body: dict[str, Any] = {"model": model}
    if path == "/v1/responses":
        body |= {"input": prompt}
    else:
        body |= {"messages": [{"role": "user", "content": prompt}], "max_tokens": 8}
    if stream:
        body["stream"] = True
    # A server that has failed may be out of use for a while, for a case that would have gone well too.
    made = Request("POST", path, values.encoded(body), (JSON, BEARER, VERSION), OK | FAULTS, fault=True)
    return HttpCase((made,))


class Upstream:
    """The upstream server, in a thread with an event loop of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()

    def __enter__(self) -> Self:
        self._thread.start()
        starting = asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(starting, self._loop).result(30)
        self._port: int = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *error: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    async def _stop(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def config(self) -> dict[str, Any]:
        options = {"engine": "upstream", "silence_seconds": SILENCE_SECONDS, "connect_seconds": 5, "health_seconds": 0}
        url = f"http://127.0.0.1:{self._port}"
        models = {
            f"{name}-{at}": {**options, "url": f"{url}/{name}/{at}/v1", "protocol": name}
            for name in PROTOCOLS
            for at in range(PLACES)
        }
        # The default model decides whether the server is ready.
        return {**COMMON, "models": {"steady": {"engine": "scripted"}, **models}}

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"(?i)content-length: *(\d+)", head)
            body = await reader.readexactly(int(length[1])) if length else b""
            prompt = PROMPT.search(body)
            writer.write(NOT_FOUND if prompt is None else base64.b64decode(prompt[2]))
            await writer.drain()
            if prompt is not None and prompt[1] == b"hang":
                await asyncio.sleep(HANG_SECONDS)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # The server has left, or the run is over.
        finally:
            self._tasks.discard(task)
            writer.close()
