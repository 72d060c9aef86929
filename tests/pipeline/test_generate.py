"""From a request to events, with engines that misbehave in all the ways they may."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence

import msgspec
import pytest

from dragoman.core.engine import Engine, Output
from dragoman.core.errors import BadRequest, ContextTooLong, EngineFailed, NotSupported, UnsupportedParameter
from dragoman.core.events import Event, Finished, Started, TextDelta, Usage
from dragoman.core.reply import Collection, Reply
from dragoman.core.request import Asked, GenerationRequest, Message, Sampling, Text
from dragoman.engines.scripted import ScriptedEngine, ScriptedOptions, ScriptedReply
from dragoman.models.admission import Admission, Slots
from dragoman.pipeline.generate import check, check_limits, generate

NO_LIMIT = Slots(Admission(None, 0, 1), "somebody")
CHAT = GenerationRequest(id="1", model="m", messages=(Message("user", (Text("hello there"),)),))


async def whole(engine: Engine, request: GenerationRequest, admission: Admission | None = None) -> Reply:
    slots = Slots(admission or Admission(None, 0, 1), "somebody")
    await slots.first()
    collection = Collection()
    try:
        await generate(engine, request, slots, collection.add)
    finally:
        slots.close()
    return collection.reply()


async def after_first_batch(engine: Engine) -> tuple[asyncio.Task[None], list[Sequence[Event]]]:
    """A generation whose reader has taken one batch and takes its time, and what it has taken."""
    begun, taken = asyncio.Event(), list[Sequence[Event]]()

    def take(_: int, events: Sequence[Event]) -> Awaitable[None]:
        taken.append(events)
        begun.set()
        return asyncio.get_running_loop().create_future()

    task = asyncio.create_task(generate(engine, CHAT, NO_LIMIT, take))
    await begun.wait()
    return task, taken


async def cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def reply(engine: Engine, request: GenerationRequest) -> Reply:
    return asyncio.run(whole(engine, request))


class Shout(Engine):
    def generate(self, request: GenerationRequest) -> Iterator[Output]:
        for word in request.last_user_text.upper().split():
            yield word + " "


class AsyncShout(Engine):
    async def generate(self, request: GenerationRequest) -> AsyncIterator[Output]:
        for word in request.last_user_text.upper().split():
            yield [TextDelta(word), TextDelta(" ")]
            await asyncio.sleep(0)


@pytest.mark.parametrize("engine", [Shout(), AsyncShout()])
def test_an_engine_is_a_generator(engine: Engine) -> None:
    choice = reply(engine, CHAT).choices[0]
    assert (choice.text, choice.reason) == ("HELLO THERE ", "stop")
    assert engine.supports() == {"chat", "completion"}


def test_text_counts_as_one_token_and_an_engine_may_say_better() -> None:
    class Counting(Engine):
        def generate(self, request: GenerationRequest) -> Iterator[Output]:
            yield Started(7)
            yield TextDelta("three tokens", count=3)
            yield Finished("length")

    assert reply(Shout(), CHAT).usage == Usage(completion=2)
    told = reply(Counting(), CHAT)
    assert told.usage == Usage(prompt=7, completion=3)
    assert told.choices[0].reason == "length"


def test_max_tokens_is_kept_for_engines_that_do_not() -> None:
    choice = reply(Shout(), msgspec.structs.replace(CHAT, max_tokens=1)).choices[0]
    assert (choice.text, choice.reason, choice.usage.completion) == ("HELLO ", "length", 1)


def test_a_stop_string_ends_the_engine_and_is_counted() -> None:
    closed = threading.Event()

    class Endless(Engine):
        def generate(self, request: GenerationRequest) -> Iterator[Output]:
            try:
                while True:
                    yield "again "
            finally:
                closed.set()

    choice = reply(Endless(), msgspec.structs.replace(CHAT, stop=("n a",))).choices[0]
    assert (choice.text, choice.reason, choice.stop, choice.usage.completion) == ("agai", "stop", "n a", 2)
    assert closed.wait(60)


def test_choices_are_generations_of_their_own() -> None:
    class Seeded(Engine):
        def generate(self, request: GenerationRequest) -> Iterator[Output]:
            assert (request.choices, len(request.prompts)) == (1, 1)
            yield Started(3)
            yield f"{request.prompt}:{request.sampling.seed}"

    request = GenerationRequest(prompts=("a", "b"), choices=2, sampling=Sampling(seed=10))
    told = reply(Seeded(), request)
    assert [(choice.index, choice.text) for choice in told.choices] == [
        (0, "a:10"),
        (1, "a:11"),
        (2, "b:10"),
        (3, "b:11"),
    ]
    assert told.usage == Usage(prompt=6, completion=4)  # each prompt once


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_choices_take_slots(slots: int) -> None:
    running, most = 0, 0

    class Counting(Engine):
        async def generate(self, request: GenerationRequest) -> AsyncIterator[Output]:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.01)
            yield "x"
            running -= 1

    async def scenario() -> None:
        admission = Admission(slots, 0, 0.001)
        told = await whole(Counting(), msgspec.structs.replace(CHAT, choices=5), admission)
        assert len(told.choices) == 5
        assert admission.running == admission.waiting == 0

    asyncio.run(scenario())
    assert most == slots


def test_one_choice_that_fails_ends_the_others() -> None:
    ended = []

    class Half(Engine):
        async def generate(self, request: GenerationRequest) -> AsyncIterator[Output]:
            try:
                if request.sampling.seed == 1:
                    raise ValueError("boom")
                while True:
                    yield "x"
                    await asyncio.sleep(0.001)
            finally:
                ended.append(request.sampling.seed or 0)

    request = msgspec.structs.replace(CHAT, choices=3, sampling=Sampling(seed=0))
    with pytest.raises(EngineFailed):
        reply(Half(), request)
    assert sorted(ended) == [0, 1, 2]


@pytest.mark.parametrize("slots", [1, 2])
def test_a_prompt_that_is_too_long_is_refused_before_another_is_answered(slots: int) -> None:
    engine = ScriptedEngine("short", ScriptedOptions(context=20, chunk=1))
    request = GenerationRequest(id="1", model="short", prompts=((2, 3), "word " * 10))
    taken: list[Sequence[Event]] = []

    async def scenario() -> None:
        held = Slots(Admission(slots, 0, 1), "somebody")
        await held.first()
        await generate(engine, request, held, lambda _, events: taken.append(events))

    with pytest.raises(ContextTooLong, match="20 tokens, but the prompt has 50"):
        asyncio.run(scenario())
    assert not taken


class Raising(Engine):
    def generate(self, request: GenerationRequest) -> Iterator[Output]:
        yield "one"
        raise RuntimeError("boom at /secret/path")


class WrongType(Engine):
    def generate(self, request: GenerationRequest) -> Iterator[Output]:
        yield 3  # type: ignore[misc]


@pytest.mark.parametrize("engine", [Raising(), WrongType()])
def test_an_exception_of_the_engine_is_told_without_its_words(engine: Engine) -> None:
    with pytest.raises(EngineFailed) as caught:
        reply(engine, CHAT)
    assert "secret" not in caught.value.message


@pytest.mark.parametrize("asynchronous", [False, True])
def test_closing_the_stream_stops_the_engine(asynchronous: bool) -> None:
    made, closed = [0], threading.Event()

    class Counting(Engine):
        def generate(self, request: GenerationRequest) -> Iterator[Output]:
            try:
                while True:
                    made[0] += 1
                    yield "x"
                    time.sleep(0.001)
            finally:
                closed.set()

    class AsyncCounting(Engine):
        async def generate(self, request: GenerationRequest) -> AsyncIterator[Output]:
            try:
                while True:
                    made[0] += 1
                    yield "x"
                    await asyncio.sleep(0.001)
            finally:
                closed.set()

    async def scenario() -> None:
        task, _ = await after_first_batch(AsyncCounting() if asynchronous else Counting())
        await cancelled(task)

    asyncio.run(scenario())
    assert closed.wait(60)
    before = made[0]
    time.sleep(0.05)
    assert made[0] == before


def test_a_fast_generator_waits_for_a_slow_reader() -> None:
    made = [0]

    class Fast(Engine):
        def generate(self, request: GenerationRequest) -> Iterator[Output]:
            for _ in range(100_000):
                made[0] += 1
                yield "x"

    async def scenario() -> None:
        task, taken = await after_first_batch(Fast())
        await asyncio.sleep(0.1)
        assert made[0] < 2000
        assert len(taken) == 1
        await cancelled(task)

    asyncio.run(scenario())


def test_parameters_are_honoured_reported_or_refused() -> None:
    request = GenerationRequest(
        model="m", asked=(Asked("chat", "messages"), Asked("temperature", "temperature"), Asked("unknown", "foo"))
    )
    assert check(request.model, request.asked, frozenset({"chat", "temperature"}), strict=False) == ("foo",)
    assert check(request.model, request.asked, frozenset({"chat"}), strict=False) == ("temperature", "foo")
    with pytest.raises(UnsupportedParameter) as refused:
        check(request.model, request.asked, frozenset({"chat"}), strict=True)
    assert refused.value.param == "temperature"
    with pytest.raises(NotSupported) as missing:
        check(request.model, request.asked, frozenset(), strict=False)
    assert (missing.value.status, missing.value.param) == (501, "messages")


def test_limits_name_the_field_that_broke_them() -> None:
    many = GenerationRequest(choices=9, asked=(Asked("choices", "n"),))
    with pytest.raises(BadRequest) as caught:
        check_limits(many, choices=8, stop_strings=1)
    assert caught.value.param == "n"
    stops = GenerationRequest(stop=("a", "b"), asked=(Asked("stop", "stop_sequences"),))
    with pytest.raises(BadRequest) as caught:
        check_limits(stops, choices=8, stop_strings=1)
    assert caught.value.param == "stop_sequences"


def test_the_best_of_several() -> None:
    class Likely(Engine):
        def generate(self, request: GenerationRequest) -> Iterator[Output]:
            from dragoman.core.events import TokenLogprob

            assert request.logprobs is not None
            seed = request.sampling.seed or 0
            yield TextDelta(f"{seed}", logprobs=(TokenLogprob(0, b"x", -abs(seed - 2.0)),))

    request = GenerationRequest(prompts=("a",), best_of=4, sampling=Sampling(seed=0))
    assert [choice.text for choice in reply(Likely(), request).best(1).choices] == ["2"]


@pytest.mark.parametrize("chunk", [1, 3, 4, 100])
def test_scripted_pieces_are_tokens(chunk: int) -> None:
    options = ScriptedOptions(replies=(ScriptedReply("twelve chars", match="hello"),), chunk=chunk)
    told = reply(ScriptedEngine("s", options), CHAT)
    assert told.choices[0].text == "twelve chars"
    assert told.usage.completion == -(-12 // chunk)
    assert told.usage.prompt == -(-11 // chunk)


def test_scripted_echoes_where_nothing_matches() -> None:
    options = ScriptedOptions(replies=(ScriptedReply("no", match="^nothing$"),))
    assert reply(ScriptedEngine("s", options), CHAT).choices[0].text == "hello there"
