"""References in tools whose parameters are written one by one."""

import time
from typing import Any

import pytest

from dragoman.core.errors import InvalidSchema
from dragoman.core.request import Tool, ToolChoice
from dragoman.grammar.lark import MAX_TEXT
from tests.grammar.matching import Reply

MANY = 400


def required_call(kind: str, schema: dict[str, Any]) -> Reply:
    """Return a required call of a tool with these parameters."""
    return Reply(kind, tools=(Tool("f", parameters=schema),), tool_choice=ToolChoice("required"))


def list_parameters(targets: list[str], definitions: dict[str, Any]) -> dict[str, Any]:
    """Parameters that are lists of the referenced definitions."""
    lists = {f"p{i}": {"type": "array", "items": {"$ref": target}} for i, target in enumerate(targets)}
    return {"type": "object", "properties": lists, "$defs": definitions}


def linked_node(i: int, following: int) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {f"value_{i}": {"type": "integer"}, "next": {"$ref": f"#/$defs/d{following}"}},
        "additionalProperties": False,
    }


@pytest.mark.parametrize("kind", ["qwen_xml", "pythonic", "gemma"])
def test_only_reachable_definitions_are_written(kind: str) -> None:
    alone = {f"d{i}": {"type": "object", "properties": {f"v{i}": {"type": "integer"}}} for i in range(MANY)}
    call_grammar = required_call(kind, list_parameters([f"#/$defs/d{i}" for i in range(MANY)], alone))
    assert len(call_grammar.grammar) < 1000 * MANY


@pytest.mark.parametrize("kind", ["qwen_xml", "pythonic"])
def test_shared_definitions_are_written_once(kind: str) -> None:
    ring = {f"d{i}": linked_node(i, (i + 1) % MANY) for i in range(MANY)}
    start = time.process_time()
    call_grammar = required_call(kind, list_parameters(["#/$defs/d7"] * MANY, ring))
    assert len(call_grammar.grammar) < 1000 * MANY
    assert time.process_time() - start < 5


@pytest.mark.parametrize("kind", ["qwen_xml", "pythonic"])
def test_too_long_grammar_is_rejected_early(kind: str) -> None:
    ring = {f"d{i}": linked_node(i, (i + 1) % MANY) for i in range(MANY)}
    start = time.process_time()
    with pytest.raises(InvalidSchema, match=f"more than {MAX_TEXT} characters") as refused:
        required_call(kind, list_parameters([f"#/$defs/d{i}" for i in range(MANY)], ring))
    assert refused.value.param == "tools"
    assert time.process_time() - start < 5


def test_recursive_members() -> None:
    node = {"type": "object", "properties": {f"p{i}": {"$ref": "#/$defs/node"} for i in range(12)}}
    start = time.process_time()
    call_grammar = required_call(
        "gemma", {"type": "object", "properties": {"root": {"$ref": "#/$defs/node"}}, "$defs": {"node": node}}
    )
    assert time.process_time() - start < 5
    assert call_grammar.accepts("<|tool_call>call:f{root:{p1:{p2:{}},p3:{}}}<tool_call|>")
    assert not call_grammar.accepts("<|tool_call>call:f{root:{p1:{p2:5}}}<tool_call|>")


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
def test_reference_kinds(reference: str, definition: dict[str, Any]) -> None:
    node = {
        **definition,
        "type": "object",
        "properties": {"v": {"type": "integer"}, "more": {"type": "array", "items": {"$ref": reference}}},
        "required": ["v"],
        "additionalProperties": False,
    }
    held = {"outer": {"type": "object", "properties": {"inner": node}}} if "outer" in reference else {"node": node}
    call_grammar = required_call("pythonic", list_parameters([reference], held))
    assert call_grammar.accepts('[f(p0=[{"v": 1, "more": [{"v": 2, "more": []}]}])]')
    assert not call_grammar.accepts('[f(p0=[{"v": 1, "more": [{"v": "2"}]}])]')


def test_reference_to_the_whole_schema() -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "inner": {"type": "array", "items": {"$ref": "#"}}},
    }
    call_grammar = required_call("pythonic", schema)
    assert call_grammar.accepts('[f(n=1, inner=[{"n": 2, "inner": []}])]')
    assert not call_grammar.accepts('[f(n=1, inner=[{"n": "2"}])]')


def test_ref_inside_const_is_unchanged() -> None:
    schema = {"type": "object", "properties": {"a": {"const": {"$ref": "#/$defs/x"}}}}
    assert '"const": {"$ref": "#/$defs/x"}' in required_call("pythonic", schema).grammar


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"root": {"v": 1, "next": {"v": 2}}}}</tool_call>'),
        (
            "qwen_xml",
            '<tool_call><function=f><parameter=root>\n{"v": 1, "next": {"v": 2}}\n</parameter></function></tool_call>',
        ),
        ("pythonic", '[f(root={"v": 1, "next": {"v": 2}})]'),
        ("gemma", "<|tool_call>call:f{root:{v:1,next:{v:2}}}<tool_call|>"),
    ],
)
def test_references_resolve_within_their_tool(kind: str, call: str) -> None:
    members = {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}}
    node = {"type": "object", "properties": members, "required": ["v"]}
    root = {"root": {"$ref": "#/$defs/node"}}
    tree = Tool("f", parameters={"type": "object", "properties": root, "$defs": {"node": node}})
    call_grammar = Reply(kind, tools=(Tool("other"), tree), tool_choice=ToolChoice("required"))
    assert call_grammar.accepts(call)
    assert not call_grammar.accepts(call.replace("2", "true"))
