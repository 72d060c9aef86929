"""Runs a front end: `python -m dragoman.server.frontends.process PARENT NUMBER SOCKET...`.

The arguments are the parent's process id, the number of the front end, and file descriptors of listening sockets.

Rules
1. The front end answers the busiest routes itself and relays the others to the parent.
2. When the connection to the parent ends, the process exits at once. When the parent dies, it is killed even if its
   event loop is stuck: by the kernel on Linux, by a thread that polls the parent elsewhere.
3. If it cannot apply a new configuration it exits, so that removed keys stop working. The parent starts another.
"""

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Awaitable, Sequence

import uvloop

from dragoman.config.settings import Settings
from dragoman.core.errors import ConfigError
from dragoman.ipc.child_process import enter_child
from dragoman.ipc.engine_client import make_method_call
from dragoman.ipc.parent_death import kill_with_parent
from dragoman.server.app import App
from dragoman.server.base_app import BaseApp, Route, SharedRoute
from dragoman.server.frontends import messages
from dragoman.server.frontends.remote import (
    ParentConnection,
    RemoteBackground,
    RemoteBatches,
    RemoteFiles,
    RemoteModelLease,
    RemoteQuotaLease,
    RemoteResponses,
    RemoteTelemetry,
)
from dragoman.server.http.server import HttpServer, tune_memory
from dragoman.server.http_exchange import HttpExchange
from dragoman.server.routes import build_routes
from dragoman.storage.blobs import BlobStore, blob_directory

log = logging.getLogger("dragoman.fronts")

END_SECONDS = 5.0
"""Time for cancelled requests to send their errors when the front end stops."""
POLL_SECONDS = 0.02


class FrontEndApp(BaseApp):
    def __init__(self, settings: Settings, parent: ParentConnection) -> None:
        super().__init__(build_routes(settings), settings, RemoteTelemetry(parent, settings))
        self.responses = RemoteResponses(parent)
        self.background = RemoteBackground(parent)
        self.files = RemoteFiles(parent)
        self.batches = RemoteBatches(parent)
        self.blobs = BlobStore(blob_directory(settings.storage))
        self._parent = parent

    async def stop(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + END_SECONDS
        while self.exchanges and loop.time() < deadline:  # noqa: ASYNC110 (once)
            await asyncio.sleep(POLL_SECONDS)
        await self.tasks.finish()
        await self._close_recording()
        self._authenticator.close()

    def configure(self, settings: Settings) -> None:
        """Apply settings that the parent has applied already."""
        self._apply_reloaded(settings)
        self._parent.send(messages.ConfigApplied())

    def _reconfigure(self, settings: Settings) -> None:
        """Nothing here can reject new settings."""

    def model_lease(self, exchange: HttpExchange) -> RemoteModelLease:
        return RemoteModelLease(self._parent, exchange)

    def _enter_quota(self, exchange: HttpExchange, route: Route[App] | None) -> Awaitable[None] | None:
        # The parent takes the lease of a relayed request.
        is_answered_by_parent = route is not None and not isinstance(route, SharedRoute)
        if exchange.caller.quota is None or exchange.method != "POST" or is_answered_by_parent:
            return None
        exchange.response.quota_lease = lease = RemoteQuotaLease()
        return lease.enter(self._parent, exchange)

    def _answer(self, exchange: HttpExchange, route: Route[App]) -> Awaitable[None]:
        return route.handler(self, exchange) if isinstance(route, SharedRoute) else self._relay(exchange)

    async def _relay(self, exchange: HttpExchange) -> None:
        body = await exchange.read_body(self.settings.limits, bytes) if exchange.method == "POST" else b""
        method_call = make_method_call("relay", exchange.serializable_scope(), body)
        # The parent enforces the deadline.
        exchange.is_answered_by_parent = True
        exchange.timer.stop()
        reply = await self._parent.call_method(method_call, messages.RelayReply, exchange.record.id)
        await exchange.response.relay(reply.status, reply.headers, reply.body)


class FrontEnd:
    def __init__(self, number: int, listeners: Sequence[socket.socket]) -> None:
        self._parent = ParentConnection(number, self._handle, lambda: os._exit(0))
        self._listeners = listeners
        self._started: asyncio.Future[tuple[FrontEndApp, HttpServer]] = asyncio.get_running_loop().create_future()
        self._stopping = asyncio.Event()

    def _handle(self, command: messages.Command) -> None:
        try:
            if isinstance(command, messages.Stop):
                self._stop(command, *self._started.result())
            elif self._started.done():
                self._started.result()[0].configure(command.settings)
            else:
                app = FrontEndApp(command.settings, self._parent)
                self._started.set_result((app, HttpServer(app, self._listeners)))
        except ConfigError as error:
            log.error("a front end cannot apply the configuration: %s", error)
            os._exit(0)

    def _stop(self, command: messages.Stop, app: FrontEndApp, server: HttpServer) -> None:
        if command.mode == "announced":
            app.stop_requests()
            return
        if command.mode == "forced":
            server.force_stop()
        self._stopping.set()

    async def serve(self, connection: int) -> None:
        await self._parent.link.connect(socket.socket(fileno=connection))
        app, server = await self._started
        await server.run(self._stopping, self._note_listening)
        await server.stop(app.settings.grace_seconds)
        await app.stop()
        await self._parent.link.drain()

    def _note_listening(self) -> None:
        tune_memory()
        self._parent.send(messages.Listening())


async def _run(number: int, connection: int, sockets: Sequence[int]) -> None:
    await FrontEnd(number, [socket.socket(fileno=listener) for listener in sockets]).serve(connection)


def main() -> None:
    parent, number, *sockets = map(int, sys.argv[1:])
    _, connection = enter_child()
    kill_with_parent(parent)
    with asyncio.Runner(loop_factory=uvloop.Loop) as runner:
        runner.run(_run(number, connection, sockets))


if __name__ == "__main__":
    main()
