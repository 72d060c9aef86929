"""Complete replies against the grammars of all formats, with markers as text and as control tokens."""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from dragoman.core.errors import BadRequest, InvalidSchema
from dragoman.core.request import (
    GenerationRequest,
    Grammar,
    JsonObject,
    JsonSchema,
    OneOf,
    Regex,
    Tool,
    ToolCall,
    ToolChoice,
)
from dragoman.formats import FORMATS
from dragoman.grammar.reply_grammar import build_reply_grammar
from dragoman.grammar.schema_check import find_violations
from dragoman.prompt.plain_text_tools import format_calls
from tests.grammar.matching import Reply, grammar_model

WEATHER = Tool(
    "get_weather",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "unit": {"enum": ["c", "f"]},
            "fast": {"type": "boolean"},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
)
TIME = Tool("get_time")
PERSON = JsonSchema(
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)

ROME = '{"city": "Rome {a,b", "days": 3}'
WRONG = '{"city": "Rome", "days": "x"}'


def written(kind: str, name: str, *arguments: str) -> str:
    """Return calls as a model writes them."""
    if kind == "harmony":
        return "".join(
            f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{given}" for given in arguments
        )
    calls = [ToolCall("", name, given) for given in arguments]
    if kind == "pythonic":
        # The grammar writes strings as in JSON.
        return format_calls(calls, FORMATS[kind]).replace("'", '"')
    if kind in ("json", "plain") and len(calls) > 1:
        return json.dumps([{"name": name, "arguments": json.loads(given)} for given in arguments])
    return format_calls(calls, FORMATS[kind])


CALLS = {kind: (written(kind, "get_weather", ROME), written(kind, "get_weather", WRONG)) for kind in FORMATS}
CALLS["hermes"] = tuple(text.replace("<tool_call>", "<tool_call>\n") for text in CALLS["hermes"])  # type: ignore[assignment]
BARE = {"llama3", "pythonic", "json", "plain"}


def reply(kind: str, **fields: Any) -> Reply:
    return Reply(kind, **{"tools": (WEATHER, TIME), **fields})


@pytest.mark.parametrize("control", [False, True])
@pytest.mark.parametrize("kind", CALLS)
class TestCalls:
    def test_required_call(self, kind: str, control: bool) -> None:
        good, bad = CALLS[kind]
        found = reply(kind, control=control, tool_choice=ToolChoice("required"))
        assert found.accepts(good)
        assert not found.accepts(bad)
        assert found.follows("Hello") == 0
        assert found.relaxed == ()

    def test_named_tool(self, kind: str, control: bool) -> None:
        good, _ = CALLS[kind]
        assert reply(kind, control=control, tool_choice=ToolChoice("named", "get_weather")).accepts(good)
        other = reply(kind, control=control, tool_choice=ToolChoice("named", "get_time"))
        assert not other.accepts(good)

    def test_optional_call_follows_its_schema(self, kind: str, control: bool) -> None:
        if kind == "plain":
            return
        good, bad = CALLS[kind]
        found = reply(kind, control=control)
        final = "<|channel|>final<|message|>" if kind == "harmony" else ""
        assert found.accepts(f"{final}Hello {{}} [x](y) you.")
        assert found.accepts(good)
        assert not found.accepts(bad)
        if kind not in BARE and kind != "harmony":
            assert found.accepts(f"Let me see. {good}")
            assert not found.accepts(f"Let me see. {bad}")

    def test_tool_choice_none_forbids_calls(self, kind: str, control: bool) -> None:
        if kind in ("plain", "harmony"):
            return
        good, _ = CALLS[kind]
        found = reply(kind, control=control, tool_choice=ToolChoice("none"))
        assert found.accepts("Just <text> {and} [more].")
        assert not found.accepts(good)

    def test_constrained_answer_or_call(self, kind: str, control: bool) -> None:
        good, _ = CALLS[kind]
        found = reply(kind, control=control, constraint=PERSON)
        final = "<|channel|>final<|message|>" if kind == "harmony" else ""
        assert found.accepts(final + '{"name": "Ann", "age": 7}')
        assert found.accepts(good)
        assert not found.accepts(final + '{"name": "Ann"}')
        assert not found.accepts(final + "Ann is 7.")


@pytest.mark.parametrize("mode", ["required", "auto"])
@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind not in ("plain", "harmony")])
def test_parallel_calls_are_optional(kind: str, mode: Any) -> None:
    several = written(kind, "get_time", "{}", "{}")
    assert reply(kind, tool_choice=ToolChoice(mode)).accepts(several)
    assert not reply(kind, tool_choice=ToolChoice(mode, parallel=False)).accepts(several)


THOUGHTS = {
    "hermes": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "cohere": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "granite": ("Here is my thought process:", "Here is my response:"),
    "gemma": ("<|channel>thought", "<channel|>"),
    "channel": ("<|channel>thought ", "<|channel>final"),
    "harmony": ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
}


@pytest.mark.parametrize("control", [False, True])
@pytest.mark.parametrize("kind", THOUGHTS)
def test_reasoning_before_constrained_answer(kind: str, control: bool) -> None:
    begin, end = THOUGHTS[kind]
    found = reply(kind, control=control, thinks=True, tools=(), constraint=PERSON)
    answer = '{"name": "Ann", "age": 7}'
    assert found.accepts(f"{begin}\nI think {{.\n{end}\n\n{answer}".replace(f"{end}\n\n", end))
    assert not found.accepts(f"{begin}I think.{end}Ann")
    start = reply(kind, control=control, begins="thought", tools=(), constraint=PERSON)
    assert start.accepts(f"I think.{end}\n\n{answer}".replace(f"{end}\n\n", end))
    assert not start.accepts(answer)
    if kind != "harmony":
        assert found.accepts(answer)
    # The prompt ends inside the answer, after its header if the format has one.
    inside = reply(kind, control=control, begins="answer", tools=(), constraint=PERSON)
    assert inside.accepts(answer)
    assert not inside.accepts("Ann")


def test_reply_that_continues_text_on_a_channel() -> None:
    free = reply("harmony", begins="answer")
    assert free.accepts("Good morning")
    forced = reply("harmony", begins="answer", tool_choice=ToolChoice("required"))
    call = "<|channel|>commentary to=functions.get_time<|constrain|>json<|message|>{}"
    assert not forced.accepts("Good morning")
    assert forced.follows(f"Good morning<|end|><|start|>assistant{call}") > len("Good morning<|end|>")


def test_no_reasoning_for_models_without_it() -> None:
    assert reply("hermes", tools=(), constraint=PERSON).follows("<think>") == 0


def test_reasoning_and_calls_in_text_with_control_tokens() -> None:
    found = reply("mistral", control=True)
    assert found.accepts("[THINK]Hm.[/THINK]Yes.[TOOL_CALLS]get_time[ARGS]{}")
    assert found.accepts("[THINK]Hm.[/THINK]Yes.")


def test_opener_word_is_allowed_in_text() -> None:
    found = reply("phi")
    assert found.accepts("import functools\nfrom functools import cache")
    assert found.follows("functools[x") == len("functools[")


def test_bare_json_without_tool_name_is_text() -> None:
    found = reply("json")
    assert found.accepts('{"name": "Ann", "arguments": 7}')
    assert found.accepts("Look: " + CALLS["json"][1])


SHAPES = [
    (JsonObject(), ['{"a": [1, {"b": null}]}', "{}"], ["[1]", "1", "{} "]),
    (Regex(r"[a-z]{3}/\d+"), ["abc/12"], ["ab/1", "abc/12 "]),
    (Grammar('start: item ("," item)*\nitem: /[a-z]+/\n%ignore / /'), ["a,b", "a, bc"], ["1", "a,"]),
    (OneOf(("yes", "yes, but", 'no "way"')), ["yes", "yes, but", 'no "way"'], ["no", "yes,"]),
]


@pytest.mark.parametrize(("constraint", "good", "bad"), SHAPES)
@pytest.mark.parametrize("thinks", [False, True])
def test_constraint_kinds(constraint: Any, good: list[str], bad: list[str], thinks: bool) -> None:
    found = reply("hermes", tools=(), constraint=constraint, thinks=thinks)
    assert [found.accepts(text) for text in good] == [True] * len(good)
    assert [found.accepts(text) for text in bad] == [False] * len(bad)
    if thinks:
        assert all(found.accepts(f"<think>Hm.</think>\n{text}") for text in good)


def test_whitespace_is_bounded() -> None:
    found = reply("plain", tools=(), constraint=PERSON)
    assert found.accepts('{\n\t"name": "Ann",\n    "age" :  7\n}')
    assert found.follows("{" + " " * 20) == 3
    assert found.follows("{" + "\n" * 20) == 2


def test_unconstrained_request_has_no_grammar() -> None:
    assert build_reply_grammar(GenerationRequest(), grammar_model(FORMATS["hermes"]), begins="reply") is None
    assert (
        build_reply_grammar(GenerationRequest(tools=(TIME,)), grammar_model(FORMATS["plain"]), begins="reply") is None
    )


def test_relaxed_keywords_are_reported_with_paths() -> None:
    loose = {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}}
    tools = (TIME, Tool("b", parameters=loose, path="tools[1].input_schema"))
    schema = JsonSchema({"type": "string", "pattern": "^(?=a)"}, path="output_config.format.schema")
    found = reply("hermes", tools=tools, constraint=schema)
    assert set(found.relaxed) == {
        "output_config.format.schema.pattern",
        "tools[1].input_schema.properties.x.uniqueItems",
    }
    assert {check.capture for check in found.checks} == {"answer", "tool_1"}


def test_invalid_optional_tool_relaxes_only_itself() -> None:
    mistaken = Tool("b", parameters={"type": "object", "properties": {"x": {"type": "bogus"}}}, path="tools[1].here")
    found = reply("hermes", tools=(WEATHER, mistaken))
    assert found.relaxed == ("tools[1].here.properties.x.type",)
    with pytest.raises(InvalidSchema, match="type"):
        reply("hermes", tools=(WEATHER, mistaken), tool_choice=ToolChoice("required"))
    with pytest.raises(InvalidSchema, match="type"):
        reply("hermes", tools=(WEATHER, replace(mistaken, strict=True)))


def test_string_keywords_of_tagged_arguments_are_relaxed() -> None:
    tool = Tool("f", parameters={"type": "object", "properties": {"x": {"type": "string", "pattern": "^a"}}})
    for kind in ("qwen_xml", "gemma"):
        found = reply(kind, tools=(tool,), tool_choice=ToolChoice("required"))
        assert found.relaxed == ("tools.properties.x.pattern",)
    assert reply("pythonic", tools=(tool,)).relaxed == ()


@pytest.mark.parametrize("control", [False, True])
@pytest.mark.parametrize(
    ("kind", "call"),
    [
        ("qwen_xml", "<tool_call><function=f><parameter=x>\n{}\n</parameter></function></tool_call>"),
        ("glm", "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>{}</arg_value></tool_call>"),
        ("gemma", '<|tool_call>call:f{{x:<|"|>{}<|"|>}}<tool_call|>'),
    ],
)
def test_string_keywords_of_tagged_arguments_are_checked(kind: str, call: str, control: bool) -> None:
    for pattern in ("^a", "^(?=a)"):
        tool = Tool("f", parameters={"type": "object", "properties": {"x": {"type": "string", "pattern": pattern}}})
        found = reply(kind, control=control, tools=(tool,))
        assert found.relaxed == ("tools.properties.x.pattern",)
        for value, fine in (("abc", True), ("a\n</b> c", True), ("xyz", False)):
            assert found.accepts(call.format(value))
            assert (find_violations(found.checks, found.matcher.get_captures()) == ()) is fine


def test_invalid_constraints_are_rejected() -> None:
    for constraint in (
        Regex("("),
        Regex("a{1000000}"),
        Regex("a" * 5000),
        Grammar("start: nothing"),
        Grammar('start: "a"{1000000}'),
        Grammar("x" * 100_000),
        OneOf(()),
    ):
        with pytest.raises(InvalidSchema) as raised:
            reply("hermes", tools=(), constraint=constraint).accepts("")
        assert raised.value.param is not None
    with pytest.raises(BadRequest):
        reply("hermes", tool_choice=ToolChoice("named", "other"))


def test_tool_gets_only_declared_parameters() -> None:
    found = reply("hermes", tools=(Tool("f", parameters={"type": "object", "properties": {"a": {"type": "integer"}}}),))
    assert found.accepts('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>')
    assert not found.accepts('<tool_call>{"name": "f", "arguments": {"b": 1}}</tool_call>')
    wide = {"type": "object", "properties": {"a": {}}, "additionalProperties": True}
    found = reply("hermes", tools=(Tool("f", parameters=wide),))
    assert found.accepts('<tool_call>{"name": "f", "arguments": {"b": 1}}</tool_call>')
