"""Fields of replies that vLLM and llama.cpp's server add to OpenAI's, with a real model."""

import re
from typing import Any

import openai
import pytest

from tests.support.sdk import ModelClient, content

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "now", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
}


def streamed_ids(chunks: Any) -> list[int]:
    return [token for chunk in chunks for entry in chunk.choices for token in entry.token_ids]


def test_token_ids_of_a_completion(smol: ModelClient) -> None:
    prompt = smol.tokenize("Roses are")
    asked: dict[str, Any] = {"stop": ["\n\n\n"], "extra_body": {"return_token_ids": True}}
    reply = smol.complete("Roses are", **asked)
    (choice,) = reply.choices
    assert choice.prompt_token_ids == prompt
    assert choice.token_ids == choice.ids
    assert len(choice.token_ids) == reply.usage.completion_tokens
    assert smol.detokenize(choice.token_ids) == choice.text
    with smol.complete("Roses are", stream=True, **asked) as stream:
        first, *others = stream
    assert first.choices[0].prompt_token_ids == prompt
    assert streamed_ids([first, *others]) == choice.token_ids


def test_token_ids_include_those_of_a_stop_string(smol: ModelClient) -> None:
    whole = smol.complete("One, two, three,", max_tokens=6, extra_body={"return_token_ids": True}).choices[0]
    stop = whole.text[len(whole.text) // 2 :]
    cut = smol.complete("One, two, three,", max_tokens=6, stop=[stop], extra_body={"return_token_ids": True})
    assert cut.choices[0].text == whole.text.removesuffix(stop)
    assert cut.choices[0].token_ids == whole.token_ids
    assert len(whole.token_ids) == cut.usage.completion_tokens


@pytest.mark.parametrize("fields", [{}, {"tools": [TOOL], "tool_choice": "required"}], ids=["text", "calls"])
def test_token_ids_of_a_chat(smol: ModelClient, fields: dict[str, Any]) -> None:
    asked = {**fields, "extra_body": {"return_token_ids": True}, "max_tokens": 40}
    reply: Any = smol.chat("What time is it?", **asked)
    assert len(reply.prompt_token_ids) == reply.usage.prompt_tokens
    assert smol.detokenize(reply.prompt_token_ids).count("What time is it?") == 1
    ids = reply.choices[0].token_ids
    assert len(ids) == reply.usage.completion_tokens
    content = reply.choices[0].message.content
    assert smol.detokenize(ids) == content or reply.choices[0].message.tool_calls
    first, *others = smol.stream("What time is it?", **asked)
    assert first.model_extra is not None
    assert first.model_extra["prompt_token_ids"] == reply.prompt_token_ids
    assert streamed_ids([first, *others]) == ids


def test_prompt_logprobs_of_a_chat(smol: ModelClient) -> None:
    reply: Any = smol.chat("Hello", extra_body={"prompt_logprobs": 2, "return_token_ids": True})
    assert reply.choices[0].logprobs is None
    first, *others = reply.prompt_logprobs
    assert first is None
    assert len(others) == reply.usage.prompt_tokens - 1
    for token, entries in zip(reply.prompt_token_ids[1:], others, strict=True):
        assert 2 <= len(entries) <= 3
        assert entries[str(token)]["logprob"] <= 0
        best = next(entry for entry in entries.values() if entry["rank"] == 1)
        assert best["logprob"] >= entries[str(token)]["logprob"]


def test_usage_and_timings_in_every_chunk(smol: ModelClient) -> None:
    options = {"continuous_usage_stats": True, "include_usage": True}
    chunks = smol.stream("Hello", stream_options=options, extra_body={"timings_per_token": True})
    *parts, last = chunks
    counts = [part.usage.completion_tokens for part in parts if part.usage is not None]
    assert counts == sorted(counts)
    assert len(counts) == len(parts)
    assert last.usage is not None
    assert last.usage.completion_tokens == counts[-1] > 1
    assert "timings" not in (parts[0].model_extra or {})
    for chunk in (parts[-1], last):
        extra: Any = chunk.model_extra
        assert extra["timings"]["predicted_n"] == counts[-1]
    reply: Any = smol.chat("Hello", extra_body={"timings_per_token": True})
    assert reply.timings["prompt_n"] + reply.timings["cache_n"] == reply.usage.prompt_tokens
    assert reply.timings["predicted_n"] == reply.usage.completion_tokens
    assert reply.timings["predicted_ms"] > 0 < reply.timings["prompt_ms"]
    assert not hasattr(smol.chat("Hello"), "timings")


@pytest.mark.parametrize("limit", [-1, None])
def test_no_limit_of_the_reply(smol: ModelClient, limit: int | None) -> None:
    assert smol.complete("One, two,", max_tokens=limit, stop=["."]).choices[0].finish_reason == "stop"
    assert smol.chat("Say yes.", max_tokens=limit, stop=["."]).choices[0].finish_reason == "stop"


def test_system_fingerprint(smol: ModelClient) -> None:
    fingerprint = smol.chat("Hello").system_fingerprint
    assert fingerprint is not None
    assert fingerprint.startswith("dragoman-")
    assert {chunk.system_fingerprint for chunk in smol.stream("Hello")} == {fingerprint}
    assert smol.complete("Hello").system_fingerprint == fingerprint


GBNF = 'root ::= "<" [a-c]{2} ("," root)? ">"'


@pytest.mark.parametrize("field", ["grammar", "guided_grammar", "ebnf"])
def test_grammar_in_gbnf(smol: ModelClient, field: str) -> None:
    text = content(smol.chat("Write.", extra_body={field: GBNF}))
    assert re.match(r"(<[a-c]{2},)*<[a-c]{2}>*", text)
    with pytest.raises(openai.BadRequestError) as raised:
        smol.chat("Write.", extra_body={field: "root ::= other"})
    assert (raised.value.param, raised.value.code) == (field, "invalid_schema")
    assert "rule 'other' is not defined" in raised.value.message
    with pytest.raises(openai.BadRequestError, match=f"{field}: ") as raised:
        smol.complete("Write.", extra_body={field: 'root = "a", { "b" };'})
    assert (raised.value.param, raised.value.code) == (field, "invalid_schema")
