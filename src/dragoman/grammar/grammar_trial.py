"""Runs the trial of one grammar, and defines the messages between the engine and the trial process.

    socket := started job outcome       started: one byte; job and outcome: MessagePack with a length prefix

A trial does everything that a caller's schema, expression or grammar can make slow or dangerous: it builds the grammar,
compiles it, computes the first mask and follows a few tokens. It runs in a separate process (`trial_server`), so that
a crash or too much time or memory ends only that process.
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
from dragoman.grammar.masks import GrammarCache, build_tokenizer
from dragoman.grammar.reply_grammar import GrammarModel, ReplyGrammar, build_reply_grammar

LENGTH = struct.Struct("<I")
STARTED = b"+"
WALK_TOKENS = 4
"""Tokens to follow after the first mask."""


class TrialJob(msgspec.Struct, frozen=True, array_like=True):
    """The parts of a request that determine its grammar: equal jobs have equal grammars. `opened`: the prompt ends
    inside reasoning."""

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

    shape: ReplyGrammar | None = None
    memory: int = 0
    failure: TrialFailure | None = None
    bug: str | None = None


class TrialModel(msgspec.Struct, frozen=True):
    """The parts of a model that a trial needs."""

    pieces: tuple[bytes, ...]
    control: frozenset[int]
    speaker: GrammarModel

    def tokenizer(self) -> LLTokenizer:
        """Return a tokenizer that takes the longest match in the vocabulary. The model's own tokenizer is in another
        process."""
        built: list[LLTokenizer] = []

        def tokenize(text: str) -> list[int]:
            return built[0].greedy_tokenize(text) if built else []

        built.append(build_tokenizer(self.pieces, self.control, self.speaker.ends, tokenize))
        return built[0]


def run_trial(job: TrialJob, speaker: GrammarModel, tokenizer: LLTokenizer) -> TrialOutcome:
    """Build, compile and probe the grammar of one job. Raises DragomanError if the request is invalid."""
    grammar = build_reply_grammar(job.request, msgspec.structs.replace(speaker, thinks=job.thinks), opened=job.opened)
    if grammar is None:
        return TrialOutcome()
    before = resident_bytes()
    guide = GrammarCache(tokenizer).create_guide(grammar.grammar, grammar.param)
    memory = max(resident_bytes() - before, 0)
    rng = random.Random(grammar.grammar)
    for _ in range(WALK_TOKENS):
        allowed = np.flatnonzero(guide.allowed(tokenizer.vocab_size))
        if guide.complete or not len(allowed):
            break
        guide.take(int(allowed[rng.randrange(len(allowed))]))
    return TrialOutcome(grammar, memory)


def resident_bytes() -> int:
    """Return the resident memory of this process; on other systems than Linux its peak."""
    if sys.platform == "linux":
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
