"""Valid request bodies of every protocol, made of small grammars."""

from collections.abc import Callable
from random import Random
from typing import Any

from dragoman.core.edits import Compaction
from dragoman.core.events import Usage
from dragoman.protocols.responses.compaction_items import encode_item
from tools.fuzz.values import CONTROL_TOKENS, PNG, TEXTS, WORDS

Body = dict[str, Any]

SCHEMAS: tuple[Any, ...] = (
    {"type": "object"},
    {"type": "object", "properties": {"a": {"type": "string", "maxLength": 8}}, "required": ["a"]},
    {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["n"]},
    {"type": "array", "items": {"enum": ["x", "y", 3, None]}, "minItems": 1, "maxItems": 3},
    {"type": "object", "properties": {"o": {"$ref": "#/$defs/o"}}, "$defs": {"o": {"type": "boolean"}}},
    {"anyOf": [{"type": "number", "exclusiveMinimum": -1}, {"type": "null"}]},
    {"type": "string", "pattern": "^[a-z]{1,8}$"},
    {"type": "string", "format": "date"},
    {"allOf": [{"type": "object", "properties": {"a": {"const": 1}}}, {"required": ["a"]}]},
    {"type": "object", "additionalProperties": False, "properties": {}},
)
EXPRESSIONS = ("[a-z]{1,8}", "yes|no", r"\d{4}-\d\d", "(ab)*c", "a.c")
GRAMMARS = ('start: "yes" | "no"', "start: /[a-z]+/", 'start: "a" b\nb: "c"+')
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
TOOL_NAMES = ("get_weather", "now", "run", "a.b", "mcp__x__y", "x" * 64)


def words(random: Random) -> str:
    kind = random.random()
    if kind < 0.8:
        return " ".join(random.choices(WORDS, k=random.randint(1, 10)))
    return random.choice(CONTROL_TOKENS if kind < 0.9 else TEXTS) or "x"


def maybe(random: Random, body: Body, share: float, **fields: Callable[[], Any]) -> None:
    """Each field with that probability."""
    for name, make in fields.items():
        if random.random() < share:
            body[name] = make()


def sampling(random: Random, body: Body) -> None:
    maybe(
        random,
        body,
        0.1,
        temperature=lambda: random.choice((0, 0.7, 1.0, 2)),
        top_p=lambda: random.choice((0, 0.1, 1)),
        top_k=lambda: random.choice((-1, 0, 1, 40)),
        min_p=lambda: random.choice((0, 0.05, 1)),
        seed=lambda: random.choice((0, 1, -1, 2**63 - 1)),
        presence_penalty=lambda: random.choice((0, -2, 2, 0.5)),
        frequency_penalty=lambda: random.choice((0, -2, 2, 0.5)),
        repetition_penalty=lambda: random.choice((1, 0.5, 0.01, 10)),
        logit_bias=lambda: random.choice(
            ({}, {"5": 100}, {"0": -100, "17": 1.5}, {str(at): -100 for at in range(200)})
        ),
        stop=lambda: random.choice(("blue", ["a"], ["is", "x" * 50], [" "], ["\n", "é"])),
        stop_token_ids=lambda: random.choice(([], [0], [1, 2, 3])),
        ignore_eos=lambda: random.random() < 0.5,
        user=lambda: words(random),
        metadata=lambda: {"a": "b"},
        service_tier=lambda: "auto",
        prompt_cache_key=lambda: words(random),
    )


def shape(random: Random, body: Body) -> None:
    """At most one field that asks for a shape."""
    kind = random.randrange(10)
    schema = random.choice(SCHEMAS)
    if kind == 0:
        body["response_format"] = {"type": "json_object"}
    elif kind < 4:
        body["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "s", "schema": schema, "strict": True},
        }
    elif kind == 4:
        body[random.choice(("guided_json", "json_schema"))] = schema
    elif kind == 5:
        body["guided_choice"] = random.choice((["yes", "no"], ["é", " "], ["a" * 100]))
    elif kind == 6:
        body[random.choice(("guided_regex", "regex"))] = random.choice(EXPRESSIONS)
    elif kind == 7:
        body[random.choice(("guided_grammar", "grammar"))] = random.choice(GRAMMARS)
    elif kind == 8:
        body["structured_outputs"] = random.choice(({"json": schema}, {"regex": "a|b"}, {"choice": ["a"]}))
    else:
        body["response_format"] = {"type": "text"}


def thinking(random: Random, body: Body) -> None:
    maybe(
        random,
        body,
        0.5,
        reasoning_effort=lambda: random.choice(("none", "minimal", "low", "medium", "high")),
        thinking_budget=lambda: random.choice((-1, 0, 1, 100)),
        enable_thinking=lambda: random.random() < 0.5,
        chat_template_kwargs=lambda: random.choice(({"enable_thinking": True}, {"thinking": False}, {})),
    )


def parts(random: Random) -> Any:
    made: list[Any] = [{"type": "text", "text": words(random)} for _ in range(random.randint(1, 3))]
    if random.random() < 0.2:
        made.append({"type": "image_url", "image_url": {"url": "data:image/png;base64," + PNG}})
    return made


def chat_messages(random: Random) -> list[Any]:
    made: list[Any] = []
    if random.random() < 0.3:
        made.append({"role": random.choice(("system", "developer")), "content": words(random)})
    for at in range(random.choice((0, 0, 0, 1, 2))):
        call = {"id": f"call_{at}", "type": "function", "function": {"name": "now", "arguments": "{}"}}
        made.append({"role": "user", "content": words(random)})
        if random.random() < 0.5:
            made.append({"role": "assistant", "content": words(random), "reasoning_content": words(random)})
        else:
            made.append({"role": "assistant", "content": None, "tool_calls": [call]})
            made.append({"role": "tool", "tool_call_id": f"call_{at}", "content": words(random)})
    made.append({"role": "user", "content": words(random) if random.random() < 0.8 else parts(random)})
    return made


def chat_tools(random: Random, body: Body) -> None:
    names = random.sample(TOOL_NAMES, k=random.randint(1, 3))
    body["tools"] = [
        {"type": "function", "function": {"name": name, "description": "d", "parameters": PARAMETERS, "strict": True}}
        for name in names
    ]
    named = {"type": "function", "function": {"name": names[0]}}
    body["tool_choice"] = random.choice(("auto", "none", "required", named))
    maybe(random, body, 0.3, parallel_tool_calls=lambda: random.random() < 0.5)


def streaming(random: Random, body: Body) -> None:
    if random.random() < 0.5:
        body["stream"] = True
        maybe(random, body, 0.4, stream_options=lambda: {"include_usage": random.random() < 0.8})


def chat(random: Random) -> Body:
    body: Body = {"messages": chat_messages(random)}
    body[random.choice(("max_tokens", "max_completion_tokens"))] = random.choice((1, 4, 16))
    streaming(random, body)
    sampling(random, body)
    if random.random() < 0.25:
        chat_tools(random, body)
    if random.random() < 0.2:
        shape(random, body)
    if random.random() < 0.15:
        thinking(random, body)
    maybe(
        random,
        body,
        0.08,
        n=lambda: random.choice((1, 2, 3)),
        documents=lambda: [{"title": "t", "text": words(random)}],
        store=lambda: random.random() < 0.5,
        prompt_cache_retention=lambda: random.choice(("24h", "in_memory")),
    )
    if random.random() < 0.1:
        body |= {"logprobs": True, "top_logprobs": random.choice((0, 1, 20))}
    return body


def completion(random: Random) -> Body:
    prompts = (words(random), [words(random), words(random)], [1, 2, 3], [[1], [2, 3]])
    body: Body = {"prompt": random.choice(prompts), "max_tokens": random.choice((0, 1, 8))}
    if not body["max_tokens"]:
        body["echo"] = True
    streaming(random, body)
    sampling(random, body)
    maybe(
        random,
        body,
        0.1,
        echo=lambda: True,
        n=lambda: random.choice((1, 2)),
        logprobs=lambda: random.choice((0, 1, 5)),
        suffix=lambda: words(random),
    )
    if random.random() < 0.1:
        shape(random, body)
    return body


def message_tools(random: Random, body: Body) -> None:
    names = random.sample(TOOL_NAMES[:3], k=random.randint(1, 3))
    body["tools"] = [{"name": name, "description": "d", "input_schema": PARAMETERS} for name in names]
    body["tool_choice"] = random.choice(
        ({"type": "auto"}, {"type": "any"}, {"type": "none"}, {"type": "tool", "name": names[0]})
    )
    if random.random() < 0.2:
        body["tools"].append({"type": "web_search_20250305", "name": "web_search"})


def message_blocks(random: Random) -> Any:
    made: list[Any] = [{"type": "text", "text": words(random)}]
    if random.random() < 0.3:
        made.append({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}})
    if random.random() < 0.3:
        made.append({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": words(random)}})
    if random.random() < 0.3:
        made[0]["cache_control"] = {"type": "ephemeral"}
    return made


def context_management(random: Random) -> Any:
    """The edits of a message."""
    trigger = {"type": "input_tokens", "value": random.choice((1, 10, 100_000))}
    edits: tuple[Any, ...] = (
        {"type": "clear_tool_uses_20250919"},
        {
            "type": "clear_tool_uses_20250919",
            "trigger": random.choice((trigger, {"type": "tool_uses", "value": 1})),
            "keep": {"type": "tool_uses", "value": random.randrange(3)},
            "clear_at_least": {"type": "input_tokens", "value": random.randrange(20)},
            "exclude_tools": random.choice(([], ["now"])),
            "clear_tool_inputs": random.choice((True, False, ["now"])),
        },
        {"type": "clear_thinking_20251015", "keep": random.choice(("all", {"type": "thinking_turns", "value": 1}))},
        {"type": "compact_20260112", "trigger": trigger, "pause_after_compaction": random.random() < 0.5},
        {"type": "compact_20260112", "instructions": words(random), "trigger": trigger},
        {"type": "of_tomorrow_20300101"},
    )
    return {"edits": random.sample(edits, k=random.randint(0, 3))}


def message(random: Random) -> Body:
    made: list[Any] = []
    for at in range(random.choice((0, 0, 0, 1, 2))):
        call = {"type": "tool_use", "id": f"toolu_{at}", "name": "now", "input": {}}
        thought = {"type": "thinking", "thinking": words(random), "signature": ""}
        result = {"type": "tool_result", "tool_use_id": f"toolu_{at}", "content": words(random)}
        made.append({"role": "user", "content": words(random)})
        made.append({"role": "assistant", "content": [thought, {"type": "text", "text": words(random)}, call]})
        made.append({"role": "user", "content": [result]})
    if random.random() < 0.08:
        made.append(
            {"role": "assistant", "content": [{"type": "compaction", "content": random.choice(("They met.", None))}]}
        )
    made.append({"role": "user", "content": words(random) if random.random() < 0.7 else message_blocks(random)})
    body: Body = {"messages": made, "max_tokens": random.choice((1, 4, 16))}
    maybe(
        random,
        body,
        0.15,
        system=lambda: words(random) if random.random() < 0.5 else [{"type": "text", "text": words(random)}],
        temperature=lambda: random.choice((0, 0.5, 1)),
        top_p=lambda: 0.9,
        top_k=lambda: random.choice((1, 40)),
        stop_sequences=lambda: random.choice((["blue"], ["a", "b"], [])),
        thinking=lambda: random.choice(({"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"})),
        metadata=lambda: {"user_id": words(random)},
        output_config=lambda: {"effort": random.choice(("low", "high"))},
        output_format=lambda: {"type": "json_schema", "schema": random.choice(SCHEMAS)},
        context_management=lambda: context_management(random),
    )
    if random.random() < 0.25:
        message_tools(random, body)
    if random.random() < 0.05:
        for name in ("context_management", "stop_sequences", "output_format", "tool_choice"):
            body.pop(name, None)
        body["compaction"] = {"type": "summarize"}
    if random.random() < 0.5:
        body["stream"] = True
    return body


def response_input(random: Random) -> Any:
    if random.random() < 0.4:
        return words(random)
    made: list[Any] = []
    for at in range(random.choice((0, 0, 1, 2))):
        made += [
            {"role": "user", "content": words(random)},
            {
                "type": "reasoning",
                "id": f"rs_{at}",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "t"}],
            },
            {"type": "function_call", "call_id": f"c{at}", "name": "now", "arguments": "{}"},
            {"type": "function_call_output", "call_id": f"c{at}", "output": words(random)},
        ]
    made.append({"type": "message", "role": "user", "content": [{"type": "input_text", "text": words(random)}]})
    if random.random() < 0.15:
        made.insert(random.randint(0, len(made)), random.choice(COMPACTIONS))
    if random.random() < 0.1:
        made.append({"type": "compaction_trigger"})
    return made


COMPACTIONS = tuple(
    encode_item(Compaction(summary, kept, 1, Usage()), "cmp_1") for summary, kept in (("They met.", 0), ("é" * 500, 3))
)


def response(random: Random) -> Body:
    body: Body = {"input": response_input(random), "max_output_tokens": random.choice((16, 32))}
    if random.random() < 0.5:
        body["stream"] = True
    maybe(
        random,
        body,
        0.12,
        instructions=lambda: words(random),
        temperature=lambda: random.choice((0, 1)),
        store=lambda: random.random() < 0.5,
        metadata=lambda: {"k": words(random)},
        include=lambda: ["reasoning.encrypted_content"],
        reasoning=lambda: {"effort": random.choice(("none", "low", "high"))},
        text=lambda: {"format": {"type": "json_schema", "name": "s", "schema": random.choice(SCHEMAS)}},
        parallel_tool_calls=lambda: random.random() < 0.5,
        truncation=lambda: "auto",
        context_management=lambda: [{"type": "compaction", "compact_threshold": random.choice((1, 20, 100_000))}],
    )
    if random.random() < 0.3:
        body["tools"] = random.sample(RESPONSE_TOOLS, k=random.randint(1, 3))
        maybe(random, body, 0.5, tool_choice=lambda: random.choice(("auto", "none", "required")))
    return body


RESPONSE_TOOLS: tuple[Any, ...] = (
    {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": True},
    {"type": "custom", "name": "patch"},
    {"type": "local_shell"},
    {"type": "web_search"},
    {"type": "apply_patch"},
    {
        "type": "namespace",
        "name": "ns",
        "description": "d",
        "tools": [{"type": "function", "name": "x", "parameters": PARAMETERS}],
    },
)


def embedding(random: Random) -> Body:
    inputs = (words(random), [words(random), words(random)], [1, 2], [[1], [2]])
    body: Body = {"input": random.choice(inputs)}
    maybe(
        random,
        body,
        0.2,
        encoding_format=lambda: random.choice(("float", "base64")),
        dimensions=lambda: random.choice((1, 8, 384)),
    )
    return body


def rerank(random: Random) -> Body:
    documents: list[Any] = [words(random), {"text": words(random)}, words(random)]
    body: Body = {"query": words(random), "documents": documents[: random.randint(1, 3)]}
    maybe(random, body, 0.3, top_n=lambda: 1, return_documents=lambda: True)
    return body


def tokens(random: Random) -> Body:
    return {random.choice(("content", "prompt")): words(random), "parse_special": random.random() < 0.5}


def token_ids(random: Random) -> Body:
    return {"tokens": [random.randrange(1000) for _ in range(random.randint(0, 8))]}
