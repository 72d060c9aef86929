"""References of tools whose parameters are written one by one: what they mean, and how much of it is written."""

import time
from typing import Any

import pytest

from dragoman.core.errors import InvalidSchema
from dragoman.core.request import GenerationRequest, Tool, ToolChoice
from dragoman.formats import FORMATS
from dragoman.grammar.lark import MAX_TEXT
from dragoman.grammar.reply_grammar import Shape, build_reply_grammar
from dragoman.grammar.subschemas import Subschemas
from tests.grammar.matching import accepts, speaker

MANY = 400


def called(kind: str, schema: dict[str, Any]) -> Shape:
    request = GenerationRequest(tools=(Tool("f", parameters=schema),), tool_choice=ToolChoice("required"))
    made = build_reply_grammar(request, speaker(FORMATS[kind]), opened=False)
    assert made is not None
    return made


def listing(targets: list[str], definitions: dict[str, Any]) -> dict[str, Any]:
    """Parameters that are lists of what each refers to."""
    lists = {f"p{i}": {"type": "array", "items": {"$ref": target}} for i, target in enumerate(targets)}
    return {"type": "object", "properties": lists, "$defs": definitions}


def linked(i: int, following: int) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {f"value_{i}": {"type": "integer"}, "next": {"$ref": f"#/$defs/d{following}"}},
        "additionalProperties": False,
    }


@pytest.mark.parametrize("kind", ["qwen_xml", "pythonic", "gemma"])
def test_only_what_is_reached_is_written(kind: str) -> None:
    alone = {f"d{i}": {"type": "object", "properties": {f"v{i}": {"type": "integer"}}} for i in range(MANY)}
    made = called(kind, listing([f"#/$defs/d{i}" for i in range(MANY)], alone))
    assert len(made.grammar) < 1000 * MANY


@pytest.mark.parametrize("kind", ["qwen_xml", "pythonic"])
def test_what_many_refer_to_is_written_once(kind: str) -> None:
    ring = {f"d{i}": linked(i, (i + 1) % MANY) for i in range(MANY)}
    begun = time.process_time()
    made = called(kind, listing(["#/$defs/d7"] * MANY, ring))
    assert len(made.grammar) < 1000 * MANY
    assert time.process_time() - begun < 5


@pytest.mark.parametrize("kind", ["qwen_xml", "pythonic"])
def test_a_grammar_that_would_be_too_long_is_not_written(kind: str) -> None:
    ring = {f"d{i}": linked(i, (i + 1) % MANY) for i in range(MANY)}
    begun = time.process_time()
    with pytest.raises(InvalidSchema, match=f"more than {MAX_TEXT} characters") as refused:
        called(kind, listing([f"#/$defs/d{i}" for i in range(MANY)], ring))
    assert refused.value.param == "tools"
    assert time.process_time() - begun < 5


def test_members_that_refer_to_what_they_are_in() -> None:
    node = {"type": "object", "properties": {f"p{i}": {"$ref": "#/$defs/node"} for i in range(12)}}
    begun = time.process_time()
    made = called(
        "gemma", {"type": "object", "properties": {"root": {"$ref": "#/$defs/node"}}, "$defs": {"node": node}}
    )
    assert time.process_time() - begun < 5
    assert accepts(made.grammar, "<|tool_call>call:f{root:{p1:{p2:{}},p3:{}}}<tool_call|>")
    assert not accepts(made.grammar, "<|tool_call>call:f{root:{p1:{p2:5}}}<tool_call|>")


@pytest.mark.parametrize(
    ("reference", "definition"),
    [
        ("#/$defs/node", {}),
        ("#/%24defs/node", {}),
        ("#node", {"$anchor": "node"}),
        ("#/$defs/outer/properties/inner", {}),
        ("node.json", {"$id": "node.json"}),
    ],
)
def test_references_of_every_kind(reference: str, definition: dict[str, Any]) -> None:
    node = {
        **definition,
        "type": "object",
        "properties": {"v": {"type": "integer"}, "more": {"type": "array", "items": {"$ref": reference}}},
        "required": ["v"],
        "additionalProperties": False,
    }
    held = {"outer": {"type": "object", "properties": {"inner": node}}} if "outer" in reference else {"node": node}
    made = called("pythonic", listing([reference], held))
    assert accepts(made.grammar, '[f(p0=[{"v": 1, "more": [{"v": 2, "more": []}]}])]')
    assert not accepts(made.grammar, '[f(p0=[{"v": 1, "more": [{"v": "2"}]}])]')


def test_a_parameter_that_refers_to_all_of_them() -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "inner": {"type": "array", "items": {"$ref": "#"}}},
    }
    made = called("pythonic", schema)
    assert accepts(made.grammar, '[f(n=1, inner=[{"n": 2, "inner": []}])]')
    assert not accepts(made.grammar, '[f(n=1, inner=[{"n": "2"}])]')


def test_a_word_that_is_no_reference_stays() -> None:
    schema = {"const": {"$ref": "#/$defs/x"}}
    assert '{"$ref": "#/$defs/x"}' in Subschemas({"properties": {"a": schema}}).json_directive(schema)
