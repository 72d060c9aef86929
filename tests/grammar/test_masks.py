"""Grammars over a vocabulary: compile time, caching, and the cost of hostile grammars."""

import gc
import json
import random
import time
import unicodedata
import weakref
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer

from dragoman.core.errors import EngineFailed, InvalidSchema
from dragoman.core.request import Constraint, Grammar, JsonSchema, OneOf, Regex, Tool, ToolChoice
from dragoman.grammar import masks
from dragoman.grammar.masks import MAX_GRAMMARS, GrammarCache, Guide, build_tokenizer
from dragoman.grammar.schema import json_directive
from dragoman.grammar.trial_server import CPU_SECONDS, resident_bytes
from tests.grammar.matching import END, PIECES, Reply, tokenizer, tokens

AGENT_TOOLS = Path(__file__).parent.parent / "data" / "agent_tools.json"


def grammars() -> GrammarCache:
    return GrammarCache(tokenizer())


def guide_for(cache: GrammarCache, **fields: Any) -> Guide:
    """Return a guide for the reply to a request with these fields."""
    reply_grammar = Reply("hermes", **fields)
    return cache.create_guide(reply_grammar.grammar, reply_grammar.param)


def agent_tools() -> tuple[Tool, ...]:
    full_schema = json.loads(AGENT_TOOLS.read_text())
    return tuple(Tool(tool["name"], parameters=tool["input_schema"]) for tool in full_schema)


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("kind", ["hermes", "qwen_xml", "llama3", "pythonic", "mistral", "harmony", "gemma"])
def test_agent_tools_compile_within_the_cpu_limit(kind: str, mode: Any) -> None:
    tools, cache = agent_tools(), grammars()
    assert len(tools) == 24
    start = time.process_time()
    reply_grammar = Reply(kind, tools=tools, tool_choice=ToolChoice(mode))
    cache.create_guide(reply_grammar.grammar, reply_grammar.param)
    assert time.process_time() - start < CPU_SECONDS
    assert Reply(kind, tools=tools, tool_choice=ToolChoice(mode)).grammar == reply_grammar.grammar


def test_agent_tools_are_fully_enforced() -> None:
    assert Reply("hermes", tools=agent_tools()).relaxed == ()


def walk_through(guide: Guide, text: str) -> None:
    for token in tokens(text):
        assert guide.allowed_tokens(END + 1)[token]
        guide.advance(token)


def test_guide_allows_only_matching_tokens() -> None:
    guide = grammars().create_guide('start: "ab" /[0-9]+/? ', "here")
    assert not guide.allowed_tokens(END + 1)[END]
    walk_through(guide, "ab")
    assert guide.allowed_tokens(END + 1)[END]
    assert guide.is_accepting
    assert not guide.is_complete
    assert guide.allows(tokens("12"))
    assert not guide.allows(tokens("1x"))
    with pytest.raises(EngineFailed):
        guide.advance(ord("x"))


def test_guide_is_complete_at_the_end() -> None:
    guide = grammars().create_guide('start: "ab"', "here")
    walk_through(guide, "ab")
    assert guide.is_complete


def follow_masks(vocabulary: LLTokenizer, grammar: str) -> bytes:
    """Return the reply of a model that always takes the first allowed token."""
    guide, reply = GrammarCache(vocabulary).create_guide(grammar, "here"), bytearray()
    while not guide.is_complete:
        token = int(guide.allowed_tokens(END + 1).argmax())
        guide.advance(token)
        reply.append(token)
    return bytes(reply)


@pytest.mark.parametrize("text", ["a\U00040000b", "\U00040000b", "ab\U00040000", "a€b"])
def test_required_text_with_a_byte_that_the_vocabulary_lacks(text: str) -> None:
    """llguidance skips the byte, allows only the token after it, and rejects that token."""
    lacking = frozenset({"\U00040000".encode()[0], "€".encode()[-1]})
    vocabulary = build_tokenizer(
        PIECES, lacking | {END}, frozenset({END}), lambda text: [byte for byte in text.encode() if byte not in lacking]
    )
    with pytest.raises(InvalidSchema, match=r"cannot write|no character is allowed") as raised:
        follow_masks(vocabulary, f'start: "{text}"')
    assert raised.value.param == "here"


def test_required_text_that_the_models_tokenizer_changes() -> None:
    text = "e\u0301t\u00e9 x"
    vocabulary = build_tokenizer(
        PIECES, frozenset({END}), frozenset({END}), lambda text: list(unicodedata.normalize("NFC", text).encode())
    )
    assert follow_masks(vocabulary, f'start: "{text}"') == text.encode()


def test_vocabulary_is_freed_with_its_tokenizer() -> None:
    class Tokenize:
        def __call__(self, text: str) -> list[int]:
            return list(text.encode())

    tokenize = Tokenize()
    alive = weakref.ref(tokenize)
    vocabulary = build_tokenizer(PIECES, frozenset({END}), frozenset({END}), tokenize)
    del vocabulary, tokenize
    gc.collect()
    assert alive() is None


def test_guides_of_one_grammar_are_independent() -> None:
    cache = grammars()
    one, other = (cache.create_guide('start: "ab" | "cd"', "here") for _ in range(2))
    walk_through(one, "ab")
    walk_through(other, "cd")
    assert len(cache.cache) == 1


def test_cache_evicts_least_recently_used_grammar() -> None:
    cache = grammars()
    for i in range(MAX_GRAMMARS + 10):
        cache.create_guide(f'start: "{i}"', "here")
        cache.create_guide('start: "always"', "here")
    assert len(cache.cache) == MAX_GRAMMARS
    assert cache.cache.get('start: "always"') is not None
    assert cache.cache.get('start: "0"') is None


def test_memory_is_bounded_with_many_schemas() -> None:
    cache = grammars()

    def compile_some(first: int, count: int) -> None:
        for i in range(first, first + count):
            schema = {"type": "object", "properties": {f"p{i}": {"type": "string", "pattern": f"^{i}[a-z]+$"}}}
            guide_for(cache, constraint=JsonSchema(schema))

    compile_some(0, 300)
    before = resident_bytes()
    compile_some(300, 700)
    assert resident_bytes() - before < 32e6
    assert cache.cache.size < masks.MAX_BYTES


def test_reply_with_slow_masks_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "BASE_SECONDS", -1.0)
    guide = grammars().create_guide(f"start: {json_directive({'type': 'object'})}", "here")
    guide.advance(ord("{"))
    with pytest.raises(InvalidSchema, match="too complex") as raised:
        guide.allowed_tokens(END + 1)
    assert raised.value.param == "here"


BRANCHING = Regex("|".join(f"(.*{letter}.{{{20 + i}}})" for i, letter in enumerate("abc")))
"""Almost every text leads to a different state."""


def follow_random_text(guide: Guide, count: int) -> None:
    rng = random.Random(1)
    for _ in range(count):
        guide.advance(rng.choice([token for token in b"abcdefgh" if guide.allowed_tokens(END + 1)[token]]))


def test_grammar_that_becomes_too_complex_is_recompiled_for_the_next_reply() -> None:
    cache = grammars()
    with pytest.raises(InvalidSchema, match="smaller repetitions") as raised:
        follow_random_text(guide_for(cache, constraint=BRANCHING), 200_000)
    assert raised.value.param == "constraint"
    follow_random_text(guide_for(cache, constraint=BRANCHING), 50)


def test_error_of_right_recursive_grammar_says_what_to_change() -> None:
    guide = guide_for(grammars(), constraint=Grammar('start: s\ns: "a" s | "a" t | ""\nt: "a" s | "a" t | ""'))
    with pytest.raises(InvalidSchema) as raised:
        walk_through(guide, "a" * 3000)
    problem = f"after {guide.tokens} tokens the reply can no longer be constrained: too complex: too many rules fit"
    assert raised.value.message.startswith(f"constraint: {problem} the text; use fewer alternatives")
    assert "left recursion (`list: item | list item`)" in raised.value.message


def test_ambiguous_grammar_fails_its_reply_within_its_time_limit() -> None:
    guide = guide_for(grammars(), constraint=Grammar('start: s\ns: s s | s s s | /[a-z]/ | " " | ""'))
    start = time.thread_time()
    with pytest.raises(InvalidSchema, match="too complex"):
        walk_through(guide, "the reply goes on and on" * 100)
    # Each token costs more than the one before: consuming tokens counts like computing masks.
    assert time.thread_time() - start < 2 * masks.BASE_SECONDS + guide.tokens * masks.TOKEN_SECONDS


@pytest.mark.parametrize("count", [1, 2_001, 10_000])
def test_reply_is_one_of_many_choices(count: int) -> None:
    guide = guide_for(grammars(), constraint=OneOf(tuple(f"choice {i}" for i in range(count))))
    walk_through(guide, f"choice {count - 1}")
    assert guide.is_accepting
    assert not guide.allows(tokens("x"))


def test_empty_text_is_a_valid_choice() -> None:
    for choices in (("",), ("", "a")):
        guide = guide_for(grammars(), constraint=OneOf(choices))
        assert guide.is_accepting
        assert guide.allows(tokens("a")) == ("a" in choices)


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (Regex("[0-9"), 'invalid regex "[0-9": unclosed character class'),
        (Regex("(?=a)a"), "look-around, including look-ahead and look-behind, is not supported"),
        (Regex("(" + "a" * 1000), ": unclosed group"),
        (Regex(r"[^\s\S]"), "no character is allowed"),
        (Grammar('start: "a" foo'), 'unknown name: "foo"'),
    ],
)
def test_compile_error_message_is_one_complete_line(constraint: Constraint, message: str) -> None:
    with pytest.raises(InvalidSchema) as raised:
        guide_for(grammars(), constraint=constraint)
    assert str(raised.value).endswith(message)
    assert len(str(raised.value).splitlines()) == 1
