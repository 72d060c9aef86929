"""Measures the speed of the front end: frames and requests per second of one core.

    python -m bench.frontend [--quick]

Dragoman runs with the scripted engine and the whole pipeline, side by side with

    bench/peer.py       a FastAPI and pydantic server with the same route, on plain uvicorn and on uvicorn[standard]
    bench/ceiling.py    an ASGI app that only sends ready-made bytes: no server on uvicorn can be faster
    bench/sends.py      for frames, a plain loop of `send` calls: no server that sends each frame at once can be faster

Figures are per second of the server's CPU time, so that other load matters little: of all its CPU time, and of the part
in user space, without the kernel's work of sending. Server and load generator have a core each if there are two. Rounds
alternate; medians are shown.
"""

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import uvloop
from tools.ports import free_port

from bench.servers import pin_to, run_dragoman, run_server

STREAMS = 100
CHUNK = 4
SHORT = "Paris is."
PEERS = {
    "FastAPI, plain uvicorn": ("bench.peer", "asyncio", "h11"),
    "FastAPI, uvicorn[standard]": ("bench.peer", "uvloop", "httptools"),
    "ready-made bytes": ("bench.ceiling", "uvloop", "httptools"),
}
SENDS = {"plain sends": ("bench.sends", "-", "-")}
OURS = "Dragoman"


T = TypeVar("T")
TICKS = os.sysconf("SC_CLK_TCK")


def run_scripted(**options: Any) -> AbstractContextManager[tuple[int, int]]:
    """Run Dragoman with the scripted engine; yields its port and process id."""
    models = {"scripted": {"engine": "scripted", **options}}
    return run_dragoman({"models": models, "limits": {"queue": 5000, "keepalive_seconds": 3600}}, is_pinned=True)


@contextmanager
def run_peer(text: str, burst: int, module: str, loop: str, http: str) -> Iterator[tuple[int, int]]:
    port = free_port()
    command = [sys.executable, "-m", module, str(port), text, str(burst), loop, http]
    with run_server(command, f"http://127.0.0.1:{port}/ready", is_pinned=True) as pid:
        yield port, pid


def request_bytes(stream: bool) -> bytes:
    body = json.dumps(
        {"model": "scripted", "stream": stream, "messages": [{"role": "user", "content": "Go."}]}
    ).encode()
    lines = (
        "POST /v1/chat/completions HTTP/1.1",
        "host: localhost",
        "content-type: application/json",
        f"content-length: {len(body)}",
    )
    head = "\r\n".join(lines) + "\r\n\r\n"
    return head.encode() + body


class Speed(NamedTuple):
    """Per second of all CPU time, and per second of CPU time in user space."""

    overall: float
    user: float

    @classmethod
    def of(cls, count: int, begun: tuple[float, float], ended: tuple[float, float]) -> "Speed":
        # The clock cannot measure less than one tick.
        user, kernel = max(ended[0] - begun[0], 1 / TICKS), ended[1] - begun[1]
        return cls(count / (user + kernel), count / user)


class Connection(asyncio.Protocol):
    """Sends a request. `done` gets the number of frames or replies."""

    def __init__(self, request: bytes) -> None:
        self.done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.request = request

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.write(self.request)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError("the connection was closed"))


class Stream(Connection):
    """One streaming request. `note` is called after each read with the number of frames so far."""

    def __init__(self, note: Callable[[int], None] | None = None) -> None:
        super().__init__(request_bytes(stream=True))
        self.frames = 0
        self.tail = b""
        self.note = note

    def data_received(self, data: bytes) -> None:
        data = self.tail + data
        self.tail = data[-5:]
        self.frames += data.count(b"data: ")
        if self.note is not None:
            self.note(self.frames)
        if b"[DONE]" in data:
            self.transport.close()
            self.done.set_result(self.frames)


class Caller(Connection):
    """Repeats a request that is not streaming."""

    def __init__(self, calls: int) -> None:
        super().__init__(request_bytes(stream=False))
        self.calls = self.left = calls
        self.data = b""

    def data_received(self, data: bytes) -> None:
        self.data += data
        head, found, body = self.data.partition(b"\r\n\r\n")
        if not found or len(body) < int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]):
            return
        self.data = b""
        self.left -= 1
        if self.left:
            self.transport.write(self.request)
        else:
            self.transport.close()
            self.done.set_result(self.calls)


async def run_connections(create: Callable[[], Connection], port: int, count: int) -> int:
    """Return the number of frames or replies of all connections."""
    loop = asyncio.get_running_loop()
    opened = [await loop.create_connection(create, "127.0.0.1", port) for _ in range(count)]
    return sum(await asyncio.gather(*(connection.done for _, connection in opened)))


async def measure_speed(create: Callable[[], Connection], count: int, port: int, pid: int) -> Speed:
    begun = cpu_times(pid)
    done = await run_connections(create, port, count)
    return Speed.of(done, begun, cpu_times(pid))


def cpu_times(pid: int) -> tuple[float, float]:
    """Return the seconds in user space and in the kernel."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) / TICKS, int(fields[12]) / TICKS


def cpu_seconds(pid: int) -> float:
    return sum(cpu_times(pid))


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def cpu_per_token(port: int, pid: int, tokens: int) -> list[tuple[int, float]]:
    """Return the CPU microseconds per token in each tenth of one long stream."""
    marks = [(0, cpu_seconds(pid))]

    def note(frames: int) -> None:
        if frames >= len(marks) * tokens // 10:
            marks.append((frames, cpu_seconds(pid)))

    _, stream = await asyncio.get_running_loop().create_connection(lambda: Stream(note), "127.0.0.1", port)
    await stream.done
    pairs = itertools.pairwise(marks)
    return [(after, (cpu - before_cpu) / (after - before) * 1e6) for (before, before_cpu), (after, cpu) in pairs]


async def lateness(port: int, streams: int, rate: float, tokens: int) -> list[float]:
    """Return the seconds by which each frame of all streams was late."""
    arrivals: list[list[tuple[int, float]]] = []

    def follow() -> Stream:
        arrivals.append(own := [])
        return Stream(lambda frames: own.append((frames, time.perf_counter())))

    await run_connections(follow, port, streams)
    return [late for own in arrivals for late in _behind(own, rate, tokens)]


def _behind(arrivals: list[tuple[int, float]], rate: float, tokens: int) -> list[float]:
    """Compare with the stream's own clock: tokens are due at a fixed distance from each other.

    The first frame has the role and comes with the first token. Frames after the last token are ignored.
    """
    offsets = [at - frames / rate for frames, at in arrivals if 1 < frames <= tokens]
    start = min(offsets)
    return [offset - start for offset in offsets]


async def held_open(port: int, pid: int, streams: int) -> float:
    """Return the bytes of memory per waiting stream."""
    loop = asyncio.get_running_loop()
    warm = [(await loop.create_connection(Stream, "127.0.0.1", port)) for _ in range(50)]
    await asyncio.sleep(1)
    before = resident_bytes(pid)
    opened = [(await loop.create_connection(Stream, "127.0.0.1", port)) for _ in range(streams)]
    await asyncio.sleep(3)
    after = resident_bytes(pid)
    for transport, stream in warm + opened:
        stream.done.cancel()
        transport.close()
    return (after - before) / streams


def run(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=uvloop.Loop) as runner:
        return runner.run(work)


def side_by_side(
    rounds: int,
    measure: Callable[[int, int], Coroutine[Any, Any, Speed]],
    text: str,
    burst: int,
    peers: dict[str, tuple[str, str, str]],
) -> dict[str, Speed]:
    """Return the medians of rounds in which the servers take turns."""
    results: dict[str, list[Speed]] = {OURS: [], **{name: [] for name in peers}}
    for _ in range(rounds):
        with run_scripted(replies=[{"output": text}], burst=burst) as (port, pid):
            results[OURS].append(run(measure(port, pid)))
        for name, how in peers.items():
            with run_peer(text, burst, *how) as (port, pid):
                results[name].append(run(measure(port, pid)))
    return {name: Speed(*map(statistics.median, zip(*figures, strict=True))) for name, figures in results.items()}


def show(title: str, figures: dict[str, Speed], target: str) -> None:
    print(f"\n{title}   (target: {target})")
    print(f"  {'per second of CPU time':<28}{'all':>12}{'ratio':>7}{'user':>14}{'ratio':>7}")
    ours = figures[OURS]
    for name, speed in figures.items():
        overall, user = ours.overall / speed.overall, ours.user / speed.user
        print(f"  {name:<28}{speed.overall:>12,.0f}{overall:>7.1f}{speed.user:>14,.0f}{user:>7.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round of everything")
    quick = parser.parse_args().quick
    if pin := pin_to(1):
        pin()
    rounds, tokens = (1, 300) if quick else (3, 1000)
    text = "word " * (tokens * CHUNK // 5)

    frames = partial(measure_speed, Stream, STREAMS)
    figures = side_by_side(rounds, frames, text, 1, PEERS | SENDS)
    show(f"frames, {STREAMS} streams, one token ready at a time", figures, "4 times plain FastAPI")
    figures = side_by_side(rounds, frames, text * 4, 16, PEERS)
    show(f"frames, {STREAMS} streams, 16 tokens ready at a time", figures, "20 times plain FastAPI")
    replies = partial(measure_speed, lambda: Caller(50 if quick else 200), 64)
    figures = side_by_side(rounds, replies, SHORT, 1, PEERS)
    show("requests, 64 connections, short reply", figures, "6 times plain FastAPI")

    long = 20_000 if quick else 100_000
    with run_scripted(replies=[{"output": "x" * CHUNK * long}]) as (port, pid):
        tenths = run(cpu_per_token(port, pid, long))
    print(f"\nCPU per token along one stream of {long:,} tokens   (target: flat)")
    print("  " + "  ".join(f"{at:,}: {cost:.1f} us" for at, cost in tenths))

    streams, seconds = (200, 3) if quick else (1000, 10)
    with run_scripted(replies=[{"output": "x" * CHUNK * 20 * seconds}], tokens_per_second=20) as (port, pid):
        begun = cpu_seconds(pid)
        late = sorted(run(lateness(port, streams, 20, 20 * seconds)))
        busy = (cpu_seconds(pid) - begun) / seconds
    print(f"\n{streams} streams of 20 tokens/s for {seconds} s   (target: p99 below 50 ms)")
    print(f"  lateness p50 {late[len(late) // 2] * 1e3:.1f} ms, p99 {late[int(len(late) * 0.99)] * 1e3:.1f} ms")
    print(f"  CPU {busy:.0%} of one core")

    with run_scripted(replies=[{"output": "x" * 40}], hang_after=1) as (port, pid):
        held = run(held_open(port, pid, streams))
    print(f"\nmemory per idle stream: {held / 1024:.1f} KB   (target: below 64 KB)")


if __name__ == "__main__":
    main()
