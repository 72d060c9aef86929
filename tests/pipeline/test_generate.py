"""Generation from request to events, including misbehaving engines."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence

import msgspec
import pytest

from dragoman.core.engine import Engine, Output
from dragoman.core.errors import BadRequest, ContextTooLong, EngineFailed, NotSupported, UnsupportedParameter
from dragoman.core.events import Event, Finished, Started, TextDelta, TokenLogprob, Usage
from dragoman.core.features import Feature
from dragoman.core.reply import Reply
from dragoman.core.request import Asked, GenerationRequest, Message, Sampling, Text
from dragoman.engines.scripted import ScriptedEngine, ScriptedOptions
from dragoman.engines.scripted_replies import ScriptedReply
from dragoman.models.admission import Admission, Slots
from dragoman.pipeline.generate import check_features, check_limits, generate
from tests.support.generation import whole

NO_LIMIT = Slots(Admission(None, 0, 1), "alice")
CHAT = GenerationRequest(id="1", model="m", messages=(Message("user", (Text("hello there"),)),))


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


class Endless(Engine):
    def __init__(self) -> None:
        self.produced = 0
        self.closed = threading.Event()

    def generate(self, request: GenerationRequest) -> Iterator[Output]:
        try:
            while True:
                self.produced += 1
                yield "again "
        finally:
            self.closed.set()


class EndlessAsync(Endless):
    async def generate(self, request: GenerationRequest) -> AsyncIterator[Output]:  # type: ignore[override]
        for output in super().generate(request):
            yield output
            await asyncio.sleep(0)


@pytest.mark.parametrize("engine", [Shout(), AsyncShout()])
def test_generator_engines(engine: Engine) -> None:
    choice = reply(engine, CHAT).choices[0]
    assert (choice.text, choice.reason) == ("HELLO THERE ", "stop")
    assert engine.supports() == {"chat", "completion"}


def test_text_counts_as_one_token_unless_the_engine_reports_usage() -> None:
    class Counting(Engine):
        def generate(self, request: GenerationRequest) -> Iterator[Output]:
            yield Started(7)
            yield TextDelta("three tokens", count=3)
            yield Finished("length")

    assert reply(Shout(), CHAT).usage == Usage(completion=2)
    result = reply(Counting(), CHAT)
    assert result.usage == Usage(prompt=7, completion=3)
    assert result.choices[0].reason == "length"


def test_max_tokens_is_enforced_by_the_server() -> None:
    choice = reply(Shout(), msgspec.structs.replace(CHAT, max_tokens=1)).choices[0]
    assert (choice.text, choice.reason, choice.usage.completion) == ("HELLO ", "length", 1)


def test_stop_string_ends_the_engine_and_is_counted() -> None:
    engine = Endless()
    choice = reply(engine, msgspec.structs.replace(CHAT, stop=("n a",))).choices[0]
    assert (choice.text, choice.reason, choice.stop, choice.usage.completion) == ("agai", "stop", "n a", 2)
    assert engine.closed.wait(60)


def test_choices_are_separate_generations() -> None:
    class Seeded(Engine):
        def generate(self, request: GenerationRequest) -> Iterator[Output]:
            assert (request.choices, len(request.prompts)) == (1, 1)
            yield Started(3)
            yield f"{request.prompt}:{request.sampling.seed}"

    request = GenerationRequest(prompts=("a", "b"), choices=2, sampling=Sampling(seed=10))
    result = reply(Seeded(), request)
    assert [(choice.index, choice.text) for choice in result.choices] == [
        (0, "a:10"),
        (1, "a:11"),
        (2, "b:10"),
        (3, "b:11"),
    ]
    assert result.usage == Usage(prompt=6, completion=4)  # each prompt once


@pytest.mark.parametrize("slots", [1, 2, 3])
async def test_each_choice_takes_a_slot(slots: int) -> None:
    running, most = 0, 0

    class Counting(Engine):
        async def generate(self, request: GenerationRequest) -> AsyncIterator[Output]:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.01)
            yield "x"
            running -= 1

    admission = Admission(slots, 0, 0.001)
    result = await whole(Counting(), msgspec.structs.replace(CHAT, choices=5), admission)
    assert len(result.choices) == 5
    assert admission.running == admission.waiting == 0
    assert most == slots


def test_failed_choice_ends_the_others() -> None:
    ended = []

    class HalfFailing(Engine):
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
        reply(HalfFailing(), request)
    assert sorted(ended) == [0, 1, 2]


@pytest.mark.parametrize("slots", [1, 2])
async def test_too_long_prompt_is_rejected_before_any_reply(slots: int) -> None:
    engine = ScriptedEngine("short", ScriptedOptions(context=20, chunk=1))
    request = GenerationRequest(id="1", model="short", prompts=((2, 3), "word " * 10))
    received: list[Sequence[Event]] = []

    request_slots = Slots(Admission(slots, 0, 1), "alice")
    await request_slots.acquire_first()
    with pytest.raises(ContextTooLong, match="20 tokens, but the prompt has 50"):
        await generate(engine, request, request_slots, lambda _, events: received.append(events))
    assert not received


def test_engine_exception_text_is_not_exposed() -> None:
    class Raising(Engine):
        def generate(self, request: GenerationRequest) -> Iterator[Output]:
            yield "one"
            raise RuntimeError("boom at /secret/path")

    with pytest.raises(EngineFailed) as caught:
        reply(Raising(), CHAT)
    assert "secret" not in caught.value.message


@pytest.mark.parametrize("kind", [Endless, EndlessAsync])
async def test_slow_receiver_delays_the_engine_and_cancelling_stops_it(kind: type[Endless]) -> None:
    engine, start, received = kind(), asyncio.Event(), list[Sequence[Event]]()

    def on_events(_: int, events: Sequence[Event]) -> Awaitable[None]:
        received.append(events)
        start.set()
        return asyncio.get_running_loop().create_future()

    task = asyncio.create_task(generate(engine, CHAT, NO_LIMIT, on_events))
    await start.wait()
    await asyncio.sleep(0.1)
    assert engine.produced < 2000
    assert len(received) == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(engine.closed.wait, 60)
    before = engine.produced
    await asyncio.sleep(0.05)
    assert engine.produced == before


def test_unsupported_parameters_are_ignored_or_rejected() -> None:
    request = GenerationRequest(
        model="m",
        asked=(
            Asked(Feature.CHAT, "messages"),
            Asked(Feature.TEMPERATURE, "temperature"),
            Asked(Feature.UNKNOWN, "foo"),
        ),
    )
    assert check_features(request.model, request.asked, frozenset({"chat", "temperature"}), strict=False) == ("foo",)
    assert check_features(request.model, request.asked, frozenset({"chat"}), strict=False) == ("temperature", "foo")
    with pytest.raises(UnsupportedParameter) as refused:
        check_features(request.model, request.asked, frozenset({"chat"}), strict=True)
    assert refused.value.param == "temperature"
    with pytest.raises(NotSupported) as missing:
        check_features(request.model, request.asked, frozenset(), strict=False)
    assert (missing.value.status, missing.value.param) == (501, "messages")


def test_limit_errors_name_the_field() -> None:
    many = GenerationRequest(choices=9, asked=(Asked(Feature.CHOICES, "n"),))
    with pytest.raises(BadRequest) as caught:
        check_limits(many, choices=8, stop_strings=1)
    assert caught.value.param == "n"
    stops = GenerationRequest(stop=("a", "b"), asked=(Asked(Feature.STOP, "stop_sequences"),))
    with pytest.raises(BadRequest) as caught:
        check_limits(stops, choices=8, stop_strings=1)
    assert caught.value.param == "stop_sequences"


def test_best_of() -> None:
    class Likely(Engine):
        def generate(self, request: GenerationRequest) -> Iterator[Output]:
            assert request.logprobs is not None
            seed = request.sampling.seed or 0
            yield TextDelta(f"{seed}", logprobs=(TokenLogprob(0, b"x", -abs(seed - 2.0)),))

    request = GenerationRequest(prompts=("a",), best_of=4, sampling=Sampling(seed=0))
    assert [choice.text for choice in reply(Likely(), request).best(1).choices] == ["2"]


@pytest.mark.parametrize("chunk", [1, 3, 4, 100])
def test_scripted_pieces_are_tokens(chunk: int) -> None:
    options = ScriptedOptions(replies=(ScriptedReply("twelve chars", match="hello"),), chunk=chunk)
    result = reply(ScriptedEngine("s", options), CHAT)
    assert result.choices[0].text == "twelve chars"
    assert result.usage.completion == -(-12 // chunk)
    assert result.usage.prompt == -(-11 // chunk)


def test_scripted_engine_echoes_without_a_match() -> None:
    options = ScriptedOptions(replies=(ScriptedReply("no", match="^nothing$"),))
    assert reply(ScriptedEngine("s", options), CHAT).choices[0].text == "hello there"
