"""Runs a request: checks its features, runs the engine and passes the events through the stages.

    request -> check -> one or several choices -> engine -> limit, split, stop, count -> on_events

Rules
1. The only list of stages is here.
2. Every choice is a separate generation with its own slot. An engine sees one prompt and one choice.
3. Cancelling `generate` closes the engine's iterators at once, for all choices.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

import msgspec

from dragoman.core.engine import Engine, call_engine, run_delivery
from dragoman.core.errors import BadRequest, ContextTooLong, NotSupported, UnsupportedParameter, quote
from dragoman.core.events import Event, Finished, ReasoningDelta, Started, TextDelta, Usage
from dragoman.core.features import Feature
from dragoman.core.request import Asked, GenerationRequest, Logprobs, Reasoning, Text
from dragoman.formats import get_format
from dragoman.formats.bare_json import JSON
from dragoman.formats.syntax import PLAIN, ModelFormat
from dragoman.pipeline import Stage
from dragoman.pipeline.count import CountStage, LimitStage, TimeStage
from dragoman.pipeline.split import SplitStage
from dragoman.pipeline.stop import StopStage

OnRunning = Callable[[int], None]
"""Called with the number of choices that hold a slot, when it changes."""

OnEvents = Callable[[int, Sequence[Event]], Awaitable[None] | None]
"""Called with the index of a choice and its events that are ready. It may return an awaitable to apply back
pressure."""

SERVER_FEATURES = frozenset({Feature.STOP, Feature.CHOICES, Feature.BEST_OF})
"""Features that the server provides for every engine."""

TEXT_GENERATION = frozenset({Feature.CHAT, Feature.COMPLETION, Feature.TOKEN_PROMPT, Feature.INFILL})
INPUTS = {Feature.IMAGES: "images", Feature.AUDIO: "audio", Feature.FILES: "files"}
"""Kinds of content besides text, as errors call them."""
ESSENTIAL = frozenset(
    {
        *TEXT_GENERATION,
        *INPUTS,
        *(Feature.TOOLS, Feature.CUSTOM_TOOLS, Feature.CONSTRAINT, Feature.STRUCTURAL_TAG),
    }
)
"""Features that cannot be ignored: without them the reply would not answer the request."""


STAGE_FEATURES = frozenset({Feature.MAX_TOKENS, Feature.USAGE, Feature.PREFILL})
"""Features that determine which stages are needed."""


class ChoiceSlots(Protocol):
    """The slots of a request. The request already holds the first."""

    async def acquire(self) -> None: ...

    def release(self) -> None: ...


def check_features(
    model: str, requested: Sequence[Asked], supports: frozenset[str], strict: bool, read: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return the parameters that will be ignored. Raises an error if one is essential or the mode is strict.

    `read` are the unknown fields that the engine reads.
    """
    ignored = []
    for asked in requested:
        if asked.feature in SERVER_FEATURES or asked.feature in supports:
            continue
        if asked.param in read and asked.feature == Feature.UNKNOWN:
            continue
        if asked.feature in ESSENTIAL:
            raise NotSupported(f"model '{model}' {_describe_missing(asked, supports)}", param=asked.param)
        if strict:
            raise unsupported_parameter(model, asked.param, asked.feature)
        ignored.append(asked.param)
    return tuple(ignored)


def _describe_missing(asked: Asked, supports: frozenset[str]) -> str:
    if asked.feature in INPUTS:
        return f"does not accept {INPUTS[asked.feature]}; remove {asked.param}, or use another model"
    if asked.feature in TEXT_GENERATION and Feature.EMBEDDINGS in supports and not TEXT_GENERATION & supports:
        return "makes embeddings only; use /v1/embeddings, or another model"
    if asked.feature in (Feature.CHAT, Feature.COMPLETION) and Feature.TOKEN_PROMPT in supports:
        return "takes token ids only; send them as `prompt` to /v1/completions, or use another model"
    return f"does not support '{asked.param}'"


def reads_field(reads_fields: Sequence[str], name: str) -> bool:
    """Whether an engine reads an unknown field of the body."""
    return name in reads_fields or "*" in reads_fields


def unsupported_parameter(model: str, param: str, feature: Feature = Feature.UNKNOWN) -> UnsupportedParameter:
    if feature == Feature.SERVER_TOOLS:
        message = (
            f"{quote(param)}: this server runs no hosted tools such as web search; use a function or an MCP server"
        )
        return UnsupportedParameter(message, param=param)
    message = f"model '{model}' does not support {quote(param)}; remove it or disable strict mode"
    return UnsupportedParameter(message, param=param)


def check_limits(request: GenerationRequest, choices: int, stop_strings: int) -> None:
    requested = max(request.choices, request.best_of) * max(1, len(request.prompts))
    if requested > choices:
        param = _find_param(request, Feature.CHOICES, Feature.BEST_OF, Feature.COMPLETION, Feature.TOKEN_PROMPT)
        raise BadRequest(f"at most {choices} choices are allowed per request, not {requested}", param=param)
    if len(request.stop) > stop_strings:
        raise BadRequest(f"at most {stop_strings} stop strings are allowed", param=_find_param(request, Feature.STOP))


def _find_param(request: GenerationRequest, *features: Feature) -> str | None:
    """Return the field that asked for the first requested feature among `features`."""
    params = {asked.feature: asked.param for asked in request.asked}
    return next((params[feature] for feature in features if feature in params), None)


def generate(
    engine: Engine,
    request: GenerationRequest,
    slots: ChoiceSlots,
    on_events: OnEvents,
    on_running: OnRunning | None = None,
) -> Coroutine[None, None, None]:
    """Run all choices to their ends. The caller holds the first slot; further choices wait for their own."""
    requests = _split_choices(request)
    if len(requests) == 1:
        return _run_choice(engine, requests[0], 0, on_events)
    per_prompt = len(requests) // max(1, len(request.prompts))
    return _run_choices(engine, requests, per_prompt, slots, on_events, on_running or (lambda count: None))


def _split_choices(request: GenerationRequest) -> list[GenerationRequest]:
    """Return one request per choice, grouped by prompt. With a seed, each choice has its own."""
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


async def _run_choice(engine: Engine, request: GenerationRequest, index: int, on_events: OnEvents) -> None:
    stages: list[Stage] = []
    began = time.monotonic()

    def on_ready(ready: Sequence[Event]) -> Awaitable[None] | None:
        nonlocal stages
        if type(ready[0]) is Started:
            # A reply that starts again needs new stages.
            stages = _build_stages(engine, request)
            if request.delivery.timings:
                stages.append(TimeStage(began))
        events = ready
        for stage in stages:
            events = stage(events)
        if not events:
            return None
        waiting = on_events(index, events)
        if type(events[-1]) is not Finished:
            return waiting
        if waiting is not None:
            return _raise_after(waiting)
        raise _ReplyComplete

    # If a stage ends the reply, the rest of the engine's output is not needed.
    with suppress(_ReplyComplete):
        await run_delivery(engine, request, on_ready)


class _ReplyComplete(Exception):
    """The reply is complete."""


async def _raise_after(waiting: Awaitable[None]) -> None:
    await waiting
    raise _ReplyComplete


def _build_stages(engine: Engine, request: GenerationRequest) -> list[Stage]:
    supports = engine.supports()
    stages: list[Stage] = []
    if request.max_tokens is not None and Feature.MAX_TOKENS not in supports:
        stages.append(LimitStage(request.max_tokens))
    syntax = _reply_format(engine, request)
    prefill = request.prefill if Feature.PREFILL in supports else None
    if syntax is not PLAIN:
        choice = request.tool_choice
        tools = () if choice.mode == "none" else request.tools
        shaped = request.constraint is not None
        begun = ("", "") if prefill is None else (prefill.text, request.prefill_path)
        stages.append(SplitStage(syntax, tools, parallel=choice.parallel, shaped=shaped, prefill=begun))
    # Stop strings must not cut a constrained reply.
    if request.stop and request.constraint is None:
        stages.append(StopStage(request.stop))
    if prefill is not None and request.echo:
        stages.append(partial(_echo_prefill, prefill))
    if stages or Feature.USAGE not in supports:
        stages.append(CountStage())
    return stages


def _echo_prefill(prefill: Text | Reasoning, events: Sequence[Event]) -> Sequence[Event]:
    """Add the text that the reply continues to its beginning."""
    if not events or type(events[0]) is not Started:
        return events
    delta = TextDelta(prefill.text, 0) if isinstance(prefill, Text) else ReasoningDelta(prefill.text, 0)
    return [events[0], delta, *events[1:]]


def _reply_format(engine: Engine, request: GenerationRequest) -> ModelFormat:
    """Return the format of the reply. Completions are raw output."""
    if not request.messages or engine.emits_tool_calls:
        return PLAIN
    syntax = get_format(engine.model_info(request.model).format)
    # Without a call syntax, a required call is constrained to bare JSON.
    return JSON if syntax is PLAIN and request.tool_choice.mode in ("required", "named") else syntax


async def _run_choices(
    engine: Engine,
    requests: Sequence[GenerationRequest],
    per_prompt: int,
    slots: ChoiceSlots,
    on_events: OnEvents,
    on_running: OnRunning,
) -> None:
    """Run all choices as slots allow. The first failure ends them all."""
    first_of_prompt: dict[int, int] = {}
    active = 1

    def receive(index: int, events: Sequence[Event]) -> Awaitable[None] | None:
        # Only the first choice to start reports the usage of the prompt.
        first = first_of_prompt.setdefault(index // per_prompt, index)
        return on_events(index, events if index == first else _without_prompt_usage(events))

    async def run_one(index: int, request: GenerationRequest) -> None:
        nonlocal active
        if index:
            await slots.acquire()
            active += 1
            on_running(active)
        try:
            await _run_choice(engine, request, index, receive)
        finally:
            slots.release()
            active -= 1
            on_running(active)

    if len(requests) > per_prompt:
        await _check_prompt_lengths(engine, requests[::per_prompt])
    tasks = [asyncio.create_task(run_one(index, request)) for index, request in enumerate(requests)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _check_prompt_lengths(engine: Engine, requests: Sequence[GenerationRequest]) -> None:
    """Reject a prompt that is too long before another prompt is answered, while an error status can still be sent."""
    context, supports = engine.model_info(requests[0].model).context, engine.supports()
    # An engine that renders prompts reads them fast enough, and may count only chats.
    if context is None or Feature.COUNT_TOKENS not in supports or Feature.RENDER in supports:
        return
    for request in requests:
        tokens = await call_engine(engine.count_tokens, request)
        if tokens + (request.max_tokens != 0) > context:
            raise ContextTooLong.of(context, tokens, "prompt")


def _without_prompt_usage(events: Sequence[Event]) -> Sequence[Event]:
    """Drop the usage of the prompt, which another choice reports."""
    last = events[-1]
    if not isinstance(last, Finished):
        return events
    usage = last.usage or Usage()
    own = Usage(completion=usage.completion, reasoning=usage.reasoning)
    return [*events[:-1], msgspec.structs.replace(last, usage=own)]
