"""Generations in process, without a server."""

import asyncio
import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman import Engine, ModelInfo, generate
from dragoman.core.errors import BadRequest, ConfigError, NotSupported
from dragoman.core.events import Event, Finished, ReasoningDelta, TextDelta
from dragoman.core.features import Feature
from dragoman.core.request import Asked, GenerationRequest, Message, Text

REPLY = "<think>A greeting.</think>Hello there, friend."


def chat(text: str = "hi", **fields: object) -> GenerationRequest:
    return GenerationRequest(messages=(Message("user", (Text(text),)),), **fields)  # type: ignore[arg-type]


class Thinker(Engine):
    slots = 1

    def __init__(self, pieces: Sequence[str] = (REPLY,)) -> None:
        self.pieces = pieces
        self.running = 0
        self.most = 0

    def models(self) -> Sequence[ModelInfo]:
        return [ModelInfo("thinker", format="hermes")]

    def generate(self, request: GenerationRequest) -> Iterator[str]:
        self.running += 1
        self.most = max(self.most, self.running)
        yield from self.pieces
        self.running -= 1


async def collect(engine: Engine, request: GenerationRequest) -> list[Event]:
    return [event async for event in generate(engine, request)]


def joined(events: Sequence[Event]) -> tuple[str, str, Event]:
    text = "".join(event.text for event in events if isinstance(event, TextDelta))
    reasoning = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
    return reasoning, text, events[-1]


def test_whole_reply() -> None:
    async def script() -> None:
        reply = await generate(Thinker(), chat(stop=(", friend",)))
        assert (reply.choices[0].reasoning, reply.text, reply.reason) == ("A greeting.", "Hello there", "stop")

    asyncio.run(script())


@given(st.lists(st.integers(0, len(REPLY)), max_size=10))
def test_same_events_for_every_cutting(cuts: list[int]) -> None:
    ends = [0, *sorted(cuts), len(REPLY)]
    pieces = [REPLY[start:end] for start, end in itertools.pairwise(ends)]
    events = asyncio.run(collect(Thinker(pieces), chat()))
    reasoning, text, last = joined(events)
    assert (reasoning, text) == ("A greeting.", "Hello there, friend.")
    assert isinstance(last, Finished)
    assert last.reason == "stop"


def test_limit_of_tokens() -> None:
    events = asyncio.run(collect(Thinker(["one ", "two ", "three"]), chat(max_tokens=2)))
    _, text, last = joined(events)
    assert text == "one two "
    assert isinstance(last, Finished)
    assert last.reason == "length"


def test_choices_share_the_slots_of_the_engine() -> None:
    engine = Thinker()

    async def script() -> None:
        reply = await generate(engine, chat(choices=3))
        assert [choice.text for choice in reply.choices] == ["Hello there, friend."] * 3

    asyncio.run(script())
    assert engine.most == 1


def test_events_of_several_choices_are_refused() -> None:
    with pytest.raises(BadRequest, match="await the generation instead"):
        asyncio.run(collect(Thinker(), chat(choices=2)))


def test_missing_feature_is_refused() -> None:
    request = chat(asked=(Asked(Feature.IMAGES, "messages[0]"),))
    with pytest.raises(NotSupported, match="model 'thinker' does not accept images"):
        asyncio.run(collect(Thinker(), request))


def test_leaving_the_loop_closes_the_engine() -> None:
    closed = False

    class Endless(Engine):
        async def generate(self, request: GenerationRequest):  # type: ignore[no-untyped-def]
            nonlocal closed
            try:
                while True:
                    yield "tick "
            finally:
                closed = True

    async def script() -> None:
        events = aiter(generate(Endless(), chat()))
        while not isinstance(await anext(events), TextDelta):
            pass
        await events.aclose()  # type: ignore[attr-defined]

    asyncio.run(script())
    assert closed


def test_class_instead_of_an_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^expected an engine, got the class Thinker; write Thinker\(\)$"):
        generate(Thinker, chat())  # type: ignore[arg-type]


def test_model_of_an_engine_that_lists_names() -> None:
    class Named(Engine):
        def models(self) -> Sequence[str]:
            return ["first", "second"]

        def generate(self, request: GenerationRequest) -> Iterator[str]:
            yield request.model

    async def script() -> None:
        assert (await generate(Named(), chat())).text == "first"

    asyncio.run(script())
