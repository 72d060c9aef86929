"""From a request to events: what is asked is checked, the engine runs, the stages shape what it says.

    request -> check -> one choice at a time or several side by side -> engine -> limit, split, stop, tally -> take

Rules
1. The only list of stages is here.
2. Every choice is a generation of its own, with a slot of its own; an engine sees one prompt and one choice.
3. Cancelling `generate` closes the engine's iterators, at once and for all choices.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Protocol

import msgspec

from dragoman.core.engine import Engine
from dragoman.core.errors import BadRequest, ContextTooLong, NotSupported, UnsupportedParameter, quote
from dragoman.core.events import Event, Finished, Started, Usage
from dragoman.core.request import Asked, GenerationRequest, Logprobs
from dragoman.formats import FORMATS
from dragoman.formats.json import JSON
from dragoman.formats.plain import PLAIN
from dragoman.formats.syntax import ModelFormat
from dragoman.pipeline import Stage
from dragoman.pipeline.count import Tally
from dragoman.pipeline.event_stream import call, tell
from dragoman.pipeline.limit import Limit
from dragoman.pipeline.split import Split
from dragoman.pipeline.stop import Stop

Running = Callable[[int], None]
"""Is told how many choices have a slot, whenever one gets or gives back its own."""

Take = Callable[[int, Sequence[Event]], Awaitable[None] | None]
"""Is handed the index of a choice and events of it that were ready together; may ask to be waited for."""

OURS = frozenset({"stop", "choices", "best_of"})
"""Features that work with every engine because the server provides them."""

ESSENTIAL = frozenset(
    {
        *("chat", "completion", "token_prompt", "infill", "images", "audio", "files"),
        *("tools", "custom_tools", "constraint", "structural_tag"),
    }
)
"""Features without which a reply would not be an answer to what was asked."""


STAGED = frozenset({"max_tokens", "usage"})
"""Features that decide which stages there is need for."""


class Turns(Protocol):
    """The slots of a request that has its first."""

    async def another(self) -> None: ...

    def give_back(self) -> None: ...


def check(model: str, wanted: Sequence[Asked], supports: frozenset[str], strict: bool) -> tuple[str, ...]:
    """The parameters that will be ignored; an error where ignoring them would not be honest."""
    ignored = []
    for asked in wanted:
        if asked.feature in OURS or asked.feature in supports:
            continue
        if asked.feature in ESSENTIAL:
            raise NotSupported(f"model '{model}' does not support '{asked.param}'", param=asked.param)
        if strict:
            raise cannot_honour(model, asked.param)
        ignored.append(asked.param)
    return tuple(ignored)


def cannot_honour(model: str, param: str) -> UnsupportedParameter:
    words = f"model '{model}' cannot honour {quote(param)}; leave it out, or ask without strict mode"
    return UnsupportedParameter(words, param=param)


def check_limits(request: GenerationRequest, choices: int, stop_strings: int) -> None:
    wanted = max(request.choices, request.best_of) * max(1, len(request.prompts))
    if wanted > choices:
        param = _param(request, "choices", "best_of", "completion")
        raise BadRequest(f"at most {choices} choices can be asked for at once, not {wanted}", param=param)
    if len(request.stop) > stop_strings:
        raise BadRequest(f"at most {stop_strings} stop strings are allowed", param=_param(request, "stop"))


def _param(request: GenerationRequest, *features: str) -> str | None:
    """The path of the field that asked for the first of the features that was asked for."""
    params = {asked.feature: asked.param for asked in request.asked}
    return next((params[feature] for feature in features if feature in params), None)


def generate(
    engine: Engine, request: GenerationRequest, slots: Turns, take: Take, running: Running | None = None
) -> Coroutine[None, None, None]:
    """Run all choices to their ends. The caller holds the first slot; further choices wait for their own.

    Who has a slot may be expected to say something, who waits for one may not: `running` tells the difference.
    """
    requests = _single(request)
    if len(requests) == 1:
        return _choice(engine, requests[0], 0, take)
    per_prompt = len(requests) // max(1, len(request.prompts))
    return _side_by_side(engine, requests, per_prompt, slots, take, running or (lambda count: None))


def _single(request: GenerationRequest) -> list[GenerationRequest]:
    """One request per choice, those of the first prompt first. Choices of a seeded request have seeds of their own."""
    count = max(request.choices, request.best_of)
    if count == 1 and len(request.prompts) <= 1:
        return [request]
    prompts: list[tuple[str | tuple[int, ...], ...]] = [(prompt,) for prompt in request.prompts] or [()]
    logprobs = request.logprobs if request.best_of == 1 else request.logprobs or Logprobs()
    sampling, seed = request.sampling, request.sampling.seed
    return [
        msgspec.structs.replace(
            request,
            prompts=prompt,
            choices=1,
            best_of=1,
            logprobs=logprobs,
            sampling=sampling if seed is None else msgspec.structs.replace(sampling, seed=seed + choice),
        )
        for prompt in prompts
        for choice in range(count)
    ]


async def _choice(engine: Engine, request: GenerationRequest, index: int, take: Take) -> None:
    stages: list[Stage] = []

    def listener(ready: Sequence[Event]) -> Awaitable[None] | None:
        nonlocal stages
        if type(ready[0]) is Started:
            # Of a reply that begins again, no stage remembers what it saw before.
            stages = _stages(engine, request)
        events = ready
        for stage in stages:
            events = stage(events)
        if not events:
            return None
        pause = take(index, events)
        if type(events[-1]) is not Finished:
            return pause
        if pause is not None:
            return _ended(pause)
        raise _Ended

    # Where a stage ends the reply the engine would go on, and nobody needs to hear how it ends.
    with suppress(_Ended):
        await tell(engine, request, listener)


class _Ended(Exception):
    """The reply is complete."""


async def _ended(pause: Awaitable[None]) -> None:
    await pause
    raise _Ended


def _stages(engine: Engine, request: GenerationRequest) -> list[Stage]:
    supports = engine.supports()
    stages: list[Stage] = []
    if request.max_tokens is not None and "max_tokens" not in supports:
        stages.append(Limit(request.max_tokens))
    syntax = _syntax(engine, request)
    if syntax is not PLAIN:
        choice = request.tool_choice
        tools = () if choice.mode == "none" else request.tools
        shaped = request.constraint is not None
        stages.append(Split(syntax, tools, parallel=choice.parallel, shaped=shaped))
    # A shape that is guaranteed is not cut in two by a stop string.
    if request.stop and request.constraint is None:
        stages.append(Stop(request.stop))
    if stages or "usage" not in supports:
        stages.append(Tally())
    return stages


def _syntax(engine: Engine, request: GenerationRequest) -> ModelFormat:
    """How the reply is written; that of a completion is the model's raw output."""
    if not request.messages or engine.tells_calls:
        return PLAIN
    names = [info.format for info in engine.models() if info.name == request.model]
    syntax = FORMATS[names[0]] if names else PLAIN
    # A model without a syntax for calls that must make one is made to write JSON.
    return JSON if syntax is PLAIN and request.tool_choice.mode in ("required", "named") else syntax


async def _side_by_side(
    engine: Engine,
    requests: Sequence[GenerationRequest],
    per_prompt: int,
    slots: Turns,
    take: Take,
    running: Running,
) -> None:
    """All choices as slots allow, their batches as they come. The first failure ends them all."""
    counting: dict[int, int] = {}
    held = 1

    def take_once(index: int, events: Sequence[Event]) -> Awaitable[None] | None:
        # The first to start is the one that took the prompt in, if the others shared its work.
        first = counting.setdefault(index // per_prompt, index)
        return take(index, events if index == first else _without_prompt(events))

    async def follow(index: int, request: GenerationRequest) -> None:
        nonlocal held
        if index:
            await slots.another()
            held += 1
            running(held)
        try:
            await _choice(engine, request, index, take_once)
        finally:
            slots.give_back()
            held -= 1
            running(held)

    if len(requests) > per_prompt:
        await _check_prompt_lengths(engine, requests[::per_prompt])
    tasks = [asyncio.create_task(follow(index, request)) for index, request in enumerate(requests)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _check_prompt_lengths(engine: Engine, requests: Sequence[GenerationRequest]) -> None:
    """Refuse a prompt that does not fit before another one is answered: later there is no status to refuse it with."""
    context = next((info.context for info in engine.models() if info.name == requests[0].model), None)
    if context is None or "count_tokens" not in engine.supports():
        return
    for request in requests:
        tokens = await call(engine.count_tokens, request)
        if tokens + (request.max_tokens != 0) > context:
            raise ContextTooLong(
                f"this model's maximum context length is {context} tokens, but the prompt has {tokens}",
                param="prompt",
                tokens=tokens,
                limit=context - 1,
            )


def _without_prompt(events: Sequence[Event]) -> Sequence[Event]:
    """The events of a further choice of a prompt, whose tokens another choice counts."""
    last = events[-1]
    if not isinstance(last, Finished):
        return events
    usage = last.usage or Usage()
    own = Usage(completion=usage.completion, reasoning=usage.reasoning)
    return [*events[:-1], msgspec.structs.replace(last, usage=own)]
