"""One connection to an MCP server, which runs in a task of its own. Calls of several requests share it.

Rules
1. A connection is opened by its first call. It is closed when it has been idle for some time.
2. After a call that has timed out, a connection takes no further calls: the server may hang. It is closed as soon as
   the others have ended.
3. A call ends when its caller is cancelled. The server is told.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from mcp import Client
from mcp.client.session import ClientSession
from mcp.shared.exceptions import MCPError
from mcp.types import CONNECTION_CLOSED, Implementation

from dragoman.core.version import __version__
from dragoman.server.mcp.program_transport import ProgramNotStarted

CLOSE_SECONDS = 5.0
CONNECTION_CLOSED_MESSAGE = "the server closed the connection"
log = logging.getLogger("dragoman.mcp")
# Its errors contain what servers and callers send.
logging.getLogger("mcp").setLevel(logging.CRITICAL + 1)
MakeTransport = Callable[[Callable[[], None]], AbstractAsyncContextManager[Any]]
"""Gets a function that the transport calls if the server ends the connection."""


class ConnectionFailed(Exception):
    """The connection could not be opened. The message can be shown to callers."""


class McpConnection:
    def __init__(
        self,
        make_transport: MakeTransport,
        idle_seconds: float,
        on_end: Callable[[], None],
        on_failure: Callable[[str], None],
    ) -> None:
        """`on_end` is called once, when the connection takes no further calls; before it `on_failure` with the reason,
        if it could not be opened."""
        self._make_transport = make_transport
        self._idle_seconds = idle_seconds
        self._on_end = on_end
        self._on_failure = on_failure
        self._ready: asyncio.Future[ClientSession] = asyncio.get_running_loop().create_future()
        self._closing = asyncio.Event()
        self._calls = 0
        self._idle: asyncio.TimerHandle | None = None
        self._is_retired = False
        self.task = asyncio.create_task(self._run())
        self.task.add_done_callback(self._note_end)

    @property
    def is_idle(self) -> bool:
        return not self._calls

    @asynccontextmanager
    async def use(self) -> AsyncIterator[ClientSession]:
        """Use the connection for a call. Raises ConnectionFailed if it cannot be opened."""
        self._calls += 1
        if self._idle is not None:
            self._idle.cancel()
        try:
            yield await asyncio.shield(self._ready)
        finally:
            self._calls -= 1
            if self.is_idle:
                self._note_idle()

    def retire(self) -> None:
        """Take no further calls; close when those that run have ended."""
        if not self._is_retired:
            self._is_retired = True
            self._on_end()
        if self.is_idle:
            self.close()

    def close(self) -> None:
        """Begin to close; calls that run fail. Wait for `task` to know that it is closed."""
        if self._closing.is_set():
            return
        self._closing.set()
        self.retire()
        if self._ready.done():
            # A server may hang when it is told of the end.
            asyncio.get_running_loop().call_later(CLOSE_SECONDS, self.task.cancel)
        else:
            self.task.cancel()

    def _note_idle(self) -> None:
        if self._is_retired or not self._ready.done():
            # A server whose caller did not wait for the connection may hang.
            self.retire()
        else:
            self._idle = asyncio.get_running_loop().call_later(self._idle_seconds, self.retire)

    async def _run(self) -> None:
        info = Implementation(name="dragoman", version=__version__)
        async with Client(self._make_transport(self.close), client_info=info, cache=None) as client:
            self._ready.set_result(client.session)
            await self._closing.wait()

    def _note_end(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if not self._ready.done():
            reason = _describe(error)
            self._on_failure(reason)
            self._ready.set_exception(ConnectionFailed(reason))
            # It is logged if no call waits for it any more.
            self._ready.exception()
        if self._idle is not None:
            self._idle.cancel()
        self.retire()


def _describe(error: BaseException | None) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, ProgramNotStarted):
        return str(error)
    if isinstance(error, MCPError) and error.code != CONNECTION_CLOSED:
        return error.message
    if error is not None and not isinstance(error, MCPError):
        # Its message may contain what the server sent.
        log.error("a connection to an MCP server failed: %s", type(error).__name__)
    return CONNECTION_CLOSED_MESSAGE
