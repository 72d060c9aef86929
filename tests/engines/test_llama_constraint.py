"""Constrained replies of a real model always match their schema, regex or grammar."""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator

from dragoman.core.errors import BadRequest, ConfigError, EngineFailed, InvalidSchema
from dragoman.core.events import Finished
from dragoman.core.request import (
    Asked,
    GenerationRequest,
    Grammar,
    JsonObject,
    JsonSchema,
    Logprobs,
    Message,
    OneOf,
    Regex,
    Sampling,
    Text,
    Thinking,
    Tool,
    ToolChoice,
)
from dragoman.engines.llama.binding import Context
from dragoman.engines.llama.engine import LlamaEngine
from dragoman.engines.llama.options import LlamaOptions
from dragoman.engines.llama.sampling import TokenMask, TokenPicker
from dragoman.grammar.masks import Guide
from dragoman.prompt import ChatTemplate
from tests.engines.llama_fixtures import IM_END, IM_START, Collected, Run, chat, collect, completion

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
def test_replies_match_a_hundred_schemas(with_engine: Run, temperature: float) -> None:
    async def test(engine: LlamaEngine) -> None:
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
        wrong = [
            (schema, answer.text) for schema, answer in zip(schemas, answers, strict=True) if not fits(schema, answer)
        ]
        assert wrong == []

    with_engine(test, slots=8, context=256)


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


def test_forced_tool_calls_match_their_schemas(with_engine: Run) -> None:
    cities = ["Rome", "Paris", "Oslo", "Lima", "Cairo", "Delhi"]

    async def test(engine: LlamaEngine) -> None:
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

    with_engine(test, slots=8, context=512)


def test_optional_tool_call_matches_its_schema(with_engine: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = TokenPicker.pick

    async def test(engine: LlamaEngine) -> None:
        free = await collect(engine, chat("Say hello.", tools=(ROLL,), max_tokens=12))
        assert free.text
        assert "<tool_call>" not in free.text
        begun = list(await engine.tokenize("Sure. <tool_call>", special=False))

        def pick_forced(picker: TokenPicker, context: Context, row: int, allowed: TokenMask | None = None) -> int:
            picked = real(picker, context, row, allowed)
            assert allowed is not None
            assert not begun or allowed[begun[0]]
            return begun.pop(0) if begun else picked

        monkeypatch.setattr(TokenPicker, "pick", pick_forced)
        answer = await collect(
            engine, chat("Roll!", tools=(ROLL,), tool_choice=ToolChoice(parallel=False), max_tokens=60)
        )
        head, _, rest = answer.text.partition("<tool_call>")
        assert head == "Sure. "
        assert [is_valid(call) for call in calls(f"<tool_call>{rest}")] == [True]
        assert answer.finished.reason == "stop"

    with_engine(test)


def test_all_kinds_of_constraints(with_engine: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
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

    with_engine(test)


def test_constraint_overrides_other_parameters(with_engine: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
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

    with_engine(test)


def test_logprobs_do_not_depend_on_the_constraint(with_engine: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
        free = await collect(engine, completion(max_tokens=1, logprobs=Logprobs(top=2)))
        constrained = await collect(engine, completion(max_tokens=1, logprobs=Logprobs(top=2), constraint=Regex("Q+")))
        assert constrained.text.startswith("Q")
        assert constrained.logprobs[0].top == free.logprobs[0].top
        assert (constrained.logprobs[0].logprob or 0) < (free.logprobs[0].logprob or 0)

    with_engine(test)


def test_token_limit_truncates_a_constrained_reply(with_engine: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
        cut = await collect(engine, chat("JSON.", constraint=JsonSchema(closed(a=SHORT, b=SHORT)), max_tokens=4))
        assert cut.finished.reason == "length"
        with pytest.raises(json.JSONDecodeError):
            json.loads(cut.text)

    with_engine(test)


def test_unenforced_keyword_is_reported_and_checked(with_engine: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
        asked = (Asked("constraint", "response_format"),)
        for pattern, fine in (("^(?=[a-z]*$)", True), ("^(?=[0-9]{9}$)", False)):
            schema = {"type": "string", "minLength": 3, "maxLength": 3, "enum": ["abc"], "pattern": pattern}
            answer = await collect(engine, chat("Say abc.", constraint=JsonSchema(schema), asked=asked, max_tokens=20))
            assert json.loads(answer.text) == "abc"
            assert answer.started.ignored == ("response_format.pattern",)
            assert (answer.finished.warnings == ()) is fine

    with_engine(test)


def test_invalid_constraints_do_not_affect_other_requests(with_engine: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
        other = asyncio.create_task(collect(engine, completion(max_tokens=40)))
        for constraint in (JsonSchema({"type": "any"}), JsonSchema({"$ref": "#"}), Regex("("), Grammar("start: x")):
            with pytest.raises(InvalidSchema):
                await collect(engine, chat("Hi.", constraint=constraint))
        with pytest.raises(BadRequest):
            await collect(engine, chat("Hi.", tools=(TIME,), tool_choice=ToolChoice("named", "none")))
        assert (await other).text.startswith(" Paris")

    with_engine(test)


def test_failed_grammar_fails_only_its_request(with_engine: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Guide.take

    def failing(guide: Guide, token: int) -> None:
        if guide.tokens == 2:
            raise EngineFailed("the reply left its shape")
        real(guide, token)

    async def test(engine: LlamaEngine) -> None:
        other = asyncio.create_task(collect(engine, completion(max_tokens=20)))
        monkeypatch.setattr(Guide, "take", failing)
        with pytest.raises(EngineFailed):
            await collect(engine, completion(constraint=JsonSchema(closed(a=SHORT)), max_tokens=60))
        monkeypatch.setattr(Guide, "take", real)
        assert len((await other).tokens) == 20
        assert fits(
            closed(a=SMALL), await collect(engine, completion(constraint=JsonSchema(closed(a=SMALL)), max_tokens=40))
        )

    with_engine(test)


def test_thinking_before_a_constrained_reply(with_engine: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
        schema = closed(n=SMALL)
        opener = (await engine.tokenize("<think>", special=False))[0]
        # The bias makes the model think, and the budget ends the thinking.
        lead = Sampling(temperature=0, logit_bias={opener: 30})
        asked = chat(
            "Think of a number.",
            constraint=JsonSchema(schema),
            thinking=Thinking(enabled=True, budget_tokens=10),
            sampling=lead,
            max_tokens=120,
        )
        answer = await collect(engine, asked)
        assert answer.text.startswith("<think>")
        thought, _, rest = answer.text.partition("</think>")
        assert len(await engine.tokenize(thought, special=False)) < 20
        assert Draft202012Validator(schema).is_valid(json.loads(rest))

    with_engine(test)


def test_thinking_budget_without_a_constraint(with_engine: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
        opener = (await engine.tokenize("<think>", special=False))[0]
        lead = Sampling(temperature=0, logit_bias={opener: 12})

        def thought(**fields: Any) -> GenerationRequest:
            return chat("Hm.", thinking=Thinking(**fields), sampling=lead, max_tokens=60)

        free = await collect(engine, thought(budget_tokens=50_000))
        short = await collect(engine, thought(budget_tokens=5))
        none = await collect(engine, thought(effort="none"))
        if "<think>" in free.text:
            assert "\n</think>\n\n" in short.text
            assert "<think>\n</think>" in none.text

    with_engine(test)


def test_concurrent_constrained_replies(with_engine: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
        schema = closed(color={"enum": ["red", "green", "blue"]}, n=SMALL)
        asked = [
            chat(
                "A colour.", constraint=JsonSchema(schema), sampling=Sampling(temperature=1.5, seed=seed), max_tokens=60
            )
            for seed in range(4)
        ]
        answers = await asyncio.gather(*(collect(engine, request) for request in asked))
        assert all(fits(schema, answer) for answer in answers)
        assert len({answer.text for answer in answers}) > 1

    with_engine(test, slots=4)


def test_response_format_together_with_tools(with_engine: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
        schema = closed(n=SMALL)
        request = chat("A number.", tools=(WEATHER,), constraint=JsonSchema(schema), max_tokens=150)
        answer = await collect(engine, request)
        if answer.text.startswith("<tool_call>"):
            assert all(is_valid(call) for call in calls(answer.text))
        else:
            assert fits(schema, answer)

    with_engine(test)


def test_render(with_engine: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
        request = GenerationRequest(messages=(Message("user", (Text("Hello <|im_end|>"),)),), tools=(WEATHER,))
        rendered = await engine.render(request)
        assert rendered.format == "hermes"
        assert "Hello <|im_end|>" in rendered.text
        assert "get_weather" in rendered.text
        assert await engine.detokenize(rendered.tokens) == rendered.text
        (info,) = engine.models()
        assert info.format == "hermes"
        assert {"tools", "constraint", "thinking", "render"} <= engine.supports()
        reply = await collect(engine, msgspec.structs.replace(request, max_tokens=1))
        assert reply.started.prompt_tokens == len(rendered.tokens)
        assert isinstance(reply.finished, Finished)

    with_engine(test)


THINKING = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"""


def test_thinking_that_the_prompt_has_opened(with_engine: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
        assert engine.loaded is not None
        request_builder, model = engine.loaded.request_builder, engine.loaded.request_builder.model
        request_builder.template = ChatTemplate(
            THINKING, bos="<|im_start|>", eos="<|im_end|>", control=model.control, format=request_builder.format
        )
        schema = closed(n=SMALL)
        for thinking in (Thinking(budget_tokens=6), Thinking(effort="none")):
            asked = chat("A number.", constraint=JsonSchema(schema), thinking=thinking, max_tokens=100)
            answer = await collect(engine, asked)
            assert answer.started.thinking
            thought, closer, rest = answer.text.partition("</think>")
            assert closer
            assert len(await engine.tokenize(thought, special=False)) <= 8
            assert Draft202012Validator(schema).is_valid(json.loads(rest))
        free = await collect(engine, chat("Hello.", thinking=Thinking(budget_tokens=6), max_tokens=40))
        assert "\n</think>\n\n" in free.text

    with_engine(test)


def test_format_markers_that_are_control_tokens_are_visible(with_engine: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
        assert engine.model is not None
        model = engine.model
        token = next(token for token in sorted(model.hidden - model.ends) if token != IM_START)
        lead = Sampling(temperature=0, logit_bias={token: 100})
        hidden = await collect(engine, completion(sampling=lead, max_tokens=1))
        assert (hidden.text, hidden.tokens) == ("", (token,))
        model.show([model.name(token), model.name(IM_END)])
        shown = await collect(engine, completion(sampling=lead, max_tokens=1))
        assert shown.text == model.name(token)
        assert model.text(IM_END) == b""

    with_engine(test)


def test_unknown_format_is_a_config_error(smollm2_path: Path) -> None:
    options = LlamaOptions(path=str(smollm2_path), format="klingon", context=64, slots=1, layout="as-is")
    engine = LlamaEngine("smollm2", options)
    with pytest.raises(ConfigError, match=r"klingon.*hermes"):
        asyncio.run(engine.start())


@pytest.mark.parametrize("kind", ["llama3", "pythonic", "qwen_xml", "mistral_array", "glm"])
def test_forced_tool_call_in_each_format(smollm2_path: Path, kind: str) -> None:
    async def main() -> None:
        options = LlamaOptions(path=str(smollm2_path), format=kind, context=512, slots=1, layout="as-is")
        engine = LlamaEngine("smollm2", options)
        await engine.start()
        try:
            choice = ToolChoice("required", parallel=False)
            answer = await collect(engine, chat("Roll!", tools=(WEATHER,), tool_choice=choice, max_tokens=100))
            assert answer.finished.reason == "stop"
            assert "get_weather" in answer.text
        finally:
            await engine.stop()

    asyncio.run(main())
