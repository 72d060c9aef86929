"""The connection with an app that does not do what ours does, and what its parts promise."""

import asyncio
import subprocess
import sys

import pytest
import uvicorn
from uvicorn.server import ServerState

from dragoman.config.settings import Settings
from dragoman.server.http.connection import guarded
from dragoman.server.http.response import News
from dragoman.server.http_exchange import Receive, Scope, Send
from dragoman.server.telemetry import Telemetry

ASKED = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"


async def broken(scope: Scope, receive: Receive, send: Send) -> None:
    raise ValueError("nobody expects it")


async def silent(scope: Scope, receive: Receive, send: Send) -> None:
    pass


async def halfway(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"beginning", "more_body": True})


async def _answer(app: object) -> tuple[bytes, ServerState]:
    settings, state = Settings(), ServerState()
    connection = guarded(settings.limits, Telemetry(settings.telemetry, None))
    config = uvicorn.Config(app, log_config=None, lifespan="off")  # type: ignore[arg-type]
    config.load()
    server = await asyncio.get_running_loop().create_server(lambda: connection(config, state, {}), "127.0.0.1", 0)
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(ASKED)
        async with asyncio.timeout(60):
            answer = await reader.read()
        writer.close()
        await writer.wait_closed()
    return answer, state


@pytest.mark.parametrize("app", [broken, silent])
def test_who_is_not_answered_hears_of_it(app: object) -> None:
    answer, state = asyncio.run(_answer(app))
    assert answer.startswith(b"HTTP/1.1 500 ")
    assert answer.endswith(b"Internal Server Error")
    assert not state.tasks


def test_a_response_that_breaks_off_does_not_look_complete() -> None:
    answer, state = asyncio.run(_answer(halfway))
    assert b"beginning" in answer
    assert not answer.endswith(b"0\r\n\r\n")
    assert not state.tasks


def test_news_wake_the_one_who_waits_and_keep_until_then() -> None:
    async def play() -> list[str]:
        news, seen = News(), []
        news.set()
        await news.wait()
        seen.append("kept")
        news.clear()
        waiting = asyncio.create_task(news.wait())
        await asyncio.sleep(0)
        seen.append("waits" if not waiting.done() else "does not wait")
        news.set()
        news.set()
        await waiting
        return seen

    assert asyncio.run(play()) == ["kept", "waits"]


def test_a_copied_process_has_ids_of_its_own() -> None:
    program = (
        "import os\n"
        "from dragoman.core.ids import new_id\n"
        "new_id('')\n"
        "reads, writes = os.pipe()\n"
        "if not os.fork():\n"
        "    os.write(writes, '\\n'.join(new_id('') for _ in range(200)).encode())\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "theirs = os.read(reads, 100_000).decode().split()\n"
        "ours = [new_id('') for _ in range(200)]\n"
        "print(len({*ours, *theirs}))\n"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert told.stdout == "400\n"
