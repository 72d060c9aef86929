"""Helpers for servers with several front ends."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from tests.support.requests import CHAT, PATIENCE, talking
from tests.support.server_process import Running


def front_of(running: Running, client: httpx.Client) -> int | None:
    """Return the front end that has this client's connection."""
    port = client.get("/health").extensions["network_stream"].get_extra_info("client_addr")[1]
    ends = f":{running.port:04X}", f":{port:04X}"
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inode = next(line[9] for line in lines if line[1].endswith(ends[0]) and line[2].endswith(ends[1]))
    for pid in running.fronts():
        if any(_points_to(entry, f"socket:[{inode}]") for entry in Path(f"/proc/{pid}/fd").iterdir()):
            return pid
    return None


def _points_to(entry: Path, target: str) -> bool:
    try:
        return str(entry.readlink()) == target
    except OSError:
        return False


@contextmanager
def each(
    running: Running, headers: dict[str, str] | None = None, connect: Callable[[], httpx.Client] | None = None
) -> Iterator[list[httpx.Client]]:
    """Yield a client for each front end."""
    with ExitStack() as stack:
        found: dict[int, httpx.Client] = {}
        deadline = time.monotonic() + PATIENCE
        while len(found) < len(running.fronts()) or len(found) < 2:
            assert time.monotonic() < deadline, found
            client = stack.enter_context(talking(running, headers) if connect is None else connect())
            pid = front_of(running, client)
            if pid is not None:
                found.setdefault(pid, client)
        yield [found[pid] for pid in sorted(found)]


def many(running: Running) -> httpx.AsyncClient:
    """A client with a new connection for each request."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=running.url, trust_env=False, timeout=PATIENCE, limits=limits)


async def streamed_text(
    client: httpx.AsyncClient, model: str, leave_after: int | None = None, content: str = "hello"
) -> tuple[str, str]:
    """Return the text and how the stream ended: done, left, cut off, reset, or the message of an error."""
    text, pieces = "", 0
    body = {"messages": [{"role": "user", "content": content}], "model": model, "stream": True}
    try:
        async with client.stream("POST", CHAT, json=body) as reply:
            if reply.status_code != 200:
                return "", json.loads(await reply.aread())["error"]["message"]
            async for line in reply.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    return text, "done"
                frame = json.loads(line.removeprefix("data: "))
                if "error" in frame:
                    return text, frame["error"]["message"]
                text += frame["choices"][0]["delta"].get("content") or ""
                pieces += 1
                if pieces == leave_after:
                    return text, "left"
    except httpx.TransportError:
        return text, "reset"
    return text, "cut off"
