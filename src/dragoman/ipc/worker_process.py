"""One child process as its parent sees it: what goes down the pipe, and whom what comes up is for.

Rules
1. What a child says of a generation goes to whoever began it: to a mailbox here, or, as it came, to a follower that
   passes it on to another process.
2. Whoever still waits when it dies is told its last words.
3. What of it cannot be read fails the request that it belongs to. Only where nobody knows whose that is, it is the
   child that nobody can talk to any more.
4. It is busy as long as something is expected of it: a reply that it has told to its end is none of its work any more.
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

from dragoman.core.errors import (
    DECODE_ERRORS,
    ENCODE_ERRORS,
    BadRequest,
    DragomanError,
    EngineDied,
)
from dragoman.core.event_queue import Mailbox
from dragoman.core.request import GenerationRequest
from dragoman.ipc.fatal_requests import WorkerRequest
from dragoman.ipc.worker_messages import (
    HEADER,
    KEY_BITS,
    OWN_NUMBER,
    Answer,
    Cancel,
    Failure,
    Generate,
    Head,
    PackedStep,
    PassedGenerate,
    Progress,
    Question,
    Step,
    ToChild,
    ToParent,
    ToPasser,
    decode_in_parts,
    decode_to_parent,
    decode_to_passer,
    encode,
    head_of,
    pack,
    readable,
)

log = logging.getLogger("dragoman.ipc")

UNSENDABLE = "the request has an integer of more than 64 bits or half a character: it cannot be passed to the engine"


class Follower(Protocol):
    """Whoever follows generations in another process: what becomes of them is passed on as it came."""

    def put(self, progress: msgspec.Raw) -> None: ...


class ChildProcess:
    """One running child process and the requests it has."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.process = process
        self._input = process.stdin
        self._output = process.stdout
        self._keys = itertools.count(OWN_NUMBER << KEY_BITS)
        self._buried = False
        self.streams: dict[int, Mailbox] = {}
        self.followed: dict[int, Follower] = {}
        """Streams that are passed on, each until its end or until its follower lets go of it."""
        self.answers: dict[int, asyncio.Future[Answer]] = {}
        self.asked: dict[int, WorkerRequest] = {}
        """Requests whose end the child has not reported, even if their reader has gone."""
        self.heard = time.monotonic()
        self.last_words = Failure.of(EngineDied("the engine's process died; the request can be sent again"))

    @property
    def busy(self) -> bool:
        return bool(self.streams or self.answers or self.followed)

    def send(self, message: ToChild | PassedGenerate) -> None:
        encoded = encode(message)
        if self._buried or self._input.is_closing():
            raise self.last_words.error()
        try:
            self._input.write(encoded)
        except (OSError, RuntimeError) as error:
            # Which of them a pipe without a reader raises depends on the event loop.
            raise self.last_words.error() from error

    def open(self, request: GenerationRequest) -> tuple[int, Mailbox]:
        key = self._begin(lambda key: Generate(key, request))
        self.streams[key] = stream = Mailbox()
        self.asked[key] = request
        return key, stream

    def open_for(self, follower: Follower, key: int, request: msgspec.Raw) -> None:
        if not self.busy:
            self.heard = time.monotonic()
        self.send(PassedGenerate(key, request))
        self.followed[key] = follower
        self.asked[key] = request

    def let_go(self, key: int, ended: bool) -> None:
        """Of a stream that was passed on. What still comes of it is for nobody."""
        if self.followed.pop(key, None) is not None and not ended:
            self._stop(key)

    async def ask(self, question: Callable[[int], Question]) -> Answer:
        key = self._begin(question)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.answers[key] = future
        self.asked[key] = question(key)
        try:
            answer = await future
        except asyncio.CancelledError:
            self._stop(key)
            raise
        finally:
            del self.answers[key]
            if not self._buried:
                del self.asked[key]
        if answer.failure is not None:
            raise answer.failure.error()
        return answer

    def _begin(self, message: Callable[[int], ToChild]) -> int:
        """Send what the message for a new key is, and give the key."""
        key = next(self._keys)
        if not self.busy:
            self.heard = time.monotonic()
        try:
            self.send(message(key))
        except ENCODE_ERRORS as error:
            raise BadRequest(UNSENDABLE) from error
        return key

    def cancel(self, key: int) -> None:
        """Nobody wants the rest of a generation. One that has ended may be cancelled too."""
        if key in self.streams:
            self._stop(key)

    def _stop(self, key: int) -> None:
        try:
            self.send(Cancel(key))
        except DragomanError:
            # It has died, and works on nothing any more.
            pass

    async def read(self) -> ToParent | ToPasser | None:
        """The next message; None where nothing more can be understood."""
        try:
            (length,) = HEADER.unpack(await self._output.readexactly(HEADER.size))
            body = await self._output.readexactly(length)
        except asyncio.IncompleteReadError:
            return None
        self.heard = time.monotonic()
        try:
            return self._decoded(body)
        except DECODE_ERRORS:
            log.exception("a message of the engine's process could not be read")
            return None

    def _decoded(self, body: bytes) -> ToParent | ToPasser:
        try:
            return decode_to_passer(body) if self.followed else decode_to_parent(body)
        except DECODE_ERRORS as error:
            return decode_in_parts(body, error)

    def deliver(self, message: Step | PackedStep | Answer) -> None:
        if isinstance(message, Answer):
            future = self.answers.get(message.id)
            if future is not None and not future.done():
                future.set_result(message)
        elif isinstance(message, PackedStep):
            self._pass_on(message)
        else:
            for progress in message.progress:
                self._put(progress)

    def _pass_on(self, step: PackedStep) -> None:
        followed = self.followed
        for packed in step.progress:
            head = head_of(packed)
            if head.ended:
                self.asked.pop(head.id, None)
            follower = followed.get(head.id)
            if follower is None:
                self._read_part(head, packed)
                continue
            follower.put(packed)
            if head.ended:
                # However long its reader takes to read the rest, nothing more is expected of the child.
                del followed[head.id]

    def _read_part(self, head: Head, packed: msgspec.Raw) -> None:
        if head.id not in self.streams:
            # Of one that was passed on, to somebody who has let go of it.
            return
        progress = readable(packed)
        self._put(progress)
        if progress.ended and not head.ended:
            self._stop(head.id)

    def _put(self, progress: Progress) -> None:
        if progress.ended:
            self.asked.pop(progress.id, None)
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
        """End the process and all that it has started, and wait for its end."""
        if hasattr(os, "killpg"):
            self._kill_group()
        elif self.process.returncode is None:
            self.process.kill()
        await self.process.wait()

    def _kill_group(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            # They ended by themselves; a Mac forbids to kill what has ended and not been waited for.
            pass

    def bury(self) -> None:
        """Tell everybody who still waits."""
        self._buried = True
        for stream in self.streams.values():
            stream.fail(self.last_words.error())
        self.streams.clear()
        for key, follower in self.followed.items():
            follower.put(pack(Progress(key, ended=True, failure=self.last_words)))
        self.followed.clear()
        for future in self.answers.values():
            if not future.done():
                future.set_exception(self.last_words.error())
