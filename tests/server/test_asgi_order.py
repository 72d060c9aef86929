"""The order of ASGI messages: a response starts once, continues and ends once."""

import asyncio
import json
import random
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from dragoman import Engine, create_app
from dragoman.config.settings import Limits, Settings
from dragoman.core.engine import Output
from dragoman.core.ids import new_id
from dragoman.core.request import GenerationRequest
from dragoman.server.app import App
from tests.support.requests import CHAT, SMALLEST, frames

START, BODY = "http.response.start", "http.response.body"


class Quick(Engine):
    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Output, None]:
        yield "one "
        await asyncio.sleep(0)
        yield "two"


class Failing(Engine):
    """Fails after a silence, when the stream may have started."""

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Output, None]:
        await asyncio.sleep(0.5)
        raise ValueError("no")
        yield "never"


class Narrow(Engine):
    """Serves one request at a time, slowly if the request asks for it."""

    slots = 1

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Output, None]:
        wanted = float(request.last_user_text)
        while wanted > 0:
            await asyncio.sleep(0.1)
            wanted -= 0.1
            yield "x"


def ours(engine: Engine, **limits: Any) -> App:
    return create_app(engine, settings=Settings(limits=Limits(**limits)))


async def told(app: App, slow: Callable[[Any], float], **fields: Any) -> list[dict[str, Any]]:
    """The messages in the order in which the server finishes them; each takes this many seconds."""
    sent: list[dict[str, Any]] = []
    body = json.dumps(SMALLEST[CHAT] | fields).encode()
    arriving = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if arriving:
            return arriving.pop()
        await asyncio.Event().wait()
        return {}

    async def send(message: Any) -> None:
        await asyncio.sleep(slow(message))
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": CHAT, "query_string": b"", "headers": headers}
    await app(scope, receive, send)
    await asyncio.sleep(0.1)
    return sent


def slow_to_start(message: Any) -> float:
    return 0.2 if message["type"] == START else 0


@pytest.mark.parametrize("keepalive", [0.01, 10])
@pytest.mark.parametrize("choices", [1, 3])
async def test_head_is_sent_first(keepalive: float, choices: int) -> None:
    app = ours(Quick(), keepalive_seconds=keepalive)
    start, *pieces = await told(app, slow_to_start, stream=True, n=choices)
    assert start["type"] == START
    assert [piece["type"] for piece in pieces] == [BODY] * len(pieces)
    assert [piece.get("more_body", False) for piece in pieces] == [True] * (len(pieces) - 1) + [False]
    assert frames(b"".join(piece["body"] for piece in pieces).decode())[-1] == "[DONE]"


async def test_failure_while_head_is_being_sent() -> None:
    app = ours(Failing(), keepalive_seconds=0.2)
    start, *pieces = await told(app, lambda message: 0.8 if message["type"] == START else 0, stream=True)
    assert (start["type"], start["status"]) == (START, 200)
    assert "more_body" not in pieces[-1]
    [failure] = frames(b"".join(piece["body"] for piece in pieces).decode())
    assert failure["error"]["code"] == "inference_error"


async def test_no_comment_inside_an_error() -> None:
    app = ours(Failing(), keepalive_seconds=2)
    start, *pieces = await told(app, lambda message: 1.2, stream=True)
    assert (start["type"], start["status"]) == (START, 500)
    [body] = pieces
    assert json.loads(body["body"])["error"]["code"] == "inference_error"


async def test_waiting_for_a_slot_is_not_a_stall() -> None:
    app = ours(Narrow(), stall_seconds=1)

    def asked(seconds: float, **fields: Any) -> asyncio.Task[list[dict[str, Any]]]:
        messages = [{"role": "user", "content": str(seconds)}]
        return asyncio.create_task(told(app, lambda message: 0, messages=messages, **fields))

    replies = await asyncio.gather(asked(0.2), asked(0.1, n=2), asked(2))
    assert [start["status"] for start, _ in replies] == [200, 200, 200]
    choices = json.loads(replies[1][1]["body"])["choices"]
    assert [choice["message"]["content"] for choice in choices] == ["x", "x"]


async def test_choice_with_a_slot_can_stall() -> None:
    class Stalling(Engine):
        async def generate(self, request: GenerationRequest) -> AsyncGenerator[Output, None]:
            yield "x"
            await asyncio.sleep(5)

    start, _ = await told(ours(Stalling(), stall_seconds=0.2), lambda message: 0, n=2)
    assert start["status"] == 504


def test_ids_cannot_be_guessed() -> None:
    random.seed(1)
    one = new_id("resp_")
    random.seed(1)
    assert new_id("resp_") != one
    assert len(one) == len("resp_") + 24
