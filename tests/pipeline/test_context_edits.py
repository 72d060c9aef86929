"""Clears old tool uses and reasoning of a conversation."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.core.edits import ClearThinking, ClearToolUses, ContextEdit
from dragoman.core.request import GenerationRequest, Message, Part, Reasoning, Text, ToolCall, ToolResult
from dragoman.pipeline.context_edits import CLEARED, clear_context
from dragoman.pipeline.token_counter import TokenCounter
from tests.pipeline.test_compaction import Summarizer, Uncounting, said

RESULT = "r" * 400


def use(number: int, name: str = "look", thought: str = "") -> list[Message]:
    reasoning: tuple[Part, ...] = (Reasoning(thought),) if thought else ()
    call = ToolCall(f"c{number}", name, f'{{"at":{number}}}')
    return [Message("assistant", (*reasoning, call)), Message("tool", (ToolResult(call.id, (Text(RESULT),)),))]


def conversation(*names: str) -> list[Message]:
    return [said("user", "go"), *(message for at, name in enumerate(names) for message in use(at, name))]


def clear(
    messages: list[Message], *edits: ContextEdit, context: int | None = None, engine: type[Summarizer] = Summarizer
) -> tuple[tuple[Message, ...], list[tuple[int, int]]]:
    """Return the messages, and the count and the tokens of each edit that was applied."""
    request = GenerationRequest(model="m", messages=tuple(messages), edits=edits)
    edited, applied = asyncio.run(clear_context(request, TokenCounter(engine(context), "m")))
    assert edited.edits == ()
    return edited.messages, [(entry.count, entry.tokens) for entry in applied]


def cleared_ids(messages: tuple[Message, ...]) -> list[str]:
    results = [part for message in messages for part in message.parts if isinstance(part, ToolResult)]
    return [result.call_id for result in results if result.content == CLEARED]


def arguments(messages: tuple[Message, ...]) -> list[str]:
    return [call.arguments for message in messages for call in message.tool_calls]


LOOKS = conversation(*["look"] * 5)
FREED = 100 - -(-len(CLEARED[0].text) // 4)
"""Tokens per result: 400 characters become those of the placeholder."""


@pytest.mark.parametrize(
    ("fields", "cleared"),
    [
        ({"tokens": 100}, ["c0", "c1"]),
        ({"tokens": 500}, ["c0", "c1"]),
        ({"tokens": 501}, []),
        ({"tokens": None, "uses": 4}, ["c0", "c1"]),
        ({"tokens": None, "uses": 5}, []),
        ({"tokens": 100, "keep": 0}, ["c0", "c1", "c2", "c3", "c4"]),
        ({"tokens": 100, "keep": 5}, []),
        ({"tokens": 100, "at_least": 2 * FREED}, ["c0", "c1"]),
        ({"tokens": 100, "at_least": 2 * FREED + 1}, []),
    ],
)
def test_clear_tool_uses(fields: dict[str, Any], cleared: list[str]) -> None:
    """The prompt has 501 tokens."""
    messages, applied = clear(LOOKS, ClearToolUses("edits[0]", **fields))
    assert cleared_ids(messages) == cleared
    assert applied == ([(len(cleared), len(cleared) * FREED)] if cleared else [])
    assert len(messages) == len(LOOKS)
    assert arguments(messages) == arguments(tuple(LOOKS))


def test_a_prompt_that_does_not_fit_is_cleared_below_the_threshold() -> None:
    assert clear(LOOKS, ClearToolUses("x"), context=502)[1] == []
    assert clear(LOOKS, ClearToolUses("x"), context=501)[1] == [(2, 2 * FREED)]


def test_excluded_tools_and_arguments() -> None:
    messages = conversation("look", "read", "look", "look", "look", "look")
    found, _ = clear(messages, ClearToolUses("x", 1, exclude=("read",), inputs=None))
    assert cleared_ids(found) == ["c0", "c2"]
    assert arguments(found) == ["{}", '{"at":1}', "{}", '{"at":3}', '{"at":4}', '{"at":5}']
    some, _ = clear(messages, ClearToolUses("x", 1, inputs=("read",)))
    assert cleared_ids(some) == ["c0", "c1", "c2"]
    assert arguments(some)[:3] == ['{"at":0}', "{}", '{"at":2}']


def test_ids_that_are_used_again_are_not_cleared() -> None:
    again = [*conversation("look"), *use(0), *use(1), *use(2)]
    assert cleared_ids(clear(again, ClearToolUses("x", 1))[0]) == []


def test_a_cleared_result_is_cleared_once() -> None:
    messages, _ = clear(LOOKS, ClearToolUses("x", 1))
    assert clear(list(messages), ClearToolUses("x", 1)) == (messages, [])


THOUGHTS = [
    *(said("user", "go"), *use(0, thought="one"), *use(1, thought="two"), said("assistant", "done")),
    *(said("user", "go"), said("assistant", "no thought")),
    *(said("user", "go"), *use(2, thought="three"), *use(3)),
    *(said("user", "go"), *use(4, thought="four")),
]


@pytest.mark.parametrize(
    ("keep", "left"), [(1, ["four"]), (2, ["three", "four"]), (3, ["one", "two", "three", "four"])]
)
def test_clear_thinking(keep: int, left: list[str]) -> None:
    """A turn with several thoughts counts once, and one without thoughts does not count."""
    messages, applied = clear(THOUGHTS, ClearThinking("x", keep))
    assert [message.reasoning for message in messages if message.reasoning] == left
    assert [count for count, _ in applied] == ([3 - keep] if keep < 3 else [])
    assert arguments(messages) == arguments(tuple(THOUGHTS))


def test_thinking_and_tool_uses_are_cleared_in_one_request() -> None:
    messages, applied = clear(THOUGHTS, ClearThinking("edits[0]"), ClearToolUses("edits[1]", 1))
    assert [count for count, _ in applied] == [2, 2]
    assert cleared_ids(messages) == ["c0", "c1"]


def test_an_engine_that_cannot_count_clears_nothing() -> None:
    assert clear(THOUGHTS, ClearThinking("x"), ClearToolUses("y", 1), engine=Uncounting) == (tuple(THOUGHTS), [])


@given(
    names=st.lists(st.sampled_from(["look", "read"]), max_size=8),
    keep=st.integers(0, 9),
    exclude=st.sampled_from([(), ("read",)]),
)
def test_the_structure_of_a_conversation_stays(names: list[str], keep: int, exclude: tuple[str, ...]) -> None:
    before = conversation(*names)
    after, _ = clear(before, ClearToolUses("x", 1, keep=keep, exclude=exclude))
    shape = [(message.role, [type(part) for part in message.parts]) for message in before]
    assert [(message.role, [type(part) for part in message.parts]) for message in after] == shape
    expected = [f"c{at}" for at, name in enumerate(names[: max(0, len(names) - keep)]) if name not in exclude]
    assert cleared_ids(after) == expected
