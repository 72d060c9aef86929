"""Grammars over a vocabulary: how long they take, how much is kept, and what hostile ones cost."""

import json
import random
import resource
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dragoman.core.errors import EngineFailed, InvalidSchema
from dragoman.core.request import Constraint, GenerationRequest, Grammar, JsonSchema, OneOf, Regex, Tool, ToolChoice
from dragoman.formats import FORMATS
from dragoman.grammar import masks
from dragoman.grammar.masks import MAX_GRAMMARS, GrammarCache, Guide
from dragoman.grammar.reply_grammar import Shape, build_reply_grammar
from dragoman.grammar.schema import json_directive
from dragoman.grammar.trial_server import CPU_SECONDS
from tests.grammar.matching import END, speaker, tokenizer, tokens

AGENT_TOOLS = Path(__file__).parent.parent / "data" / "agent_tools.json"


def grammars() -> GrammarCache:
    return GrammarCache(tokenizer())


def shaped(kind: str, **fields: Any) -> Shape:
    found = build_reply_grammar(GenerationRequest(**fields), speaker(FORMATS[kind]), opened=False)
    assert found is not None
    return found


def agent_tools() -> tuple[Tool, ...]:
    full_schema = json.loads(AGENT_TOOLS.read_text())
    return tuple(Tool(tool["name"], parameters=tool["input_schema"]) for tool in full_schema)


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("kind", ["hermes", "qwen_xml", "llama3", "pythonic", "mistral", "harmony", "gemma"])
def test_the_tools_of_a_coding_agent_compile_together_in_no_time(kind: str, mode: Any) -> None:
    tools, kept = agent_tools(), grammars()
    assert len(tools) == 24
    begun = time.process_time()
    made = shaped(kind, tools=tools, tool_choice=ToolChoice(mode))
    kept.create_guide(made.grammar, made.param)
    assert time.process_time() - begun < CPU_SECONDS
    assert shaped(kind, tools=tools, tool_choice=ToolChoice(mode)).grammar == made.grammar


def test_all_of_an_agents_keywords_are_enforced_in_json() -> None:
    assert shaped("hermes", tools=agent_tools()).relaxed == ()


def walk_through(guide: Guide, text: str) -> None:
    for token in tokens(text):
        assert guide.allowed(END + 1)[token]
        guide.take(token)


def test_a_guide_says_what_may_follow() -> None:
    guide = grammars().create_guide('start: "ab" /[0-9]+/? ', "here")
    assert not guide.allowed(END + 1)[END]
    walk_through(guide, "ab")
    assert guide.allowed(END + 1)[END]
    assert guide.accepting
    assert not guide.complete
    assert guide.lets(tokens("12"))
    assert not guide.lets(tokens("1x"))
    with pytest.raises(EngineFailed):
        guide.take(ord("x"))


def test_a_guide_is_complete_where_nothing_may_follow() -> None:
    guide = grammars().create_guide('start: "ab"', "here")
    walk_through(guide, "ab")
    assert guide.complete


def test_replies_share_nothing_but_the_grammar() -> None:
    kept = grammars()
    one, other = (kept.create_guide('start: "ab" | "cd"', "here") for _ in range(2))
    walk_through(one, "ab")
    walk_through(other, "cd")
    assert len(kept.cache) == 1


def test_what_was_not_used_for_longest_is_forgotten() -> None:
    kept = grammars()
    for i in range(MAX_GRAMMARS + 10):
        kept.create_guide(f'start: "{i}"', "here")
        kept.create_guide('start: "always"', "here")
    assert len(kept.cache) == MAX_GRAMMARS
    assert kept.cache.get('start: "always"') is not None
    assert kept.cache.get('start: "0"') is None


def test_many_different_schemas_leave_memory_flat() -> None:
    kept = grammars()

    def compile_some(first: int, count: int) -> None:
        for i in range(first, first + count):
            schema = {"type": "object", "properties": {f"p{i}": {"type": "string", "pattern": f"^{i}[a-z]+$"}}}
            made = shaped("hermes", constraint=JsonSchema(schema))
            kept.create_guide(made.grammar, made.param)

    compile_some(0, 300)
    before = resident()
    compile_some(300, 700)
    assert resident() - before < 32
    assert kept.cache.size < masks.MAX_BYTES


def resident() -> float:
    """Megabytes."""
    if sys.platform == "linux":
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def test_a_reply_whose_masks_take_too_long_is_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "BASE_SECONDS", -1.0)
    guide = grammars().create_guide(f"start: {json_directive({'type': 'object'})}", "here")
    guide.take(ord("{"))
    with pytest.raises(InvalidSchema, match="too complex") as raised:
        guide.allowed(END + 1)
    assert raised.value.param == "here"


BRANCHING = Regex("|".join(f"(.*{letter}.{{{20 + i}}})" for i, letter in enumerate("abc")))
"""Almost every text leads to a different state."""


def follow_random_text(guide: Guide, count: int) -> None:
    rng = random.Random(1)
    for _ in range(count):
        guide.take(rng.choice([token for token in b"abcdefgh" if guide.allowed(END + 1)[token]]))


def test_grammar_that_becomes_too_complex_is_refused_and_works_for_the_next_reply() -> None:
    made, kept = shaped("hermes", constraint=BRANCHING), grammars()
    with pytest.raises(InvalidSchema, match="too many states") as raised:
        follow_random_text(kept.create_guide(made.grammar, "guided_regex"), 200_000)
    assert raised.value.param == "guided_regex"
    follow_random_text(kept.create_guide(made.grammar, "guided_regex"), 50)


def test_ambiguous_grammar_fails_its_reply_within_its_time_limit() -> None:
    made = shaped("hermes", constraint=Grammar('start: s\ns: s s | s s s | /[a-z]/ | " " | ""'))
    guide = grammars().create_guide(made.grammar, made.param)
    begun = time.thread_time()
    with pytest.raises(InvalidSchema, match="too complex"):
        walk_through(guide, "the reply goes on and on" * 100)
    # Each token costs more than the one before: taking tokens counts like computing masks.
    assert time.thread_time() - begun < 2 * masks.BASE_SECONDS + guide.tokens * masks.TOKEN_SECONDS


@pytest.mark.parametrize("count", [1, 2_001, 10_000])
def test_reply_is_one_of_many_choices(count: int) -> None:
    made = shaped("hermes", constraint=OneOf(tuple(f"choice {i}" for i in range(count))))
    guide = grammars().create_guide(made.grammar, made.param)
    walk_through(guide, f"choice {count - 1}")
    assert guide.accepting
    assert not guide.lets(tokens("x"))


def test_empty_text_is_a_valid_choice() -> None:
    for choices in (("",), ("", "a")):
        made = shaped("hermes", constraint=OneOf(choices))
        guide = grammars().create_guide(made.grammar, made.param)
        assert guide.accepting
        assert guide.lets(tokens("a")) == ("a" in choices)


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        (Regex("[0-9"), 'invalid regex "[0-9": unclosed character class'),
        (
            Regex("(?=a)a"),
            'invalid regex "(?=a)a": look-around, including look-ahead and look-behind, is not supported',
        ),
        (Regex("(" + "a" * 1000), ": unclosed group"),
        (Regex(r"[^\s\S]"), "no character is allowed"),
        (Grammar('start: "a" foo'), 'unknown name: "foo"'),
    ],
)
def test_what_is_wrong_is_told_to_its_end(constraint: Constraint, words: str) -> None:
    made = shaped("hermes", constraint=constraint)
    with pytest.raises(InvalidSchema) as raised:
        grammars().create_guide(made.grammar, made.param)
    assert str(raised.value).endswith(words)
    assert len(str(raised.value).splitlines()) == 1
