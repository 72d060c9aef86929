"""512 sequences at a hundred steps a second, over HTTP, through two front ends: the stand-in's steps may be late on a
busy machine, but nothing of them is lost, and who leaves is given up in the engine."""

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.server.test_vllm import STAND_IN
from tests.support.requests import CHAT, ask, eventually, talking, text_of
from tests.support.server_process import Running, serving

STREAMS = 512
ENDLESS = "count 3000"
"""At a hundred steps per second this takes two minutes."""
MODEL = {
    "engine": "vllm",
    "path": "some/model",
    "context": 16_384,
    "args": {"steps_per_second": 100, "max_num_seqs": STREAMS},
}


class Heard(msgspec.Struct):
    """The frames that one client received."""

    pieces: list[str] = []
    finish: str | None = None
    tokens: int | None = None
    is_done: bool = False

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def take(self, data: bytes) -> None:
        assert not self.is_done
        if data == b"[DONE]":
            self.is_done = True
            return
        frame: dict[str, Any] = json.loads(data)
        assert "error" not in frame, frame
        for choice in frame["choices"]:
            assert self.finish is None
            self.pieces += [choice["delta"]["content"]] if choice["delta"].get("content") else []
            self.finish = choice["finish_reason"]
        if frame.get("usage"):
            self.tokens = frame["usage"]["completion_tokens"]


def leaves_after(at: int) -> int | None:
    """Every fourth client disconnects in mid-stream, the first one before its first token."""
    return (at * 7) % 60 if at % 4 == 0 else None


def said_to(at: int) -> str:
    """The secret of one client."""
    return " ".join(f"{at}-{number}" for number in range(10 + at % 10))


def request(text: str) -> bytes:
    asked = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 16_000}
    body = json.dumps(asked | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


async def listen(running: Running, at: int, begun: asyncio.Barrier) -> Heard:
    heard, leaving = Heard(), leaves_after(at)
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(request(said_to(at) if leaving is None else ENDLESS))
    # All clients wait until each has an answer.
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    await begun.wait()
    async for line in reader:
        if line.startswith(b"data: "):
            heard.take(line.removeprefix(b"data: ").strip())
        if leaving is not None and len(heard.pieces) >= leaving:
            break
    if at % 8:
        writer.transport.abort()
    writer.close()
    return heard


async def listen_to_all(running: Running) -> Sequence[Heard]:
    begun = asyncio.Barrier(STREAMS + 1)
    async with asyncio.timeout(100), asyncio.TaskGroup() as group:
        listening = [group.create_task(listen(running, at, begun)) for at in range(STREAMS)]
        while begun.n_waiting < STREAMS:  # noqa: ASYNC110 (the last to come would release them)
            await asyncio.sleep(0.01)
        # The system spreads connections evenly.
        assert min(sockets_of(pid) for pid in running.fronts()) > STREAMS // 4
        await begun.wait()
    return [task.result() for task in listening]


def sockets_of(pid: int) -> int:
    return sum("socket:" in str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir())


def test_512_streams_are_complete_and_ordered_and_can_be_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(STAND_IN), os.environ.get("PYTHONPATH", "")]))
    counted = " ".join(map(str, range(3000)))
    left = [at for at in range(STREAMS) if leaves_after(at) is not None]
    with serving(tmp_path, {"models": {"m": MODEL}}, "--workers", "2") as running:
        for at, heard in enumerate(asyncio.run(listen_to_all(running))):
            if at in left:
                assert (heard.finish, heard.is_done) == (None, False)
                assert counted.startswith(heard.text)
            else:
                assert heard.text == said_to(at)
                assert (heard.finish, heard.tokens, heard.is_done) == ("stop", len(said_to(at)), True)
        with talking(running) as client:

            def how_many() -> str:
                asked = [{"role": "user", "content": "how many"}]
                return text_of(ask(client, CHAT, model="m", messages=asked))

            assert eventually(lambda: how_many() == f"0 running, {len(left)} given up")
            assert client.get("/stats").json()["models"]["m"]["running"] == 0
        assert running.stop() == 0
        ends = [event["status"] for event in running.events() if event["event"] == "request"]
        assert ends.count(499) == len(left)
        assert "Traceback" not in running.log.read_text()
