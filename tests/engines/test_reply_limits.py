"""Thinking budgets: reasoning ends by itself or by its budget, for all pairs of tags."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.core.request import Thinking
from dragoman.engines.llama.engine import LlamaEngine
from dragoman.engines.reply_limits import ThinkingBudget
from dragoman.formats import FORMATS
from dragoman.formats.syntax import Tags, reasoning_tags
from dragoman.prompt import ChatTemplate
from tests.engines.llama_fixtures import builder_of, chat, model_of

pytestmark = pytest.mark.anyio

PAIRS = reasoning_tags(FORMATS["json"])


def budget(tokens: int, opened: Tags | None) -> ThinkingBudget:
    return ThinkingBudget(tokens, PAIRS, lambda tags: [PAIRS.index(tags)], opened)


@given(st.sampled_from(PAIRS), st.sampled_from(PAIRS), st.lists(st.integers(1, 40)))
def test_closing_tag_split_across_tokens(opened: Tags, closed: Tags, cuts: list[int]) -> None:
    tracker = budget(100, opened)
    text = f"well{closed.close}The answer"
    for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(text)], strict=True):
        tracker.add_token(text[start:end])
    assert tracker.open_tags is None
    tracker.tokens_left = 0
    assert tracker.closing_tokens == ()


@pytest.mark.parametrize("opened", PAIRS)
def test_closing_tag_matches_the_opening_tag(opened: Tags) -> None:
    tracker = budget(2, opened)
    tracker.add_token("one")
    assert not tracker.closing_tokens
    tracker.add_token(" two")
    assert tracker.closing_tokens == [PAIRS.index(opened)]
    begun = budget(1, None)
    begun.add_token(f"Hm. {opened.open}")
    begun.add_token("one")
    assert begun.closing_tokens == [PAIRS.index(opened)]


@given(st.text(max_size=20), st.sampled_from(PAIRS), st.sampled_from([None, *PAIRS]))
def test_text_before_the_reply_takes_nothing_from_the_budget(text: str, tags: Tags, opened: Tags | None) -> None:
    tracker = budget(3, opened)
    tracker.skip(f"{text}{tags.close}{text}")
    assert (tracker.tokens_left, tracker.open_tags) == (3, None)
    tracker.skip(f"{text}{tags.open}{text}")
    assert (tracker.tokens_left, tracker.open_tags) == (3, tags)
    for _ in range(3):
        assert not tracker.closing_tokens
        tracker.add_token(" hm")
    assert tracker.closing_tokens


async def test_engine_closes_reasoning_opened_by_the_prompt(engine: LlamaEngine) -> None:
    request_builder, model = builder_of(engine), model_of(engine)
    request_builder.format = FORMATS["kimi"]
    request_builder.template = ChatTemplate(
        "{{ messages[0].content }}◁think▷\n", bos="", eos="", control=model.control, format=request_builder.format
    )
    request = chat("x", thinking=Thinking(effort="none"))
    made = request_builder.read_and_build(request)
    assert made.budget is not None
    assert model.detokenize(made.budget.closing_tokens) == "\n◁/think▷\n\n"
    made.close()


async def test_enabled_thinking_overrides_effort(engine: LlamaEngine) -> None:
    request_builder = builder_of(engine)
    for thinking, tokens in (
        (Thinking(enabled=True, effort="none"), None),
        (Thinking(enabled=True, effort="none", budget_tokens=9), 9),
        (Thinking(effort="none", budget_tokens=9), 0),
        (Thinking(enabled=False, effort="high"), 0),
    ):
        request = chat("x", thinking=thinking)
        found = request_builder.read_and_build(request).budget
        assert (None if found is None else found.tokens_left) == tokens
