"""Many streams at the pace of a reader: 1,000 at 20 tokens per second each, from the scripted engine.

Each client asks for a stream, reads it to its end, and asks for the next one on the same connection. The engine plays
token k at begin + (k + 1) / rate. The begin is not known to the client: it is taken from the token of the stream that
came earliest, measured against the schedule. All others are late by the time they come after their own schedule.
"""

import asyncio
import gc
import statistics
import time
from array import array
from collections import Counter
from random import Random
from typing import Any, cast

from tools.client import chat_body, request_bytes
from tools.server import Server
from tools.soak.growth import MEMORY_SHARE, UsageLog

MODEL = "paced"
TOKEN = "tick"
TOKENS = 400
RATE = 20.0
LATENESS_P99 = 0.050
RAMP_SECONDS = 5.0
"""The streams begin within this time, so that their tokens and their ends are spread."""
MARK = b'"delta":{"content":"' + TOKEN.encode() + b'"'
END = b"data: [DONE]\n\n\r\n0\r\n\r\n"
PER_SECOND = 10_000
"""Steps of the histogram of lateness."""


def config(rate: float = RATE, tokens: int = TOKENS) -> dict[str, Any]:
    model = {"engine": "scripted", "tokens_per_second": rate, "replies": [{"output": TOKEN * tokens}]}
    return {"models": {MODEL: model | {"chunk": len(TOKEN)}}}


class Lateness:
    """A histogram of seconds."""

    def __init__(self) -> None:
        self._steps: Counter[int] = Counter()
        self.count = 0

    def add(self, arrivals: "array[float]", rate: float) -> None:
        """The tokens of one stream, the first one first."""
        begins = [arrival - place / rate for place, arrival in enumerate(arrivals)]
        earliest = min(begins)
        self._steps.update(int((begin - earliest) * PER_SECOND) for begin in begins)
        self.count += len(begins)

    def quantile(self, share: float) -> float:
        seen = 0
        for step in sorted(self._steps):
            seen += self._steps[step]
            if seen >= share * self.count:
                return (step + 1) / PER_SECOND
        return 0.0


class Client(asyncio.Protocol):
    """One connection, and one stream after the other on it."""

    def __init__(self, run: "Streams", delay: float) -> None:
        self._run = run
        self._delay = delay
        self._arrivals: array[float] = array("d")
        self._tail = b""
        self._asked = 0.0
        self._transport: asyncio.Transport | None = None
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        asyncio.get_running_loop().call_later(self._delay, self._ask)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        text = self._tail + data
        found = text.count(MARK)
        if found:
            if not self._arrivals:
                self._run.first_tokens.append(now - self._asked)
            self._arrivals.extend([now] * found)
            text = text[text.rindex(MARK) + len(MARK) :]
        if text.endswith(END):
            self._finish()
        elif b'"error"' in text:
            self._run.fail(f"an error: {text[-300:]!r}")
            self._close()
        else:
            # Enough for a mark that is cut in two.
            self._tail = text[-max(len(MARK), len(END)) :]

    def connection_lost(self, exc: Exception | None) -> None:
        if self._arrivals or not self._run.is_over:
            self._run.fail(f"the connection closed after {len(self._arrivals)} tokens: {exc!r}")
        if not self.closed.done():
            self.closed.set_result(None)

    def _ask(self) -> None:
        self._asked = time.monotonic()
        assert self._transport is not None
        self._transport.write(self._run.request)

    def _finish(self) -> None:
        if len(self._arrivals) != self._run.tokens:
            self._run.fail(f"a stream of {len(self._arrivals)} tokens, not {self._run.tokens}")
        self._run.lateness.add(self._arrivals, self._run.rate)
        self._run.finished += 1
        self._arrivals, self._tail = array("d"), b""
        if self._run.is_over:
            self._close()
        else:
            self._ask()

    def _close(self) -> None:
        self._arrivals = array("d")
        if self._transport is not None:
            self._transport.close()


class Streams:
    def __init__(self, server: Server, seed: int, rate: float = RATE, tokens: int = TOKENS) -> None:
        self.server = server
        self.rate = rate
        self.tokens = tokens
        self.request = request_bytes(chat_body(MODEL)).replace(b"Connection: close", b"Connection: keep-alive")
        self.lateness = Lateness()
        self.first_tokens: list[float] = []
        self.finished = 0
        self.errors: Counter[str] = Counter()
        self._random = Random(seed)
        self._until = 0.0
        self._usage = UsageLog(server)
        self._cpu = server.cpu_seconds(), time.process_time()

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._until

    def fail(self, problem: str) -> None:
        self.errors[problem[:300]] += 1

    async def run(self, seconds: float, streams: int) -> None:
        """Every stream that was begun in that time is read to its end."""
        gc.collect()
        gc.freeze()
        self._until = time.monotonic() + seconds
        loop = asyncio.get_running_loop()
        clients = []
        for _ in range(streams):
            delay = self._random.uniform(0, min(RAMP_SECONDS, seconds / 4))
            _, client = await loop.create_connection(lambda: Client(self, delay), "127.0.0.1", self.server.port)  # noqa: B023
            clients.append(client)
        async with self._usage.sampling(seconds):
            await asyncio.wait([client.closed for client in clients], timeout=seconds)
        reply_seconds = self.tokens / self.rate
        done, late = await asyncio.wait([client.closed for client in clients], timeout=60 + 2 * reply_seconds)
        if late:
            self.fail(f"{len(late)} of {len(done) + len(late)} streams did not end")

    def report(self, lateness_bound: float = LATENESS_P99, memory_share: float = MEMORY_SHARE) -> list[str]:
        problems = [f"{problem} ({times} times)" for problem, times in self.errors.most_common(10)]
        if not self.lateness.count:
            return [*problems, "no stream ended"]
        p50, p99, most = (self.lateness.quantile(share) * 1000 for share in (0.5, 0.99, 1.0))
        first = [second * 1000 for second in sorted(self.first_tokens)]
        print(f"{self.finished:,} streams, {self.lateness.count:,} tokens, {sum(self.errors.values())} errors")
        print(f"lateness of a token, ms: p50 {p50:.1f}, p99 {p99:.1f}, max {most:.1f}")
        print(f"first token, ms: p50 {statistics.median(first):.1f}, p99 {first[len(first) * 99 // 100]:.1f}")
        server, client = self.server.cpu_seconds() - self._cpu[0], time.process_time() - self._cpu[1]
        per_token = 1e6 / self.lateness.count
        print(f"CPU time per token, us: server {server * per_token:.1f}, client {client * per_token:.1f}")
        if p99 > lateness_bound * 1000:
            problems.append(f"lateness p99 is {p99:.1f} ms; at most {lateness_bound * 1000:g} ms are allowed")
        return problems + self._usage.report(memory_share) + self._usage.stop()
