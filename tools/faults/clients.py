"""Clients that are slow, and clients that disconnect at any moment."""

import asyncio
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from tools.client import chat_body, read_reply, request_bytes
from tools.faults.judge import Scenario
from tools.faults.trial import ANSWERED, ANSWERED_OR_ERROR, IN_WORKER, KEY, PROBE, PROBE_TEXT, REQUEST_SECONDS, Trial

SLOT_FREE_SECONDS = 1.0
"""How long the slot of a client that has disconnected may be taken, in the 99th percentile."""
ENDLESS = {"tokens_per_second": 100, "slots": 1, "prefill_seconds": 0.05, "replies": [{"output": "tick" * 4000}]}
SINGLE = {
    "one": {"engine": "scripted", **ENDLESS},
    "two": {"engine": "scripted", **ENDLESS},
    "one-in-worker": {**IN_WORKER, **ENDLESS},
    "two-in-worker": {**IN_WORKER, **ENDLESS},
}
"""Models with one slot: the next request is answered only when the slot is free."""
LIMIT_SECONDS = 4.0
LARGE = {"messages": [{"role": "user", "content": "x" * 2_000_000}], "model": "echo", "stream": True}
"""Its reply is far more than the buffers of two sockets hold."""


def signed(body: Mapping[str, Any]) -> bytes:
    return request_bytes(body, key=KEY)


class Connection:
    """A plain connection on which little or nothing is read."""

    def __init__(self, port: int, receive_buffer: int | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = socket.socket()
        if receive_buffer:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self._socket.setblocking(False)
        self._port = port

    async def connect(self) -> "Connection":
        async with asyncio.timeout(REQUEST_SECONDS):
            await self._loop.sock_connect(self._socket, ("127.0.0.1", self._port))
        return self

    async def send(self, data: bytes) -> None:
        await self._loop.sock_sendall(self._socket, data)

    async def receive(self, size: int = 65536) -> bytes:
        """b"" at the end of the connection, however it ended."""
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                return await self._loop.sock_recv(self._socket, size)
        except ConnectionError:
            return b""

    def close(self, reset: bool = False) -> None:
        if reset:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()


async def vanishing_clients(trial: Trial) -> None:
    """Clients that disconnect at random moments. The slot of a model with one slot is soon free again."""
    free: list[float] = []
    numbers = iter(range(trial.times))

    async def lane(model: str) -> None:
        for _ in numbers:
            leave = trial.random.choice(MOMENTS)
            try:
                await leave(trial, model)
            except (OSError, TimeoutError) as error:
                trial.problems[f"{leave.__name__}: {error!r}"] += 1
            left = time.monotonic()
            result = await trial.ask(model, max_tokens=1)
            trial.note(model, result, ANSWERED, "tick")
            free.append(time.monotonic() - left)

    async with asyncio.TaskGroup() as group:
        for model in SINGLE:
            group.create_task(lane(model))
    free.sort()
    p50, p99 = free[len(free) // 2], free[len(free) * 99 // 100]
    trial.figures["slot free again, s"] = f"p50 {p50:.3f}, p99 {p99:.3f}, max {free[-1]:.3f}"
    bound = SLOT_FREE_SECONDS * trial.patience
    trial.expect(p99 < bound, f"a slot is free again after {p99:.2f} s (p99); {bound:g} s are allowed")


async def _leave_in_headers(trial: Trial, model: str) -> None:
    await _leave(trial, signed(chat_body(model)).partition(b"Authorization")[0])


async def _leave_in_body(trial: Trial, model: str) -> None:
    await _leave(trial, signed(chat_body(model))[:-10])


async def _leave_before_first_token(trial: Trial, model: str) -> None:
    await _leave(trial, signed(chat_body(model, stream=trial.random.random() < 0.5)))


async def _leave_in_stream(trial: Trial, model: str) -> None:
    await _leave(trial, signed(chat_body(model)), trial.random.randint(1, 4))


async def _leave_queue(trial: Trial, model: str) -> None:
    holder = await Connection(trial.server.port).connect()
    await holder.send(signed(chat_body(model)))
    await holder.receive()
    await _leave(trial, signed(chat_body(model)))
    holder.close()


async def _leave(trial: Trial, data: bytes, pieces: int = 0) -> None:
    """Send data, read a few pieces, and disconnect after a random time."""
    connection = await Connection(trial.server.port).connect()
    try:
        await connection.send(data)
        for _ in range(pieces):
            await connection.receive()
        if trial.random.random() < 0.7:
            await asyncio.sleep(trial.random.uniform(0, 0.1))
    finally:
        connection.close(reset=trial.random.random() < 0.5)


MOMENTS: Sequence[Callable[[Trial, str], Awaitable[None]]] = (
    _leave_in_headers,
    _leave_in_body,
    _leave_before_first_token,
    _leave_in_stream,
    _leave_queue,
)


async def slow_clients(trial: Trial) -> None:
    """Clients that send or read a byte a second, or nothing. They are cut off, and all others are answered."""
    kinds = (_send_headers_slowly, _send_body_slowly, _read_slowly, _read_nothing)
    async with trial.load(PROBE, 2, ANSWERED, PROBE_TEXT), asyncio.TaskGroup() as group:
        for number in range(trial.times):
            group.create_task(kinds[number % len(kinds)](trial))


async def _send_headers_slowly(trial: Trial) -> None:
    await _send_slowly(trial, "slow headers", b"", signed(chat_body("echo")))


async def _send_body_slowly(trial: Trial) -> None:
    head, _, body = signed(chat_body("echo")).partition(b"\r\n\r\n")
    await _send_slowly(trial, "slow body", head + b"\r\n\r\n", body)


async def _send_slowly(trial: Trial, name: str, at_once: bytes, slowly: bytes) -> None:
    connection = await Connection(trial.server.port).connect()
    received = bytearray()

    async def send() -> None:
        await connection.send(at_once)
        for place in range(len(slowly)):
            await connection.send(slowly[place : place + 1])
            await asyncio.sleep(1)

    sending = asyncio.create_task(send())
    try:
        while piece := await connection.receive():
            received += piece
    finally:
        sending.cancel()
        # What it still sends after the server has closed breaks.
        await asyncio.gather(sending, return_exceptions=True)
        connection.close()
    result = read_reply(bytes(received))
    trial.note(name, result, ANSWERED_OR_ERROR | {"cut"})
    trial.expect(result.ending != "answered", f"{name}: answered although it takes more than {LIMIT_SECONDS:g} s")


async def _read_slowly(trial: Trial) -> None:
    await _read_little(trial, "reads a byte a second", 1)


async def _read_nothing(trial: Trial) -> None:
    await _read_little(trial, "reads nothing", 0)


async def _read_little(trial: Trial, name: str, size: int) -> None:
    """The server cuts it off: the reply is never complete."""
    connection = await Connection(trial.server.port, receive_buffer=4096).connect()
    try:
        await connection.send(signed(LARGE))
        for _ in range(round(2 * LIMIT_SECONDS)):
            if size:
                await connection.receive(size)
            await asyncio.sleep(1)
        await trial.wait(lambda: _is_unused(trial, "echo"), f"{name}: the server cuts it off")
        trial.endings[f"{name}: cut off"] += 1
    finally:
        connection.close()


async def _is_unused(trial: Trial, model: str) -> bool:
    running = (await trial.get("/stats"))["models"][model]["running"]
    return bool(running == 0)


SLOW_LIMITS = {"limits": {"body_seconds": LIMIT_SECONDS, "write_seconds": LIMIT_SECONDS}}
SCENARIOS = {
    "vanishing_clients": Scenario(vanishing_clients, 5000, 60, SINGLE),
    # The allocator keeps a part of what the streams needed at the same time. Further rounds add nothing to it.
    "slow_clients": Scenario(slow_clients, 200, 8, {"echo": {"engine": "scripted"}}, SLOW_LIMITS, peak=600, kept=128),
}
