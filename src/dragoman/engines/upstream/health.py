"""Probes the servers of a model, so that unreachable ones are not chosen.

During the first STARTUP_SECONDS unreachable servers are probed frequently, so that servers and their pool may be
started at the same time.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Iterable

from dragoman.core.errors import AnswerTimeout, DragomanError, Unreachable
from dragoman.engines.upstream.pool import ServerPool
from dragoman.engines.upstream.server import UpstreamServer

log = logging.getLogger("dragoman.upstream")

PROBE_SECONDS = 5.0
STARTUP_SECONDS = 30.0
STARTUP_PROBE_INTERVAL = 0.25


class HealthProber:
    def __init__(self, name: str, pool: ServerPool[UpstreamServer], interval: float) -> None:
        """`interval` is the number of seconds between two probes; 0 means only one probe."""
        self._name = name
        self._pool = pool
        self._interval = interval

    async def probe_all(self) -> None:
        await self._probe_servers(self._pool.members)

    async def probe_forever(self, first: Awaitable[None]) -> None:
        """Probe the servers regularly after the first probe of all."""
        await first
        if not self._interval:
            return
        now = time.monotonic()
        end_of_startup, next_full_probe = now + STARTUP_SECONDS, now + self._interval
        while True:
            missing = [server for server in self._pool.members if self._pool.state(server) == "out"]
            if missing and now < end_of_startup:
                await asyncio.sleep(min(STARTUP_PROBE_INTERVAL, self._interval))
            else:
                await asyncio.sleep(max(0.0, next_full_probe - now))
            now = time.monotonic()
            if now >= next_full_probe:
                next_full_probe = now + self._interval
                await self.probe_all()
            else:
                await self._probe_servers(missing)

    async def _probe_servers(self, servers: Iterable[UpstreamServer]) -> None:
        await asyncio.gather(*map(self._probe, servers))

    async def _probe(self, server: UpstreamServer) -> None:
        """Probe one server. Any answer, even an error, shows that it is reachable."""
        before = self._pool.state(server)
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                await server.probe()
        except Unreachable as error:
            self._pool.record_failure(server, is_unreachable=True)
            if before == "up":
                log.warning("model %s: %s is unreachable: %s", self._name, server.url, error)
            return
        except (AnswerTimeout, TimeoutError):
            self._record_slow_probe(server, before)
            return
        except DragomanError as error:
            server.redact(error)
            log.debug("model %s: %s does not list its models: %s", self._name, server.url, error)
        self._pool.record_probe(server)
        if before == "out" and self._pool.state(server) != "out":
            log.warning("model %s: %s is reachable again", self._name, server.url)
            server.forget_rejections()

    def _record_slow_probe(self, server: UpstreamServer, before: str) -> None:
        """A busy server may answer requests faster than it lists its models, so a slow probe alone proves little."""
        self._pool.record_slow_probe(server)
        problem = f"listing its models takes longer than {PROBE_SECONDS:g} s"
        if before == "up" and self._pool.state(server) == "out":
            log.warning("model %s: %s is unreachable: %s, and no request succeeded", self._name, server.url, problem)
        elif server.slow_probes == 1:
            log.warning("model %s: %s is slow: %s; requests are still sent to it", self._name, server.url, problem)
