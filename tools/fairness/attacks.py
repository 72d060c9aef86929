"""What an attacker sends. Each attack is a client that sends one request after the other until it is cancelled.

    python -m tools.fairness.attacks PORT KEY ATTACK ...

runs as a process of its own with a low priority: an attacker has a machine of its own, and what it computes must not
count as the server's. With the port 0 it attacks a server in its own process, which refuses everything.
"""

import asyncio
import contextlib
import itertools
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

from tools.client import request_bytes, send

MODEL = "model"
CLIENTS = 6
"""Of each attack."""
CONNECTIONS = 200
BODY_BYTES = 32 * 2**20 - 1024
REQUEST_SECONDS = 600.0
REFUSE_SECONDS = 0.05

Attack = Callable[[int, str], Awaitable[None]]
_numbers = itertools.count()
_random = Random(1)


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 8, "messages": [{"role": "user", "content": text}], **fields}


def schema(name: str, shape: Mapping[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": name, "schema": shape, "strict": True}}}


def unique_schema() -> dict[str, Any]:
    """One that was never seen, with patterns that all must hold, and deep objects."""
    number = next(_numbers)
    patterns = [{"type": "string", "pattern": f"^[a-z]{{0,{20 + place}}}x{number}[a-z]*$"} for place in range(8)]
    shape: dict[str, Any] = {"allOf": patterns}
    for depth in range(20):
        properties = {f"p{number}_{depth}_{place}": {"type": "string", "maxLength": 200} for place in range(10)}
        shape = {
            "type": "object",
            "properties": {**properties, "inner": shape},
            "required": ["inner"],
            "additionalProperties": False,
        }
    return chat("go", **schema(f"s{number}", shape))


def expensive_schema() -> dict[str, Any]:
    """Repeats and alternatives that are small to write and large to compile."""
    number = next(_numbers)
    pattern = f"^({'|'.join(f'[a-z{place}]{{1,60}}' for place in range(10))}){{1,40}}{number}$"
    return chat("go", **schema(f"s{number}", {"type": "object", "properties": {"a": {"pattern": pattern}}}))


def many_tools() -> dict[str, Any]:
    number = next(_numbers)
    parameters = {"type": "object", "properties": {f"p{place}": {"type": "string"} for place in range(20)}}
    functions = [
        {"name": f"f{number}_{place}", "description": "x" * 200, "parameters": parameters} for place in range(100)
    ]
    tools = [{"type": "function", "function": {**function, "strict": True}} for function in functions]
    return chat("go", tools=tools, tool_choice="required")


def long_prompt() -> dict[str, Any]:
    """Of random words, so that nothing of it is cached. It fits into the context."""
    words = " ".join(str(_random.randrange(10**6)) for _ in range(250))
    return chat(words)


def too_long_prompt() -> dict[str, Any]:
    return chat(f"{next(_numbers)} " + "word " * 400_000)


def many_messages() -> dict[str, Any]:
    roles = itertools.cycle(("user", "assistant"))
    messages = [{"role": next(roles), "content": f"{next(_numbers)}"} for _ in range(2001)]
    return chat("go") | {"messages": messages}


def long_stream() -> dict[str, Any]:
    return chat(f"Tell me story number {next(_numbers)}.", max_tokens=400, stream=True)


def many_choices() -> dict[str, Any]:
    return chat(f"Say something, {next(_numbers)}.", max_tokens=100, n=16)


def _many_items() -> bytes:
    """A body of millions of small items."""
    item = b'{"role":"user","content":"a"},'
    return b'{"model":"model","messages":[' + item * (BODY_BYTES // len(item)) + b'{"role":"user","content":"a"}]}'


def _large_text() -> bytes:
    return json.dumps(chat("a " * (BODY_BYTES // 2))).encode()


async def _repeat(port: int, key: str, body: Callable[[], dict[str, Any]]) -> None:
    while True:
        await send(port, request_bytes(body(), key=key), REQUEST_SECONDS)


async def _repeat_bytes(port: int, request: bytes) -> None:
    while True:
        await send(port, request, REQUEST_SECONDS)
        await asyncio.sleep(0.05)


async def _flood(port: int, key: str) -> None:
    """Connections by the hundreds that send half a request, a whole one, or nothing, and disconnect."""
    request = request_bytes(long_stream(), key=key)
    while True:
        writers = [writer async for writer in _connections(port)]
        for writer in writers:
            writer.write(request[: _random.choice((0, 20, len(request) - 5, len(request)))])
        await asyncio.sleep(_random.uniform(0, 0.3))
        for writer in writers:
            writer.transport.abort()


async def _connections(port: int) -> AsyncIterator[asyncio.StreamWriter]:
    for _ in range(CONNECTIONS // CLIENTS):
        try:
            yield (await asyncio.open_connection("127.0.0.1", port))[1]
        except OSError:
            # The server may refuse: that is for it to decide.
            await asyncio.sleep(0.05)


def repeated(body: Callable[[], dict[str, Any]]) -> Attack:
    return lambda port, key: _repeat(port, key, body)


ATTACKS: Mapping[str, Attack] = {
    "unique_schemas": repeated(unique_schema),
    "expensive_schemas": repeated(expensive_schema),
    "many_tools": repeated(many_tools),
    "long_prompts": repeated(long_prompt),
    "too_long_prompts": repeated(too_long_prompt),
    "many_messages": repeated(many_messages),
    "many_items": lambda port, key: _repeat_bytes(port, request_bytes(_many_items(), key=key)),
    "large_texts": lambda port, key: _repeat_bytes(port, request_bytes(_large_text(), key=key)),
    "disconnects": _flood,
    "long_streams": repeated(long_stream),
    "many_choices": repeated(many_choices),
}


def lower_priority() -> None:
    os.nice(19)
    # Linux divides the processor between sessions first, and then between the processes of each.
    os.setsid()
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("19")


async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Read a request and refuse it after a while."""
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().rpartition(b"content-length: ")[2].partition(b"\r\n")[0])
        while length > 0:
            length -= len(await reader.read(min(length, 2**20)) or bytes(length))
        await asyncio.sleep(REFUSE_SECONDS)
        writer.write(b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
    writer.close()


async def attack(port: int, key: str, names: list[str]) -> None:
    if not port:
        server = await asyncio.start_server(refuse, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
    async with asyncio.TaskGroup() as group:
        for name in names:
            for _ in range(CLIENTS):
                group.create_task(_persist(ATTACKS[name], port, key))


async def _persist(one: Attack, port: int, key: str) -> None:
    while True:
        try:
            await one(port, key)
        except OSError:
            await asyncio.sleep(0.05)


if __name__ == "__main__":
    lower_priority()
    asyncio.run(attack(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
