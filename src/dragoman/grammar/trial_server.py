"""The process that tries grammars: it forks one process per trial.

    socket  := model, then ready back, then commands*       when it closes, this process ends
    command := ("F" | "L") number, with a socket for the trial | "K" number           fork, fork with low priority, kill
    trial's socket := started job outcome       started: one byte; job and outcome: MessagePack with a length prefix

A trial does everything that a caller's schema, expression or grammar can make slow or dangerous: it builds the grammar,
compiles it, computes the first mask and follows a few tokens. A crash or too much time or memory ends only the trial.
The client kills every trial, even one that has ended: this also reaps its process.

Rules
1. The vocabulary is read once and shared with the forked processes. A trial costs only a fork.
2. The kernel limits the CPU time, memory and stack of a trial, in native code too.
3. The stack of a trial is smaller than that of any thread: a grammar that passes does not overflow in the engine.
4. Only forked processes read a caller's input. This process has one thread, so that forking is safe.
5. A trial of a caller who has used much time for trials has a lower priority than the engine: expensive schemas must
   not slow down decoding. The other trials have a normal one, so that they end in time on a busy machine.
"""

import contextlib
import gc
import os
import pickle
import random
import resource
import signal
import socket
import struct
import sys
import time
import traceback
from pathlib import Path
from typing import Never

import msgspec
import numpy as np
from llguidance import LLTokenizer

from dragoman.core.errors import DragomanError
from dragoman.core.features import Feature
from dragoman.core.request import GenerationRequest, JsonObject
from dragoman.grammar.masks import GrammarCache, build_tokenizer
from dragoman.grammar.reply_grammar import Beginning, GrammarModel, ReplyGrammar, build_reply_grammar

LENGTH = struct.Struct("<I")
COMMAND = struct.Struct("<cQ")
FORK, FORK_LOW, KILL = b"F", b"L", b"K"
READY = b"!"
STARTED = b"+"

WALK_TOKENS = 4
"""Tokens to follow after the first mask."""
CPU_SECONDS = 1.5
MEMORY_BYTES = 256 * 1024 * 1024
"""Address space of a trial in addition to that of this process."""
STACK_BYTES = 1024 * 1024
NICENESS = 10


class TrialModel(msgspec.Struct, frozen=True):
    """The parts of a model that a trial needs."""

    pieces: tuple[bytes, ...]
    control: frozenset[int]
    model: GrammarModel

    def build_tokenizer(self) -> LLTokenizer:
        """Return a tokenizer that takes the longest match in the vocabulary. The model's own tokenizer is in another
        process."""
        built: list[LLTokenizer] = []

        def tokenize(text: str) -> list[int]:
            return built[0].greedy_tokenize(text) if built else []

        built.append(build_tokenizer(self.pieces, self.control, self.model.ends, tokenize))
        return built[0]


class TrialJob(msgspec.Struct, frozen=True, array_like=True):
    """The parts of a request that determine its grammar: equal jobs have equal grammars."""

    request: GenerationRequest
    thinks: bool
    begins: Beginning

    @classmethod
    def of(cls, request: GenerationRequest, *, thinks: bool, begins: Beginning) -> "TrialJob":
        bare = GenerationRequest(
            constraint=request.constraint,
            tools=tuple(msgspec.structs.replace(tool, description="") for tool in request.tools),
            tool_choice=request.tool_choice,
            asked=tuple(asked for asked in request.asked if asked.feature in (Feature.CONSTRAINT, Feature.TOOLS)),
        )
        return cls(bare, thinks, begins)


class TrialOutcome(msgspec.Struct, frozen=True):
    """`shape` is None if the reply is unrestricted. `memory` is the size of the compiled grammar in bytes, `failure`
    the class, message and param of the caller's mistake, `bug` the traceback of an exception that no input should
    cause. `seconds` is the CPU time of the trial."""

    shape: ReplyGrammar | None = None
    memory: int = 0
    seconds: float = 0.0
    failure: tuple[str, str, str | None] | None = None
    bug: str | None = None


def run_trial(job: TrialJob, model: GrammarModel, tokenizer: LLTokenizer) -> TrialOutcome:
    """Build, compile and probe the grammar of one job. Raises DragomanError if the request is invalid."""
    grammar = build_reply_grammar(job.request, msgspec.structs.replace(model, thinks=job.thinks), begins=job.begins)
    if grammar is None:
        return TrialOutcome()
    before = resident_bytes()
    guide = GrammarCache(tokenizer).create_guide(grammar.grammar, grammar.param)
    memory = max(resident_bytes() - before, 0)
    rng = random.Random(grammar.grammar)
    for _ in range(WALK_TOKENS):
        allowed = np.flatnonzero(guide.allowed_tokens(tokenizer.vocab_size))
        if guide.is_complete or not len(allowed):
            break
        guide.advance(int(allowed[rng.randrange(len(allowed))]))
    return TrialOutcome(grammar, memory)


def resident_bytes() -> int:
    """Return the resident memory of this process; on other systems than Linux its peak."""
    if sys.platform == "linux":
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class TrialServer:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        received: TrialModel = pickle.loads(receive(control))  # noqa: S301 (from the process that started this one)
        self._model, self._tokenizer = received.model, received.build_tokenizer()
        # The first trial is the slowest. It runs before the first fork.
        warm_up = TrialJob(GenerationRequest(constraint=JsonObject()), thinks=False, begins="reply")
        run_trial(warm_up, self._model, self._tokenizer)
        gc.freeze()
        self._children: dict[int, int] = {}
        """Process ids by the numbers of trials."""

    def serve(self) -> None:
        """Run commands until the client closes the socket."""
        self._control.sendall(READY)
        while True:
            message, sockets, _, _ = socket.recv_fds(self._control, COMMAND.size, 1)
            if not message:
                break
            if len(message) < COMMAND.size:
                message += read_exactly(self._control, COMMAND.size - len(message))
            kind, number = COMMAND.unpack(message)
            if kind in (FORK, FORK_LOW):
                self._fork(number, sockets[0], has_low_priority=kind == FORK_LOW)
            elif kind == KILL and number in self._children:
                self._kill(number)
        for number in tuple(self._children):
            self._kill(number)

    def _fork(self, number: int, channel: int, has_low_priority: bool) -> None:
        try:
            child = os.fork()
        except OSError:
            # The client reads EOF instead of `STARTED`.
            os.close(channel)
            return
        if child == 0:
            self._run_trial(socket.socket(fileno=channel), has_low_priority)
        os.close(channel)
        self._children[number] = child

    def _run_trial(self, channel: socket.socket, has_low_priority: bool) -> Never:
        """Run one trial in a forked process."""
        # It ends without an outcome at a limit, or if the engine has closed the socket.
        with contextlib.suppress(MemoryError, RecursionError, OSError, EOFError):
            self._control.close()
            set_limits()
            if has_low_priority:
                lower_priority()
            channel.sendall(STARTED)
            outcome = self._outcome(receive(channel))
            body = msgspec.msgpack.encode(msgspec.structs.replace(outcome, seconds=time.process_time()))
            channel.sendall(LENGTH.pack(len(body)) + body)
        os._exit(0)

    def _outcome(self, job: bytes) -> TrialOutcome:
        try:
            return run_trial(msgspec.msgpack.decode(job, type=TrialJob), self._model, self._tokenizer)
        except DragomanError as error:
            return TrialOutcome(failure=(type(error).__name__, error.message, error.param))
        except (MemoryError, RecursionError):
            raise
        except Exception:  # noqa: BLE001 (the engine logs it)
            return TrialOutcome(bug=traceback.format_exc())

    def _kill(self, number: int) -> None:
        child = self._children.pop(number)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


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


def receive(channel: socket.socket) -> bytes:
    (length,) = LENGTH.unpack(read_exactly(channel, LENGTH.size))
    return read_exactly(channel, length)


def read_exactly(channel: socket.socket, size: int) -> bytes:
    data = channel.recv(size, socket.MSG_WAITALL)
    if len(data) < size:
        raise EOFError
    return data


def lower_priority() -> None:
    os.nice(NICENESS)
    os.setsid()
    # Linux divides the processor between sessions first, and then between the processes of each.
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(NICENESS))


def main(control: int) -> Never:
    """Run the server with this file descriptor of its socket."""
    # EOFError: the engine's process has ended.
    with contextlib.suppress(EOFError):
        TrialServer(socket.socket(fileno=control)).serve()
    os._exit(0)
