"""Connections to MCP servers that are programs: JSON-RPC on their standard streams, one message per line.

Rules
1. The program has PATH, HOME and the like of the server's environment, and what its configuration adds.
2. A line that is too long ends the connection, and the program.
3. The program ends when its input ends. If it does not, it is killed with everything that it has started.
4. The last 2,000 bytes of its standard error are logged if it does not start.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage
from mcp.types import jsonrpc_message_adapter

from dragoman.core.urls import redact_secrets

END_SECONDS = 2.0
"""How long a program has to end after its input."""
DROPPED = 65536
KEPT_BYTES = 2000
"""Bytes of the standard error that are kept."""
Incoming = SessionMessage | Exception


class ProgramNotStarted(Exception):
    """The program cannot be started. The message can be shown to callers."""


class ErrorOutput:
    """The end of what a program wrote to its standard error."""

    def __init__(self, secrets: Sequence[str] = ()) -> None:
        self._secrets = secrets
        self._text = b""

    async def collect(self, stream: asyncio.StreamReader) -> None:
        while piece := await stream.read(4096):
            self._text = (self._text + piece)[-KEPT_BYTES:]

    @property
    def text(self) -> str:
        return redact_secrets(self._text.decode("utf-8", "replace").strip(), self._secrets)


@asynccontextmanager
async def program_transport(
    command: Sequence[str],
    env: Mapping[str, str],
    max_bytes: int,
    error_output: ErrorOutput,
    on_end: Callable[[], None],
) -> AsyncIterator[Any]:
    """Start the program. `on_end` is called when its output ends."""
    process = await _start(command, env, max_bytes)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    to_session, incoming = anyio.create_memory_object_stream[Incoming](0)
    outgoing, from_session = anyio.create_memory_object_stream[SessionMessage](0)
    tasks = [
        asyncio.create_task(_read(process.stdout, to_session, on_end)),
        asyncio.create_task(_write(process.stdin, from_session)),
        asyncio.create_task(error_output.collect(process.stderr)),
    ]
    try:
        yield incoming, outgoing
    finally:
        with anyio.CancelScope(shield=True):
            outgoing.close()
            await _stop(process)
            _, unfinished = await asyncio.wait(tasks, timeout=END_SECONDS)
            for task in unfinished:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for stream in (to_session, incoming, outgoing, from_session):
            stream.close()


async def _start(command: Sequence[str], env: Mapping[str, str], max_bytes: int) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    try:
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            env=get_default_environment() | dict(env),
            start_new_session=True,
            limit=max_bytes,
        )
    except (OSError, ValueError) as error:
        raise ProgramNotStarted("the program of the server cannot be started") from error


async def _read(stdout: asyncio.StreamReader, to_session: Any, on_end: Callable[[], None]) -> None:
    """Pass messages on until the output ends, or has a line that is too long. The rest is read and dropped."""
    with to_session, suppress(ValueError, anyio.BrokenResourceError):
        while line := await stdout.readline():
            try:
                message: Incoming = SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
            except ValueError as error:
                message = error
            await to_session.send(message)
    on_end()
    while await stdout.read(DROPPED):
        pass


async def _write(stdin: asyncio.StreamWriter, from_session: Any) -> None:
    with from_session, suppress(ConnectionError):
        async for message in from_session:
            stdin.write(message.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
            await stdin.drain()


async def _stop(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
    await _wait(process)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    # What the program has started may hold its output open.
    await _wait(process)


async def _wait(process: asyncio.subprocess.Process) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(END_SECONDS):
            await process.wait()
