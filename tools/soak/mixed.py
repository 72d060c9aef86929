"""Mixed load on SmolLM2: clients that ask everything in `mix.py` in random order, one request after the other.

Some clients leave in the middle of a reply. It fails where a request is lost or answered wrongly.
"""

import asyncio
import json
import time
from collections import Counter
from random import Random
from typing import Any

import httpx

from tools.server import Server
from tools.soak.growth import MEMORY_SHARE, UsageLog
from tools.soak.mix import MIX, MODEL, Kind, Outcome, outcome

CLIENTS = 6
OUTCOMES = ("answered", "refused", "busy", "left", "wrong", "lost")
REPLY_SECONDS = 600


def config() -> dict[str, Any]:
    return {
        "models": {MODEL: {"source": MODEL, "context": 1024, "slots": 4, "layout": "as-is"}},
        # Few responses are kept, so that old ones are soon removed. A slow machine is not an error.
        "limits": {"kept_responses": 20, "queue": 64, "queue_seconds": REPLY_SECONDS},
    }


class Mixed:
    def __init__(self, server: Server, seed: int) -> None:
        self.server = server
        self.seed = seed
        self.counts: Counter[tuple[str, str]] = Counter()
        self.messages: Counter[tuple[str, str]] = Counter()
        """Of what went wrong, and of refusals for lack of room."""
        self._usage = UsageLog(server)

    async def run(self, seconds: float, clients: int = CLIENTS) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=self.server.url, timeout=REPLY_SECONDS, limits=limits, trust_env=False
        ) as http:
            for kind in MIX:
                await self._ask(http, kind, Random(self.seed))
            until = time.monotonic() + seconds
            async with self._usage.sampling(seconds), asyncio.TaskGroup() as group:
                for number in range(clients):
                    group.create_task(self._client(http, Random(f"{self.seed} {number}"), until))

    async def _client(self, http: httpx.AsyncClient, random: Random, until: float) -> None:
        while time.monotonic() < until:
            await self._ask(http, random.choice(MIX), random)

    async def _ask(self, http: httpx.AsyncClient, kind: Kind, random: Random) -> None:
        found = await ask(http, kind, random)
        self.counts[kind.name, found.name] += 1
        if found.name in ("busy", "wrong", "lost"):
            self.messages[found.name, f"{kind.name}: {found.message}"] += 1

    def report(self, memory_share: float = MEMORY_SHARE) -> list[str]:
        print(f"{'':20}" + "".join(f"{name:>10}" for name in OUTCOMES))
        for kind in MIX:
            print(f"{kind.name:20}" + "".join(f"{self.counts[kind.name, name]:10}" for name in OUTCOMES))
        totals = [sum(times for (_, name), times in self.counts.items() if name == wanted) for wanted in OUTCOMES]
        print(f"{'all':20}" + "".join(f"{total:10}" for total in totals))
        lines = [(name, f"{name}, {times} times: {message}") for (name, message), times in self.messages.most_common()]
        for name, line in lines:
            if name == "busy":
                print(line)
        problems = [line for name, line in lines if name != "busy"]
        return problems + self._usage.report(memory_share) + self._usage.stop()


async def ask(http: httpx.AsyncClient, kind: Kind, random: Random) -> Outcome:
    body = kind.body(random)
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = http.build_request("POST", kind.path, content=content, headers={"content-type": "application/json"})
    try:
        if kind.leaves:
            return await _leave(http, request, random)
        response = await http.send(request)
    except httpx.HTTPError as error:
        return Outcome("lost", repr(error))
    return outcome(kind, body, response.status_code, response.content)


async def _leave(http: httpx.AsyncClient, request: httpx.Request, random: Random) -> Outcome:
    """Disconnect before the headers, or after a few pieces."""
    try:
        async with asyncio.timeout(random.choice([0.05, 0.3, 1, 3])):
            response = await http.send(request, stream=True)
            try:
                pieces = response.aiter_raw()
                for _ in range(random.randint(0, 10)):
                    await anext(pieces, b"")
            finally:
                await response.aclose()
    except TimeoutError:
        pass
    return Outcome("left")
