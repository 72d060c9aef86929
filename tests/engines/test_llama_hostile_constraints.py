"""Hostile schemas and grammars with a real model: each fails only its own request."""

import asyncio
import json
from typing import Any

import pytest

from dragoman.core.errors import InvalidSchema
from dragoman.core.events import Event
from dragoman.core.request import Asked, GenerationRequest, JsonSchema, Regex, Sampling, Tool, ToolChoice
from dragoman.engines.llama.engine import LlamaEngine
from tests.engines.llama_fixtures import Run, chat, collect, completion

ROLL = Tool("roll", "Roll dice", {"type": "object", "properties": {"sides": {"enum": [4, 6, 20]}}})
PICK = Tool("pick", "Pick a card", {"type": "object", "properties": {"suit": {"enum": ["hearts", "spades"]}}})


def test_least_integer_in_a_schema_does_not_end_the_engine(with_engine: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
        asked = (Asked("constraint", "response_format"),)
        schemas: list[dict[str, Any]] = [
            {"const": -(2**63)},
            {"type": "integer", "minimum": -(2**63), "maximum": -(2**63)},
        ]
        for schema in schemas:
            answer = await collect(engine, chat("A number.", constraint=JsonSchema(schema), asked=asked, max_tokens=40))
            assert answer.started.ignored
            assert set(answer.started.ignored) <= {f"response_format.{keyword}" for keyword in schema}
            if answer.finished.reason == "stop":
                assert isinstance(json.loads(answer.text), int)

    with_engine(test)


def hostile(patterns: int) -> GenerationRequest:
    schema = {"type": "string", "allOf": [{"pattern": f"a.*b{at}"} for at in range(patterns)]}
    return chat("Hi.", constraint=JsonSchema(schema), principal="mallory")


def test_schemas_that_take_too_long_are_refused_and_other_requests_are_answered(with_engine: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
        await collect(engine, chat("Roll!", tools=(ROLL,), max_tokens=2))
        tasks = [asyncio.create_task(collect(engine, hostile(count))) for count in range(40, 46)]
        forced = ToolChoice("required", parallel=False)
        asked = chat("A card!", tools=(PICK,), tool_choice=forced, max_tokens=60, principal="alice")
        assert "pick" in (await collect(engine, asked)).text
        with pytest.raises(InvalidSchema):
            await tasks[0]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    with_engine(test)


def test_grammar_that_becomes_too_complex_in_mid_reply_is_an_invalid_schema(with_engine: Run) -> None:
    # Any letter may begin the run of 200 others, so the automaton exceeds its limits after a few tokens.
    asked = chat("Go on.", constraint=Regex("(.*[a-m].{200}x)"), sampling=Sampling(temperature=0), max_tokens=60)
    received: list[Event] = []

    async def follow(engine: LlamaEngine) -> None:
        async for events in engine.generate(asked):
            received.extend(events)

    async def test(engine: LlamaEngine) -> None:
        with pytest.raises(InvalidSchema, match="can no longer be constrained"):
            await follow(engine)
        assert len(received) >= 2
        assert len((await collect(engine, completion(max_tokens=4))).tokens) == 4

    with_engine(test)
