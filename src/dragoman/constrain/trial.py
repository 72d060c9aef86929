"""The trial of one grammar, and what goes over the socket between an engine and the process that runs the trial.

    socket := started job outcome       started: one byte; job and outcome: MessagePack, each behind its length

A trial does everything that a caller's schema, expression or grammar can make slow or dangerous: it writes the grammar,
compiles it, computes the first mask and follows a few tokens. It runs in a process of its own (`trial_server`), so that
a crash, too much time or too much memory ends that process and nothing else.
"""

import random
import struct

import msgspec
import numpy as np
from llguidance import LLTokenizer

from dragoman.constrain.compiled import Grammars, resident_bytes, vocabulary
from dragoman.constrain.grammar import Shape, Speaker, shape
from dragoman.conversation import GenerationRequest

LENGTH = struct.Struct("<I")
STARTED = b"+"
WALK_TOKENS = 4
"""Tokens that are followed after the first mask."""


class Job(msgspec.Struct, frozen=True, array_like=True):
    """What decides a grammar: equal jobs have equal grammars. `opened`: the prompt ends inside a thought."""

    request: GenerationRequest
    thinks: bool
    opened: bool

    @classmethod
    def of(cls, request: GenerationRequest, *, thinks: bool, opened: bool) -> "Job":
        bare = GenerationRequest(
            constraint=request.constraint,
            tools=tuple(msgspec.structs.replace(tool, description="") for tool in request.tools),
            tool_choice=request.tool_choice,
            asked=tuple(asked for asked in request.asked if asked.feature in ("constraint", "tools")),
        )
        return cls(bare, thinks, opened)


class Mistake(msgspec.Struct, frozen=True):
    """An error on its way out of a trial; `name` is its class."""

    name: str
    message: str
    param: str | None


class Outcome(msgspec.Struct, frozen=True):
    """`memory` is what the compiled grammar takes, in bytes; `bug` an exception that no input should cause."""

    shape: Shape | None = None
    memory: int = 0
    mistake: Mistake | None = None
    bug: str | None = None


class Subject(msgspec.Struct, frozen=True):
    """The model, as far as a trial has to know it."""

    pieces: tuple[bytes, ...]
    control: frozenset[int]
    speaker: Speaker

    def tokenizer(self) -> LLTokenizer:
        """The model's own tokenizer is in another process. The longest match in the vocabulary is close enough."""
        made: list[LLTokenizer] = []

        def tokenize(text: str) -> list[int]:
            return made[0].greedy_tokenize(text) if made else []

        made.append(vocabulary(self.pieces, self.control, self.speaker.ends, tokenize))
        return made[0]


def attempt(job: Job, speaker: Speaker, tokenizer: LLTokenizer) -> Outcome:
    """Raises what is wrong with the request."""
    found = shape(job.request, msgspec.structs.replace(speaker, thinks=job.thinks), opened=job.opened)
    if found is None:
        return Outcome()
    before = resident_bytes()
    guide = Grammars(tokenizer).guide(found.grammar, found.param)
    memory = max(resident_bytes() - before, 0)
    chance = random.Random(found.grammar)
    for _ in range(WALK_TOKENS):
        allowed = np.flatnonzero(guide.allowed(tokenizer.vocab_size))
        if guide.complete or not len(allowed):
            break
        guide.take(int(allowed[chance.randrange(len(allowed))]))
    return Outcome(found, memory)
