"""Calls the app without a connection: for relayed requests of front ends, for requests of WebSockets, and for jobs.

A job is a request that the server answers for a caller who does not wait: a background response, a line of a batch.

Rules
1. A job is a request like any other: it has a slot, an entry in the ledger, metrics and a line in the logs.
2. It needs no key and no quota, and has no deadline: its caller was authenticated when the job was accepted.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

from dragoman.server.auth.callers import Caller
from dragoman.server.http.response import Scope

JOB = "dragoman.job"
"""The extension of an ASGI scope that has the job. Only the server itself can set it."""
OnPart = Callable[[bytes], Awaitable[None]]


@dataclass(frozen=True)
class RequestJob:
    """`id` is that of the request. A batch job waits for all requests that are not."""

    caller: Caller
    id: str
    is_batch: bool = False

    @property
    def kind(self) -> Literal["background", "batch"]:
        return "batch" if self.is_batch else "background"


@dataclass(frozen=True)
class AppReply:
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


def job_scope(job: RequestJob, path: str) -> Scope:
    """The ASGI scope of a job that posts JSON to a path."""
    return {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "extensions": {JOB: job},
    }


async def call_app(
    app: Any, scope: Scope, body: bytes, disconnected: asyncio.Event, on_part: OnPart | None = None
) -> AppReply:
    """Call the app as an ASGI server would, and collect its reply. With `on_part`, the parts of a successful reply go
    there as they are sent. Setting `disconnected` ends the request as if its client had gone; such a request gets no
    reply."""
    unread = [{"type": "http.request", "body": body, "more_body": False}]
    start: dict[str, Any] = {"status": 500}
    parts: list[bytes] = []

    async def receive() -> dict[str, Any]:
        if unread:
            return unread.pop()
        await disconnected.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            start.update(message)
        elif part := message.get("body", b""):
            if on_part is None or start["status"] != 200:
                parts.append(part)
            else:
                await on_part(part)

    await app(scope, receive, send)
    return AppReply(start["status"], list(start.get("headers", ())), b"".join(parts))
