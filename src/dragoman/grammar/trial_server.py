"""The process that forks one process per grammar trial: `python -m dragoman.grammar.trial_server FD`.

    FD := model, then ready back, then commands*         a socket; when it closes, this process ends
    command := "F" number, with a socket for the trial | "L" number | "K" number      fork, lower the priority, kill

The client kills every trial, even one that has ended: this also reaps its process.

Rules
1. The vocabulary is read once and shared with the forked processes. A trial costs only a fork.
2. The kernel limits the CPU time, memory and stack of a trial, in native code too.
3. The stack of a trial is smaller than that of any thread: a grammar that passes does not overflow in the engine.
4. Only forked processes read a caller's input. This process has one thread, so that forking is safe.
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

from dragoman.core.errors import DragomanError
from dragoman.core.request import GenerationRequest, JsonObject
from dragoman.grammar.grammar_trial import LENGTH, STARTED, TrialFailure, TrialJob, TrialModel, TrialOutcome, run_trial

COMMAND = struct.Struct("<cQ")
FORK, LOWER, KILL = b"F", b"L", b"K"
READY = b"!"

CPU_SECONDS = 1.5
MEMORY_BYTES = 256 * 1024 * 1024
"""Address space of a trial in addition to that of this process."""
STACK_BYTES = 1024 * 1024
NICENESS = 5
"""Priority of a slow trial, so that decoding goes first."""


class TrialServer:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        model: TrialModel = pickle.loads(receive(control))  # noqa: S301 (from the process that started this one)
        self._model = model.speaker, model.tokenizer()
        # The first trial is the slowest. It runs before the first fork.
        run_trial(TrialJob(GenerationRequest(constraint=JsonObject()), thinks=False, opened=False), *self._model)
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
            # The client reads EOF instead of `STARTED`.
            os.close(channel)
            return
        if child == 0:
            self._run_trial(socket.socket(fileno=channel))
        os.close(channel)
        self._children[number] = child

    def _run_trial(self, channel: socket.socket) -> Never:
        """Run one trial in a forked process."""
        # It ends without an outcome at a limit, or if the engine has closed the socket.
        with contextlib.suppress(MemoryError, RecursionError, OSError, EOFError):
            self._control.close()
            set_limits()
            channel.sendall(STARTED)
            send(channel, msgspec.msgpack.encode(self._outcome(receive(channel))))
        os._exit(0)

    def _outcome(self, job: bytes) -> TrialOutcome:
        try:
            return run_trial(msgspec.msgpack.decode(job, type=TrialJob), *self._model)
        except DragomanError as error:
            return TrialOutcome(failure=TrialFailure(type(error).__name__, error.message, error.param))
        except (MemoryError, RecursionError):
            raise
        except Exception:  # noqa: BLE001 (the engine logs it)
            return TrialOutcome(bug=traceback.format_exc())

    def _kill(self, child: int) -> None:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

    def _end(self) -> Never:
        for child in self._children.values():
            self._kill(child)
        os._exit(0)


def set_limits() -> None:
    """Limit memory, CPU time and stack of this process. At a limit it ends without output or a core file."""
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
