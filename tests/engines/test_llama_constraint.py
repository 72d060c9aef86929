"""Constrained replies of a real model always match their schema, regex or grammar."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from dragoman.core.errors import BadRequest, ConfigError, EngineFailed, InvalidSchema
from dragoman.core.events import Event
from dragoman.core.features import Feature
from dragoman.core.request import (
    Asked,
    Grammar,
    JsonObject,
    JsonSchema,
    Logprobs,
    OneOf,
    Regex,
    Sampling,
    Thinking,
    Tool,
    ToolChoice,
)
from dragoman.engines.llama.binding import Context
from dragoman.engines.llama.engine import LlamaEngine
from dragoman.engines.llama.sampling import TokenMask, TokenSampler
from dragoman.grammar.masks import Guide
from dragoman.prompt import ChatTemplate
from tests.engines.llama_fixtures import (
    IM_END,
    IM_START,
    Collected,
    builder_of,
    chat,
    collect,
    completion,
    model_of,
    running_engine,
)

pytestmark = pytest.mark.anyio

SHORT = {"type": "string", "maxLength": 6}
SMALL = {"type": "integer", "minimum": 0, "maximum": 99}


def closed(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def few(items: Any, least: int = 0) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": least + 1}


def make_schemas() -> list[dict[str, Any]]:
    """Return a hundred different schemas."""
    values: list[dict[str, Any]] = [
        SHORT,
        SMALL,
        {"type": "boolean"},
        {"type": "null"},
        {"enum": ["red", "green", 3, None]},
        {"const": {"a": [1, "x"]}},
        {"type": "string", "pattern": "^[A-Z]{2}-\\d{3}$"},
        {"type": "string", "format": "date"},
        {"type": "string", "format": "ipv4"},
        {"type": "string", "minLength": 3, "maxLength": 5},
        {"type": "number", "minimum": -1.5, "maximum": 2.5, "multipleOf": 0.01},
        {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
        {"type": "integer", "exclusiveMinimum": -5, "exclusiveMaximum": 5},
        {"type": ["integer", "null"], "maximum": 9, "minimum": 0},
        {"anyOf": [SMALL, {"type": "boolean"}]},
        {"oneOf": [closed(kind={"const": "a"}, n=SMALL), closed(kind={"const": "b"}, s=SHORT)]},
        {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 8}]},
        few(SMALL, 1),
        few({"enum": ["x", "y"]}, 2),
        {"type": "array", "prefixItems": [SMALL, {"type": "boolean"}], "items": False, "minItems": 2},
    ]
    wrapped = [closed(value=value) for value in values]
    optional = [{**closed(id=SMALL, extra=value), "required": ["id"]} for value in values]
    paired = [closed(left=value, right=values[(at + 7) % len(values)]) for at, value in enumerate(values)]
    listed = [few(closed(v=value), 1) for value in values]
    return [*values, *wrapped, *optional, *paired, *listed]


def fits(schema: Any, answer: Collected) -> bool:
    validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    return answer.finished.reason == "stop" and bool(validator.is_valid(json.loads(answer.text)))


@pytest.mark.parametrize("temperature", [0, 1.5])
@pytest.mark.engine_options(slots=8, context=256)
async def test_replies_match_a_hundred_schemas(engine: LlamaEngine, temperature: float) -> None:
    schemas = make_schemas()
    assert len({json.dumps(schema) for schema in schemas}) == 100
    sampling = Sampling(temperature=temperature, seed=7)
    if not temperature:
        # Greedy replies vary little, so half of the schemas suffice.
        schemas = schemas[::2]
    answers = await asyncio.gather(
        *(
            collect(engine, completion("JSON:\n", constraint=JsonSchema(schema), sampling=sampling, max_tokens=160))
            for schema in schemas
        )
    )
    wrong = [(schema, answer.text) for schema, answer in zip(schemas, answers, strict=True) if not fits(schema, answer)]
    assert wrong == []


WEATHER = Tool("get_weather", "The weather in a city", closed(city=SHORT, days=SMALL), strict=True)
TIME = Tool("get_time", "The time of day", None)
ROLL = Tool("roll", "Roll dice", {"type": "object", "properties": {"sides": {"enum": [4, 6, 20]}}})


def calls(text: str) -> list[Any]:
    parts = [part.strip() for part in text.split("<tool_call>")]
    assert parts[0] == ""
    assert all(part.endswith("</tool_call>") for part in parts[1:])
    return [json.loads(part.removesuffix("</tool_call>")) for part in parts[1:]]


def is_valid(call: Any) -> bool:
    tool = {"get_weather": WEATHER, "get_time": TIME, "roll": ROLL}[call["name"]]
    schema = {"type": "object"} if tool.parameters is None else tool.parameters
    return set(call) == {"name", "arguments"} and bool(Draft202012Validator(schema).is_valid(call["arguments"]))


@pytest.mark.engine_options(slots=8, context=512)
async def test_forced_tool_calls_match_their_schemas(engine: LlamaEngine) -> None:
    cities = ["Rome", "Paris", "Oslo", "Lima", "Cairo", "Delhi"]

    requests = [
        chat(
            f"What about {city}?",
            tools=(WEATHER, ROLL),
            tool_choice=choice,
            sampling=Sampling(temperature=1.0, seed=seed),
            max_tokens=300,
        )
        for seed, city in enumerate(cities)
        for choice in (
            ToolChoice("required", parallel=seed == 0),
            ToolChoice("named", "get_weather"),
            ToolChoice("named", "roll"),
        )
    ]
    answers = await asyncio.gather(*(collect(engine, request) for request in requests))
    for request, answer in zip(requests, answers, strict=True):
        made = calls(answer.text)
        assert answer.finished.reason == "stop"
        assert made
        assert all(is_valid(call) for call in made)
        assert len(made) == 1 or request.tool_choice == ToolChoice("required", parallel=True)
        assert request.tool_choice.name in (None, *(call["name"] for call in made))


async def test_optional_tool_call_matches_its_schema(engine: LlamaEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    real = TokenSampler.pick

    free = await collect(engine, chat("Say hello.", tools=(ROLL,), max_tokens=12))
    assert free.text
    assert "<tool_call>" not in free.text
    begun = list(await engine.tokenize("Sure. <tool_call>", special=False))

    def pick_forced(sampler: TokenSampler, context: Context, row: int, allowed: TokenMask | None = None) -> int:
        picked = real(sampler, context, row, allowed)
        assert allowed is not None
        assert not begun or allowed[begun[0]]
        return begun.pop(0) if begun else picked

    monkeypatch.setattr(TokenSampler, "pick", pick_forced)
    answer = await collect(engine, chat("Roll!", tools=(ROLL,), tool_choice=ToolChoice(parallel=False), max_tokens=60))
    head, _, rest = answer.text.partition("<tool_call>")
    assert head == "Sure. "
    assert [is_valid(call) for call in calls(f"<tool_call>{rest}")] == [True]
    assert answer.finished.reason == "stop"


async def test_all_kinds_of_constraints(engine: LlamaEngine) -> None:
    async def answer(constraint: Any) -> str:
        found = await collect(engine, chat("Answer.", constraint=constraint, max_tokens=60))
        assert found.finished.reason == "stop"
        return found.text

    assert await answer(OneOf(("yes", "no"))) in ("yes", "no")
    assert (await answer(Regex(r"\d{3}-[a-f]{2}")))[3] == "-"
    assert set(await answer(Grammar('start: ("ab" | "c"){2,4}'))) <= {"a", "b", "c"}
    brief = Sampling(temperature=0, logit_bias={(await engine.tokenize("}", special=False))[0]: 50})
    found = await collect(engine, chat("JSON.", constraint=JsonObject(), max_tokens=60, sampling=brief))
    assert isinstance(json.loads(found.text), dict)


async def test_constraint_overrides_other_parameters(engine: LlamaEngine) -> None:
    schema = closed(n=SMALL)
    brace, quote = [await engine.tokenize(text, special=False) for text in ("}", '"')]
    for fields in (
        {"ignore_eos": True},
        {"stop_token_ids": (brace[0], quote[0])},
        {"sampling": Sampling(temperature=0, logit_bias={brace[0]: -100, IM_END: 100})},
        {"sampling": Sampling(temperature=0, repetition_penalty=2.0, frequency_penalty=2, presence_penalty=2)},
        {"sampling": Sampling(temperature=2, top_k=1, top_p=0.01, min_p=0.9, seed=1)},
        {"logprobs": Logprobs(top=3)},
    ):
        answer = await collect(engine, chat("Count.", constraint=JsonSchema(schema), max_tokens=60, **fields))
        assert fits(schema, answer), fields
    many = JsonSchema({"type": "array", "items": SMALL})
    endless = await collect(engine, chat("Count.", constraint=many, max_tokens=200, ignore_eos=True))
    assert endless.finished.reason in ("stop", "length")


async def test_token_limit_truncates_a_constrained_reply(engine: LlamaEngine) -> None:
    cut = await collect(engine, chat("JSON.", constraint=JsonSchema(closed(a=SHORT, b=SHORT)), max_tokens=4))
    assert cut.finished.reason == "length"
    with pytest.raises(json.JSONDecodeError):
        json.loads(cut.text)


async def test_unenforced_keyword_is_reported_and_checked(engine: LlamaEngine) -> None:
    asked = (Asked(Feature.CONSTRAINT, "response_format"),)
    for pattern, fine in (("^(?=[a-z]*$)", True), ("^(?=[0-9]{9}$)", False)):
        schema = {"type": "string", "minLength": 3, "maxLength": 3, "enum": ["abc"], "pattern": pattern}
        answer = await collect(engine, chat("Say abc.", constraint=JsonSchema(schema), asked=asked, max_tokens=20))
        assert json.loads(answer.text) == "abc"
        assert answer.started.ignored == ("response_format.pattern",)
        assert (answer.finished.warnings == ()) is fine


async def test_invalid_constraints_do_not_affect_other_requests(engine: LlamaEngine) -> None:
    other = asyncio.create_task(collect(engine, completion(max_tokens=40)))
    for constraint in (JsonSchema({"type": "any"}), JsonSchema({"$ref": "#"}), Regex("("), Grammar("start: x")):
        with pytest.raises(InvalidSchema):
            await collect(engine, chat("Hi.", constraint=constraint))
    with pytest.raises(BadRequest):
        await collect(engine, chat("Hi.", tools=(TIME,), tool_choice=ToolChoice("named", "none")))
    assert (await other).text.startswith(" Paris")


async def test_failed_grammar_fails_only_its_request(engine: LlamaEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    schema, real = closed(a=SMALL), Guide.advance

    def failing(guide: Guide, token: int) -> None:
        if guide.tokens == 2:
            raise EngineFailed("the reply left its shape")
        real(guide, token)

    request = completion(constraint=JsonSchema(schema), max_tokens=40)
    other = asyncio.create_task(collect(engine, completion(max_tokens=20)))
    with monkeypatch.context() as patched:
        patched.setattr(Guide, "advance", failing)
        with pytest.raises(EngineFailed):
            await collect(engine, request)
    assert len((await other).tokens) == 20
    assert fits(schema, await collect(engine, request))


async def test_thinking_before_a_constrained_reply(engine: LlamaEngine) -> None:
    schema, thinking = closed(n=SMALL), Thinking(enabled=True, budget_tokens=10)
    opener = (await engine.tokenize("<think>", special=False))[0]
    # The bias makes the model think, and the budget ends the thinking.
    lead = Sampling(temperature=0, logit_bias={opener: 30})
    request = chat("A number.", constraint=JsonSchema(schema), thinking=thinking, sampling=lead, max_tokens=120)
    answer = await collect(engine, request)
    assert answer.text.startswith("<think>")
    thought, _, rest = answer.text.partition("</think>")
    assert len(await engine.tokenize(thought, special=False)) < 20
    assert Draft202012Validator(schema).is_valid(json.loads(rest))


async def test_response_format_together_with_tools(engine: LlamaEngine) -> None:
    schema = closed(n=SMALL)
    request = chat("A number.", tools=(WEATHER,), constraint=JsonSchema(schema), max_tokens=150)
    answer = await collect(engine, request)
    if answer.text.startswith("<tool_call>"):
        assert all(is_valid(call) for call in calls(answer.text))
    else:
        assert fits(schema, answer)


THINKING = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"""


async def test_thinking_that_the_prompt_has_opened(engine: LlamaEngine) -> None:
    request_builder, model = builder_of(engine), model_of(engine)
    request_builder.template = ChatTemplate(
        THINKING, bos="<|im_start|>", eos="<|im_end|>", control=model.control, format=request_builder.format
    )
    schema = closed(n=SMALL)
    for thinking in (Thinking(budget_tokens=6), Thinking(effort="none")):
        request = chat("A number.", constraint=JsonSchema(schema), thinking=thinking, max_tokens=100)
        answer = await collect(engine, request)
        assert answer.started.thinking
        thought, closer, rest = answer.text.partition("</think>")
        assert closer
        assert len(await engine.tokenize(thought, special=False)) <= 8
        assert Draft202012Validator(schema).is_valid(json.loads(rest))
    free = await collect(engine, chat("Hello.", thinking=Thinking(budget_tokens=6), max_tokens=40))
    assert "\n</think>\n\n" in free.text


async def test_format_markers_that_are_control_tokens_are_visible(engine: LlamaEngine) -> None:
    model = model_of(engine)
    token = next(token for token in sorted(model.hidden - model.ends) if token != IM_START)
    lead = Sampling(temperature=0, logit_bias={token: 100})
    hidden = await collect(engine, completion(sampling=lead, max_tokens=1))
    assert (hidden.text, hidden.tokens) == ("", (token,))
    model.show([model.name(token), model.name(IM_END)])
    shown = await collect(engine, completion(sampling=lead, max_tokens=1))
    assert shown.text == model.name(token)
    assert model.text(IM_END) == b""


async def test_unknown_format_is_a_config_error(model_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"klingon.*hermes"):
        async with running_engine(model_path, format="klingon"):
            pass


@pytest.mark.parametrize("kind", ["llama3", "pythonic", "qwen_xml", "mistral_array", "glm"])
async def test_forced_tool_call_in_each_format(model_path: Path, kind: str) -> None:
    async with running_engine(model_path, format=kind, slots=1) as engine:
        choice = ToolChoice("required", parallel=False)
        answer = await collect(engine, chat("Roll!", tools=(WEATHER,), tool_choice=choice, max_tokens=100))
        assert answer.finished.reason == "stop"
        assert "get_weather" in answer.text


async def test_grammar_that_becomes_too_complex_in_mid_reply_is_an_invalid_schema(engine: LlamaEngine) -> None:
    # Any letter may begin the run of 200 others, so the automaton exceeds its limits after a few tokens.
    request = chat("Go on.", constraint=Regex("(.*[a-m].{200}x)"), sampling=Sampling(temperature=0), max_tokens=60)
    received: list[Event] = []
    with pytest.raises(InvalidSchema, match="can no longer be constrained"):
        await engine.deliver(request, received.extend)
    assert len(received) >= 2
    assert len((await collect(engine, completion(max_tokens=4))).tokens) == 4
