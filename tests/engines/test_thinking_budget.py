"""Thoughts that end: by themselves, by their budget, in whatever tags they were begun."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.core.request import Thinking
from dragoman.engines.llama.engine import LlamaEngine
from dragoman.engines.thinking_budget import Budget
from dragoman.formats import FORMATS
from dragoman.formats.syntax import Tags, reasoning_tags
from dragoman.prompt import ChatTemplate
from tests.engines.running import Run, chat

PAIRS = reasoning_tags(FORMATS["json"])


def budget(tokens: int, opened: Tags | None) -> Budget:
    return Budget(tokens, PAIRS, lambda tags: [PAIRS.index(tags)], opened)


@given(st.sampled_from(PAIRS), st.sampled_from(PAIRS), st.lists(st.integers(1, 40)))
def test_a_closer_is_noticed_wherever_it_is_cut(opened: Tags, closed: Tags, cuts: list[int]) -> None:
    watched = budget(100, opened)
    text = f"well{closed.close}The answer"
    for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(text)], strict=True):
        watched.read(text[start:end])
    assert watched.inside is None
    watched.left = 0
    assert watched.closing == ()


@pytest.mark.parametrize("opened", PAIRS)
def test_what_closes_a_thought_is_of_the_pair_that_opened_it(opened: Tags) -> None:
    watched = budget(2, opened)
    watched.read("one")
    assert not watched.closing
    watched.read(" two")
    assert watched.closing == [PAIRS.index(opened)]
    begun = budget(1, None)
    begun.read(f"Hm. {opened.open}")
    begun.read("one")
    assert begun.closing == [PAIRS.index(opened)]


def test_the_engine_closes_what_the_prompt_has_opened(with_engine: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
        assert engine.loaded is not None
        intake, model = engine.loaded.intake, engine.loaded.intake.model
        intake.format = FORMATS["kimi"]
        intake.template = ChatTemplate(
            "{{ messages[0].content }}◁think▷\n", bos="", eos="", control=model.control, format=intake.format
        )
        request = chat("x", thinking=Thinking(effort="none"))
        made = intake.generation(request, intake.read(request))
        assert made.budget is not None
        assert model.detokenize(made.budget.closing) == "\n◁/think▷\n\n"
        made.close()

    with_engine(test)


def test_who_turns_thinking_on_may_think_whatever_the_effort(with_engine: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
        assert engine.loaded is not None
        intake = engine.loaded.intake
        for thinking, tokens in (
            (Thinking(enabled=True, effort="none"), None),
            (Thinking(enabled=True, effort="none", budget_tokens=9), 9),
            (Thinking(effort="none", budget_tokens=9), 0),
            (Thinking(enabled=False, effort="high"), 0),
        ):
            request = chat("x", thinking=thinking)
            found = intake.generation(request, intake.read(request)).budget
            assert (None if found is None else found.left) == tokens

    with_engine(test)
