"""The trial of one grammar, and the messages between the engine and the process that runs the trial.

    socket := started job outcome       started: one byte; job and outcome: MessagePack with a length prefix

A trial does everything that a caller's schema, expression or grammar can make slow or dangerous: it writes the grammar,
compiles it, computes the first mask and follows a few tokens. It runs in a separate process (`trial_server`), so that
a crash, too much time or too much memory ends that process and nothing else.
"""

import random
import resource
import struct
import sys
from pathlib import Path

import msgspec
import numpy as np
from llguidance import LLTokenizer

from dragoman.core.request import GenerationRequest
from dragoman.grammar.masks import Grammars, vocabulary
from dragoman.grammar.reply_grammar import Shape, Speaker, shape

LENGTH = struct.Struct("<I")
STARTED = b"+"
WALK_TOKENS = 4
"""Tokens that are followed after the first mask."""


class TrialJob(msgspec.Struct, frozen=True, array_like=True):
    """The parts of a request that determine its grammar: equal jobs have equal grammars. `opened`: the prompt ends
    inside a thought."""

    request: GenerationRequest
    thinks: bool
    opened: bool

    @classmethod
    def of(cls, request: GenerationRequest, *, thinks: bool, opened: bool) -> "TrialJob":
        bare = GenerationRequest(
            constraint=request.constraint,
            tools=tuple(msgspec.structs.replace(tool, description="") for tool in request.tools),
            tool_choice=request.tool_choice,
            asked=tuple(asked for asked in request.asked if asked.feature in ("constraint", "tools")),
        )
        return cls(bare, thinks, opened)


class TrialFailure(msgspec.Struct, frozen=True):
    """An error that a trial raised; `name` is its class."""

    name: str
    message: str
    param: str | None


class TrialOutcome(msgspec.Struct, frozen=True):
    """`memory` is the size of the compiled grammar in bytes, `failure` the caller's mistake, `bug` the traceback of an
    exception that no input should cause."""

    shape: Shape | None = None
    memory: int = 0
    failure: TrialFailure | None = None
    bug: str | None = None


class TrialModel(msgspec.Struct, frozen=True):
    """The parts of a model that a trial needs."""

    pieces: tuple[bytes, ...]
    control: frozenset[int]
    speaker: Speaker

    def tokenizer(self) -> LLTokenizer:
        """A tokenizer that takes the longest match in the vocabulary. The model's own one is in another process."""
        made: list[LLTokenizer] = []

        def tokenize(text: str) -> list[int]:
            return made[0].greedy_tokenize(text) if made else []

        made.append(vocabulary(self.pieces, self.control, self.speaker.ends, tokenize))
        return made[0]


def run_trial(job: TrialJob, speaker: Speaker, tokenizer: LLTokenizer) -> TrialOutcome:
    """Write, compile and probe the grammar of one job. Raises a DragomanError if the request is wrong."""
    found = shape(job.request, msgspec.structs.replace(speaker, thinks=job.thinks), opened=job.opened)
    if found is None:
        return TrialOutcome()
    before = resident_bytes()
    guide = Grammars(tokenizer).guide(found.grammar, found.param)
    memory = max(resident_bytes() - before, 0)
    rng = random.Random(found.grammar)
    for _ in range(WALK_TOKENS):
        allowed = np.flatnonzero(guide.allowed(tokenizer.vocab_size))
        if guide.complete or not len(allowed):
            break
        guide.take(int(allowed[rng.randrange(len(allowed))]))
    return TrialOutcome(found, memory)


def resident_bytes() -> int:
    """The resident memory of this process. Outside Linux, its peak."""
    if sys.platform == "linux":
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
