"""Talks to one running worker: sends requests down the pipe and delivers what comes up.

Rules
1. Events of a generation go to the mailbox of its reader in this process or, still encoded, to the sink of another
   process.
2. When the worker dies, every pending request fails with `exit_error`.
3. Output that cannot be decoded fails its own request. If that request is unknown, the worker counts as dead.
4. A worker is busy while it owes output. A complete reply is no longer work, even if its reader lags behind.
"""

import asyncio
import itertools
import logging
import os
import signal
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from dragoman.core.errors import DECODE_ERRORS, ENCODE_ERRORS, BadRequest, DragomanError, EngineDied
from dragoman.core.event_queue import EventQueue
from dragoman.core.request import GenerationRequest
from dragoman.ipc.fatal_requests import WorkerRequest
from dragoman.ipc.worker_messages import (
    HEADER,
    KEY_BITS,
    OWN_NUMBER,
    Answer,
    CancelRequest,
    Failure,
    Generate,
    GenerationProgress,
    PackedStep,
    Question,
    RawGenerate,
    Step,
    ToForwarder,
    ToParent,
    ToWorker,
    decode_in_parts,
    decode_progress,
    decode_progress_head,
    decode_to_forwarder,
    decode_to_parent,
    encode,
    pack,
)

log = logging.getLogger("dragoman.ipc")

UNSENDABLE = "the request cannot be passed to the engine: it has an integer of more than 64 bits or a lone surrogate"


class ProgressSink(Protocol):
    """Receives the encoded progress of generations that belong to another process."""

    def put(self, progress: msgspec.Raw) -> None: ...


class WorkerProcess:
    """One running worker and its pending requests."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.process = process
        self._input = process.stdin
        self._output = process.stdout
        self._keys = itertools.count(OWN_NUMBER << KEY_BITS)
        self._is_dead = False
        self.streams: dict[int, EventQueue] = {}
        self.forwarded: dict[int, ProgressSink] = {}
        """Generations of other processes, each until its end or until `stop_forwarding`."""
        self.answers: dict[int, asyncio.Future[Answer]] = {}
        self.unfinished: dict[int, WorkerRequest] = {}
        """Requests whose end the worker has not reported, even if their reader has gone."""
        self.last_message_at = time.monotonic()
        self.exit_error = Failure.of(EngineDied("the engine's process died; send the request again"))

    @property
    def busy(self) -> bool:
        return bool(self.streams or self.answers or self.forwarded)

    def send(self, message: ToWorker | RawGenerate) -> None:
        encoded = encode(message)
        if self._is_dead or self._input.is_closing():
            raise self.exit_error.error()
        try:
            self._input.write(encoded)
        except (OSError, RuntimeError) as error:
            # The event loop decides which of the two a broken pipe raises.
            raise self.exit_error.error() from error

    def open(self, request: GenerationRequest) -> tuple[int, EventQueue]:
        key = self._begin(lambda key: Generate(key, request))
        self.streams[key] = stream = EventQueue()
        self.unfinished[key] = request
        return key, stream

    def open_forwarded(self, sink: ProgressSink, key: int, request: msgspec.Raw) -> None:
        if not self.busy:
            self.last_message_at = time.monotonic()
        self.send(RawGenerate(key, request))
        self.forwarded[key] = sink
        self.unfinished[key] = request

    def stop_forwarding(self, key: int, ended: bool) -> None:
        """Discard further output of a forwarded generation; cancel it unless it has `ended`."""
        if self.forwarded.pop(key, None) is not None and not ended:
            self._send_cancel(key)

    async def ask(self, question: Callable[[int], Question]) -> Answer:
        key = self._begin(question)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.answers[key] = future
        self.unfinished[key] = question(key)
        try:
            answer = await future
        except asyncio.CancelledError:
            self._send_cancel(key)
            raise
        finally:
            del self.answers[key]
            if not self._is_dead:
                del self.unfinished[key]
        if answer.failure is not None:
            raise answer.failure.error()
        return answer

    def _begin(self, message: Callable[[int], ToWorker]) -> int:
        """Send a message with a new key and return the key."""
        key = next(self._keys)
        if not self.busy:
            self.last_message_at = time.monotonic()
        try:
            self.send(message(key))
        except ENCODE_ERRORS as error:
            raise BadRequest(UNSENDABLE) from error
        return key

    def cancel(self, key: int) -> None:
        """Cancel a generation; does nothing if it has ended."""
        if key in self.streams:
            self._send_cancel(key)

    def _send_cancel(self, key: int) -> None:
        try:
            self.send(CancelRequest(key))
        except DragomanError:
            # A dead worker has nothing to cancel.
            pass

    async def read(self) -> ToParent | ToForwarder | None:
        """Return the next message, or None at the end of the output or after an undecodable message."""
        try:
            (length,) = HEADER.unpack(await self._output.readexactly(HEADER.size))
            body = await self._output.readexactly(length)
        except asyncio.IncompleteReadError:
            return None
        self.last_message_at = time.monotonic()
        try:
            try:
                return decode_to_forwarder(body) if self.forwarded else decode_to_parent(body)
            except DECODE_ERRORS as error:
                return decode_in_parts(body, error)
        except DECODE_ERRORS:
            log.exception("a message of the engine's process cannot be decoded")
            return None

    def deliver(self, message: Step | PackedStep | Answer) -> None:
        if isinstance(message, Answer):
            future = self.answers.get(message.id)
            if future is not None and not future.done():
                future.set_result(message)
        elif isinstance(message, PackedStep):
            self._deliver_packed(message)
        else:
            for progress in message.progress:
                self._put(progress)

    def _deliver_packed(self, step: PackedStep) -> None:
        forwarded = self.forwarded
        for packed in step.progress:
            head = decode_progress_head(packed)
            if head.ended:
                self.unfinished.pop(head.id, None)
            sink = forwarded.get(head.id)
            if sink is not None:
                sink.put(packed)
                if head.ended:
                    del forwarded[head.id]
            elif head.id in self.streams:
                progress = decode_progress(packed)
                self._put(progress)
                if progress.ended and not head.ended:
                    self._send_cancel(head.id)

    def _put(self, progress: GenerationProgress) -> None:
        if progress.ended:
            self.unfinished.pop(progress.id, None)
        stream = self.streams.get(progress.id)
        if stream is None:
            return
        stream.put(progress.events)
        if progress.ended:
            del self.streams[progress.id]
            if progress.failure is None:
                stream.end()
            else:
                stream.fail(progress.failure.error())

    async def kill(self) -> None:
        """Kill the process and every process that it started, and wait for its end."""
        if hasattr(os, "killpg"):
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                # The group has ended already; macOS raises PermissionError for a zombie.
                pass
        elif self.process.returncode is None:
            self.process.kill()
        await self.process.wait()

    def fail_pending(self) -> None:
        """Fail every pending request with `exit_error`."""
        self._is_dead = True
        for stream in self.streams.values():
            stream.fail(self.exit_error.error())
        self.streams.clear()
        for key, sink in self.forwarded.items():
            sink.put(pack(GenerationProgress(key, ended=True, failure=self.exit_error)))
        self.forwarded.clear()
        for future in self.answers.values():
            if not future.done():
                future.set_exception(self.exit_error.error())
