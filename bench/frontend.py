"""How fast the front end is: frames and requests per second of one core.

    python -m bench.frontend [--quick]

Dragoman with the scripted engine and the whole pipeline in place, side by side with a FastAPI + pydantic server of the
same route (bench/peer.py), once on plain uvicorn and once on uvicorn with uvloop and httptools, and with an ASGI app
that only sends ready-made bytes (bench/ceiling.py): no server on uvicorn can be faster. Frames also side by side with a
plain loop of `send` calls (bench/sends.py), which is faster than any server that sends a frame when it is there.

Figures are per second of CPU time that the server used, so that what else the machine does matters little; once of all
its CPU time, once of what it spent in user space, without the kernel's work of sending, which no server can avoid.
Server and load generator each have a core of their own where there are two. Rounds alternate; medians are shown.
"""

import argparse
import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast
from urllib.error import URLError
from urllib.request import urlopen

import uvloop
from tools.ports import free_port

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


TICKS = os.sysconf("SC_CLK_TCK")
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def pinned(core: int) -> Callable[[], None] | None:
    if len(CORES) < 2:
        return None
    return lambda: os.sched_setaffinity(0, {CORES[core]})


@contextmanager
def process(command: list[str], port: int) -> Iterator[int]:
    child = subprocess.Popen(command, preexec_fn=pinned(0), stderr=subprocess.DEVNULL)
    try:
        served_until_ready(child, port)
        yield child.pid
    finally:
        child.terminate()
        child.wait(10)


def served_until_ready(child: subprocess.Popen[bytes], port: int, seconds: int = 20) -> None:
    for _ in range(seconds * 10):
        try:
            urlopen(f"http://127.0.0.1:{port}/ready", timeout=1).close()
            return
        except (URLError, OSError):
            time.sleep(0.1)
        if child.poll() is not None:
            break
    raise SystemExit(f"the server on port {port} did not start: {child.args!r}")


@contextmanager
def dragoman(**options: Any) -> Iterator[tuple[int, int]]:
    port = free_port()
    config = {
        "models": {"scripted": {"engine": "scripted", **options}},
        "limits": {"queue": 5000, "keepalive_seconds": 3600},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "dragoman.yaml"
        path.write_text(json.dumps(config))
        command = [sys.executable, "-m", "dragoman", "serve", "--config", str(path), "--port", str(port)]
        with process(command, port) as pid:
            yield port, pid


@contextmanager
def peer(text: str, burst: int, module: str, loop: str, http: str) -> Iterator[tuple[int, int]]:
    port = free_port()
    command = [sys.executable, "-m", module, str(port), text, str(burst), loop, http]
    with process(command, port) as pid:
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
        # Less than one tick of the clock cannot be told from nothing.
        user, kernel = max(ended[0] - begun[0], 1 / TICKS), ended[1] - begun[1]
        return cls(count / (user + kernel), count / user)


class Stream(asyncio.Protocol):
    """One streaming request: counts frames and notes when they came."""

    def __init__(self, note: Callable[[int], None] | None = None) -> None:
        self.done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.frames = 0
        self.tail = b""
        self.note = note

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.write(request_bytes(stream=True))

    def data_received(self, data: bytes) -> None:
        data = self.tail + data
        self.tail = data[-5:]
        self.frames += data.count(b"data: ")
        if self.note is not None:
            self.note(self.frames)
        if b"[DONE]" in data:
            self.transport.close()
            self.done.set_result(self.frames)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError("the stream broke off"))


async def frames_per_second(port: int, pid: int, streams: int) -> Speed:
    loop = asyncio.get_running_loop()
    begun = cpu_times(pid)
    opened = [await loop.create_connection(Stream, "127.0.0.1", port) for _ in range(streams)]
    counts = await asyncio.gather(*(stream.done for _, stream in opened))
    return Speed.of(sum(counts), begun, cpu_times(pid))


class Caller(asyncio.Protocol):
    """One connection that asks again and again."""

    def __init__(self, calls: int) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.left = calls
        self.data = b""
        self.request = request_bytes(stream=False)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.write(self.request)

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
            self.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError("the connection broke off"))


async def requests_per_second(port: int, pid: int, connections: int, calls: int) -> Speed:
    loop = asyncio.get_running_loop()
    begun = cpu_times(pid)
    opened = [await loop.create_connection(lambda: Caller(calls), "127.0.0.1", port) for _ in range(connections)]
    await asyncio.gather(*(caller.done for _, caller in opened))
    return Speed.of(connections * calls, begun, cpu_times(pid))


def cpu_times(pid: int) -> tuple[float, float]:
    """Seconds in user space and in the kernel."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) / TICKS, int(fields[12]) / TICKS


def cpu_seconds(pid: int) -> float:
    return sum(cpu_times(pid))


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def cpu_per_token(port: int, pid: int, tokens: int) -> list[tuple[int, float]]:
    """CPU microseconds per token in each tenth of one long stream."""
    marks = [(0, cpu_seconds(pid))]

    def note(frames: int) -> None:
        if frames >= (len(marks)) * tokens // 10:
            marks.append((frames, cpu_seconds(pid)))

    _, stream = await asyncio.get_running_loop().create_connection(lambda: Stream(note), "127.0.0.1", port)
    await stream.done
    pairs = itertools.pairwise(marks)
    return [(after, (cpu - before_cpu) / (after - before) * 1e6) for (before, before_cpu), (after, cpu) in pairs]


async def lateness(port: int, streams: int, rate: float, tokens: int) -> list[float]:
    """Seconds by which frames came after their time, of all streams."""
    loop = asyncio.get_running_loop()
    late: list[float] = []

    def follower() -> Stream:
        arrivals: list[tuple[int, float]] = []

        def note(frames: int) -> None:
            arrivals.append((frames, time.perf_counter()))

        stream = Stream(note)
        stream.done.add_done_callback(lambda _: late.extend(_behind(arrivals, rate, tokens)))
        return stream

    opened = [(await loop.create_connection(follower, "127.0.0.1", port))[1] for _ in range(streams)]
    await asyncio.gather(*(stream.done for stream in opened))
    return late


def _behind(arrivals: list[tuple[int, float]], rate: float, tokens: int) -> list[float]:
    """Against the stream's own clock: its tokens are due at a fixed distance from each other. The first frame tells the
    role and comes with the first token; what comes after the last token is not looked at."""
    offsets = [at - frames / rate for frames, at in arrivals if 1 < frames <= tokens]
    start = min(offsets)
    return [offset - start for offset in offsets]


async def held_open(port: int, pid: int, streams: int) -> float:
    """Bytes of memory per stream that waits."""
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


def run(work: Any) -> Any:
    with asyncio.Runner(loop_factory=uvloop.Loop) as runner:
        return runner.run(work)


def side_by_side(
    rounds: int, measure: Callable[[int, int], Any], text: str, burst: int, peers: dict[str, tuple[str, str, str]]
) -> dict[str, Speed]:
    """Medians, the servers taking turns."""
    results: dict[str, list[Speed]] = {OURS: [], **{name: [] for name in peers}}
    for _ in range(rounds):
        with dragoman(replies=[{"output": text}], burst=burst) as (port, pid):
            results[OURS].append(run(measure(port, pid)))
        for name, how in peers.items():
            with peer(text, burst, *how) as (port, pid):
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
    if pin := pinned(1):
        pin()
    rounds, tokens = (1, 300) if quick else (3, 1000)
    text = "word " * (tokens * CHUNK // 5)

    figures = side_by_side(rounds, lambda port, pid: frames_per_second(port, pid, STREAMS), text, 1, PEERS | SENDS)
    show(f"frames, {STREAMS} streams, one token ready at a time", figures, "4 times plain FastAPI")
    figures = side_by_side(rounds, lambda port, pid: frames_per_second(port, pid, STREAMS), text * 4, 16, PEERS)
    show(f"frames, {STREAMS} streams, 16 tokens ready at a time", figures, "20 times plain FastAPI")
    calls = 50 if quick else 200
    figures = side_by_side(rounds, lambda port, pid: requests_per_second(port, pid, 64, calls), SHORT, 1, PEERS)
    show("requests, 64 connections, short reply", figures, "6 times plain FastAPI")

    long = 20_000 if quick else 100_000
    with dragoman(replies=[{"output": "x" * CHUNK * long}]) as (port, pid):
        tenths = run(cpu_per_token(port, pid, long))
    print(f"\nCPU per token along one stream of {long:,} tokens   (target: flat)")
    print("  " + "  ".join(f"{at:,}: {cost:.1f} us" for at, cost in tenths))

    streams, seconds = (200, 3) if quick else (1000, 10)
    with dragoman(replies=[{"output": "x" * CHUNK * 20 * seconds}], tokens_per_second=20) as (port, pid):
        begun = cpu_seconds(pid)
        late = sorted(run(lateness(port, streams, 20, 20 * seconds)))
        busy = (cpu_seconds(pid) - begun) / seconds
    print(f"\n{streams} streams of 20 tokens/s for {seconds} s   (target: p99 below 50 ms)")
    print(f"  lateness p50 {late[len(late) // 2] * 1e3:.1f} ms, p99 {late[int(len(late) * 0.99)] * 1e3:.1f} ms")
    print(f"  CPU {busy:.0%} of one core")

    with dragoman(replies=[{"output": "x" * 40}], hang_after=1) as (port, pid):
        held = run(held_open(port, pid, streams))
    print(f"\nmemory per idle stream: {held / 1024:.1f} KB   (target: below 64 KB)")


if __name__ == "__main__":
    main()
