"""The process that forks one process per trial: `python -m dragoman.constrain.trial_server FD`.

    FD := subject, then ready back, then commands*       a socket; its end is the end of this process
    command := "F" number, with a socket for the trial | "L" number | "K" number      fork, lower the priority, kill

Every trial that was forked is killed, whether it has ended or not: only then its process id is free.

Rules
1. The vocabulary is read once; a forked process shares it. So a trial costs a fork, and ending one costs nothing.
2. A trial has a limit of processor time, of memory and of stack. The kernel enforces them, in native code too.
3. The stack of a trial is smaller than that of any thread: what passes here does not overflow in the engine.
4. This process never looks at a caller's input. It has one thread, so that forking is safe.
"""

import contextlib
import gc
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import traceback
from pathlib import Path
from typing import Never

import msgspec

from dragoman.constrain.trial import LENGTH, STARTED, Job, Mistake, Outcome, Subject, attempt
from dragoman.conversation import GenerationRequest, JsonObject
from dragoman.errors import DragomanError

COMMAND = struct.Struct("<cQ")
FORK, LOWER, KILL = b"F", b"L", b"K"
READY = b"!"

CPU_SECONDS = 1.5
MEMORY_BYTES = 256 * 1024 * 1024
"""Address space of a trial beyond what this process has."""
STACK_BYTES = 1024 * 1024
NICENESS = 5
"""Of a trial that takes long: decoding goes first."""


class TrialServer:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        subject: Subject = pickle.loads(receive(control))  # noqa: S301 (from the process that started this one)
        self._model = subject.speaker, subject.tokenizer()
        # What is done for the first time takes longest: it is done before the first fork.
        attempt(Job(GenerationRequest(constraint=JsonObject()), thinks=False, opened=False), *self._model)
        gc.freeze()
        self._children: dict[int, int] = {}
        """Process ids by the numbers of trials."""

    def serve(self) -> Never:
        self._control.sendall(READY)
        while True:
            message, sockets, _, _ = socket.recv_fds(self._control, COMMAND.size, 1)
            if not message:
                self._end()
            if len(message) < COMMAND.size:
                message += read_exactly(self._control, COMMAND.size - len(message))
            kind, number = COMMAND.unpack(message)
            if kind == FORK:
                self._fork(number, sockets[0])
            elif kind == LOWER and number in self._children:
                os.setpriority(os.PRIO_PROCESS, self._children[number], NICENESS)
            elif kind == KILL and number in self._children:
                self._kill(self._children.pop(number))

    def _fork(self, number: int, channel: int) -> None:
        try:
            child = os.fork()
        except OSError:
            # The engine sees the end of the socket before the trial has started.
            os.close(channel)
            return
        if child == 0:
            self._run(socket.socket(fileno=channel))
        os.close(channel)
        self._children[number] = child

    def _run(self, channel: socket.socket) -> Never:
        """The whole life of a forked process."""
        # At the limits, or where the engine does not listen any more, it ends without an outcome.
        with contextlib.suppress(MemoryError, RecursionError, OSError, EOFError):
            self._control.close()
            limit()
            channel.sendall(STARTED)
            send(channel, msgspec.msgpack.encode(self._outcome(receive(channel))))
        os._exit(0)

    def _outcome(self, job: bytes) -> Outcome:
        try:
            return attempt(msgspec.msgpack.decode(job, type=Job), *self._model)
        except DragomanError as error:
            return Outcome(mistake=Mistake(type(error).__name__, error.message, error.param))
        except (MemoryError, RecursionError):
            raise
        except Exception:  # noqa: BLE001 (the engine logs it)
            return Outcome(bug=traceback.format_exc())

    def _kill(self, child: int) -> None:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

    def _end(self) -> Never:
        for child in self._children.values():
            self._kill(child)
        os._exit(0)


def limit() -> None:
    """What native code allocates, computes and recurses from here on is bounded; a failure leaves no trace."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, STACK_BYTES))
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        space = pages * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (space, space))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)


def send(channel: socket.socket, body: bytes) -> None:
    channel.sendall(LENGTH.pack(len(body)) + body)


def receive(channel: socket.socket) -> bytes:
    (length,) = LENGTH.unpack(read_exactly(channel, LENGTH.size))
    return read_exactly(channel, length)


def read_exactly(channel: socket.socket, size: int) -> bytes:
    parts: list[bytes] = []
    while size:
        part = channel.recv(min(size, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    try:
        TrialServer(control).serve()
    except EOFError:
        # The engine's process has ended.
        os._exit(0)


if __name__ == "__main__":
    main()
