"""Grammars over a vocabulary: how long they take, how much is kept, and what hostile ones cost."""

import json
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dragoman.constrain import compiled
from dragoman.constrain.compiled import MOST_GRAMMARS, Grammars, Guide
from dragoman.constrain.grammar import Shape, shape
from dragoman.constrain.schema import inline
from dragoman.conversation import Constraint, GenerationRequest, Grammar, JsonSchema, Regex, Tool, ToolChoice
from dragoman.errors import DragomanError, EngineFailed, InvalidSchema
from dragoman.formats import FORMATS
from tests.constrain.matching import END, speaker, tokenizer, tokens

AGENT_TOOLS = Path(__file__).parent.parent / "data" / "agent_tools.json"


def grammars() -> Grammars:
    return Grammars(tokenizer())


def shaped(kind: str, **fields: Any) -> Shape:
    found = shape(GenerationRequest(**fields), speaker(FORMATS[kind]), opened=False)
    assert found is not None
    return found


def agent_tools() -> tuple[Tool, ...]:
    told = json.loads(AGENT_TOOLS.read_text())
    return tuple(Tool(tool["name"], parameters=tool["input_schema"]) for tool in told)


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("kind", ["hermes", "qwen_xml", "llama3", "pythonic", "mistral", "harmony", "gemma"])
def test_the_tools_of_a_coding_agent_compile_together_in_no_time(kind: str, mode: Any) -> None:
    tools, kept = agent_tools(), grammars()
    assert len(tools) == 24
    begun = time.process_time()
    made = shaped(kind, tools=tools, tool_choice=ToolChoice(mode))
    kept.guide(made.grammar, made.param)
    assert time.process_time() - begun < 4
    begun = time.process_time()
    again = shaped(kind, tools=tools, tool_choice=ToolChoice(mode))
    kept.guide(again.grammar, again.param)
    assert time.process_time() - begun < 0.4
    assert len(kept.kept) == 1


def test_all_of_an_agents_keywords_are_enforced_in_json() -> None:
    assert shaped("hermes", tools=agent_tools()).relaxed == ()


def walk_through(guide: Guide, text: str) -> None:
    for token in tokens(text):
        assert guide.allowed(END + 1)[token]
        guide.take(token)


def test_a_guide_says_what_may_follow() -> None:
    guide = grammars().guide('start: "ab" /[0-9]+/? ', "here")
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
    guide = grammars().guide('start: "ab"', "here")
    walk_through(guide, "ab")
    assert guide.complete


def test_replies_share_nothing_but_the_grammar() -> None:
    kept = grammars()
    one, other = (kept.guide('start: "ab" | "cd"', "here") for _ in range(2))
    walk_through(one, "ab")
    walk_through(other, "cd")
    assert len(kept.kept) == 1


def test_what_was_not_used_for_longest_is_forgotten() -> None:
    kept = grammars()
    for at in range(MOST_GRAMMARS + 10):
        kept.guide(f'start: "{at}"', "here")
        kept.guide('start: "always"', "here")
    assert len(kept.kept) == MOST_GRAMMARS
    assert kept.kept.get('start: "always"') is not None
    assert kept.kept.get('start: "0"') is None


def test_many_different_schemas_leave_memory_flat() -> None:
    kept = grammars()

    def compile_some(first: int, count: int) -> None:
        for at in range(first, first + count):
            schema = {"type": "object", "properties": {f"p{at}": {"type": "string", "pattern": f"^{at}[a-z]+$"}}}
            made = shaped("hermes", constraint=JsonSchema(schema))
            kept.guide(made.grammar, made.param)

    compile_some(0, 300)
    before = resident()
    compile_some(300, 500)
    assert resident() - before < 16
    assert kept.kept.size < compiled.MOST_TEXT


def resident() -> float:
    """Megabytes."""
    if sys.platform == "linux":
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def members(count: int, schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{at}": schema for at in range(count)}}


HOSTILE: dict[str, Constraint] = {
    "many properties": JsonSchema({"type": "object", "properties": {f"o{at}": members(900, {}) for at in range(4)}}),
    "long enum": JsonSchema({"enum": ["x" * 20 + str(at) for at in range(8000)]}),
    "long text": JsonSchema({"const": "x" * 200_000}),
    "huge": JsonSchema({"const": "x" * 1_000_000}),
    "repeats": JsonSchema({"type": "string", "pattern": "^(a{1000}){1000}$"}),
    "backtracking": JsonSchema({"type": "string", "pattern": "(a+)+b"}),
    "heavy patterns": JsonSchema(
        members(60, {"type": "string", "pattern": "(.*a.{1,400}b|[a-z]{9}c.*d{5,500})*x{1,900}"})
    ),
    "divisors": JsonSchema({"allOf": [{"type": "integer", "multipleOf": 9967 - at} for at in range(30)]}),
    "products": JsonSchema(
        {"allOf": [{"anyOf": [members(1, {"const": [at, other]}) for other in range(8)]} for at in range(7)]}
    ),
    "references": JsonSchema(
        {
            "$defs": {
                f"d{at}": {
                    "type": "object",
                    "properties": {f"r{other}": {"$ref": f"#/$defs/d{at * other % 60}"} for other in range(60)},
                }
                for at in range(60)
            },
            "$ref": "#/$defs/d0",
        }
    ),
    "a chain of references": JsonSchema(
        {"$defs": {f"d{at}": {"$ref": f"#/$defs/d{(at + 1) % 900}"} for at in range(900)}, "$ref": "#/$defs/d0"}
    ),
    "nested counts": JsonSchema({"type": "array", "minItems": 10**6, "items": {"type": "array", "minItems": 10**6}}),
    "long strings": JsonSchema({"type": "string", "minLength": 10**9}),
    "expression": Regex("(.*a.{500})*(b.{900}c)*d"),
    "deep expression": Regex("(" * 2000 + "a" + ")" * 2000),
    "deep grammar": Grammar("start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
    "ambiguous grammar": Grammar('start: s\ns: s s | s s s | "a" | ""'),
    "repeating grammar": Grammar('start: A\nA: B{9999}\nB: C{9999}\nC: "x"{9999}'),
    "endless grammar": Grammar('start: a\na: a "x"'),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_shapes_cost_little_and_hold_nobody_up(name: str) -> None:
    waits = Waits()
    # Of the processor's time: what else the machine does is not the shape's fault.
    begun = time.process_time()
    try:
        made = shaped("hermes", constraint=HOSTILE[name])
        guide = grammars().guide(made.grammar, made.param)
        for _ in range(20):
            allowed = guide.allowed(END + 1)
            guide.take(next(token for token in (*b'"{[ax:1', *range(END)) if allowed[token]))
    except (StopIteration, DragomanError) as error:
        assert not isinstance(error, DragomanError) or isinstance(error, InvalidSchema | EngineFailed)  # noqa: PT017
    assert time.process_time() - begun < 2
    assert waits.longest() < 0.5


class Waits(threading.Thread):
    """Another thread, and how long it was kept from running."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most = 0.0
        self.done = False
        self.start()

    def run(self) -> None:
        last = time.monotonic()
        while not self.done:
            time.sleep(0.001)
            now = time.monotonic()
            self.most = max(self.most, now - last)
            last = now

    def longest(self) -> float:
        self.done = True
        self.join()
        return self.most


def test_a_reply_whose_masks_take_too_long_is_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "SPARE_SECONDS", -1.0)
    guide = grammars().guide(f"start: {inline({'type': 'object'})}", "here")
    guide.take(ord("{"))
    with pytest.raises(EngineFailed, match="too complex"):
        guide.allowed(END + 1)


def test_a_grammar_that_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "COMPILE_SECONDS", -1.0)
    with pytest.raises(InvalidSchema, match="too complex") as raised:
        grammars().guide('start: "a"', "response_format")
    assert raised.value.param == "response_format"


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        (Regex("[0-9"), 'invalid regex "[0-9": unclosed character class'),
        (
            Regex("(?=a)a"),
            'invalid regex "(?=a)a": look-around, including look-ahead and look-behind, is not supported',
        ),
        (Regex("(" + "a" * 1000), ": unclosed group"),
        (Regex(r"[^\s\S]"), "no character is let through"),
        (Grammar('start: "a" foo'), 'unknown name: "foo"'),
    ],
)
def test_what_is_wrong_is_told_to_its_end(constraint: Constraint, words: str) -> None:
    made = shaped("hermes", constraint=constraint)
    with pytest.raises(InvalidSchema) as raised:
        grammars().guide(made.grammar, made.param)
    assert str(raised.value).endswith(words)
    assert len(str(raised.value).splitlines()) == 1
