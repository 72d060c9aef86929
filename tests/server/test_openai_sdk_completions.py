"""Completions through the official SDK, mostly with a real model."""

from typing import Any

import openai
import pytest

from tests.support.sdk import ModelClient

FRANCE = "The capital of France is"
SEA = "Fish live in the"


def texts(reply: Any) -> list[str]:
    return [choice.text for choice in reply.choices]


def streamed(model: ModelClient, prompt: Any, /, **fields: Any) -> list[Any]:
    with model.complete(prompt, stream=True, **fields) as chunks:
        return list(chunks)


def entries(chunks: list[Any], index: int = 0) -> list[Any]:
    return [entry for chunk in chunks for entry in chunk.choices if entry.index == index]


def test_prompt_is_continued(smol: ModelClient) -> None:
    reply = smol.complete(FRANCE)
    assert (reply.object, reply.model) == ("text_completion", "smollm2")
    assert reply.id.startswith("cmpl-")
    (choice,) = reply.choices
    assert choice.text.startswith(" Paris")
    assert (choice.index, choice.logprobs, choice.finish_reason) == (0, None, "length")
    usage = reply.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (len(smol.tokenize(FRANCE)), 8, 13)


def test_script_continues_too(poet: ModelClient) -> None:
    assert texts(poet.complete("What is the weather?", max_tokens=100)) == ["It is sunny in Paris today."]
    assert texts(poet.complete(["weather", "emoji"], max_tokens=100)) == ["It is sunny in Paris today.", "a 😀 b"]
    echoed = poet.complete("emoji", echo=True, max_tokens=1)
    assert (texts(echoed), echoed.choices[0].finish_reason) == (["emojia 😀 "], "length")
    by_ids = poet.complete([1, 2, 3], max_tokens=100)
    assert (texts(by_ids), by_ids.usage.prompt_tokens) == (["Roses are red, violets are blue."], 3)


def test_every_way_to_write_a_prompt(smol: ModelClient) -> None:
    ids = {text: smol.tokenize(text) for text in (FRANCE, SEA)}
    france, sea = texts(smol.complete(FRANCE)) + texts(smol.complete(SEA))
    assert texts(smol.complete([FRANCE])) == [france]
    assert texts(smol.complete(ids[FRANCE])) == [france]
    for prompts in ([FRANCE, SEA], [ids[FRANCE], ids[SEA]]):
        both = smol.complete(prompts)
        assert texts(both) == [france, sea]
        assert [choice.index for choice in both.choices] == [0, 1]
        assert both.usage.prompt_tokens == len(ids[FRANCE]) + len(ids[SEA])
        assert both.usage.completion_tokens == 16


def test_stream_is_the_reply_in_pieces(smol: ModelClient) -> None:
    fields: dict[str, Any] = {"logprobs": 2, "echo": True, "extra_body": {"return_token_ids": True}}
    reply = smol.complete(FRANCE, **fields)
    chunks = streamed(smol, FRANCE, stream_options={"include_usage": True}, **fields)
    assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1
    assert (chunks[-1].choices, chunks[-1].usage) == ([], reply.usage)
    *pieces, last = entries(chunks)
    assert (last.text, last.finish_reason) == ("", "length")
    assert "".join(piece.text for piece in pieces) == reply.choices[0].text
    assert [token for piece in pieces for token in piece.model_extra.get("ids", [])] == reply.choices[0].ids
    whole = reply.choices[0].logprobs
    for name in ("tokens", "text_offset"):
        assert [entry for piece in pieces for entry in getattr(piece.logprobs, name)] == getattr(whole, name)
    told = [entry for piece in pieces for entry in piece.logprobs.token_logprobs]
    assert told[0] is whole.token_logprobs[0] is None
    assert told[1:] == pytest.approx(whole.token_logprobs[1:], abs=0.01)


def test_echo_with_logprobs_scores_a_text(smol: ModelClient) -> None:
    text = FRANCE + " Paris"
    reply = smol.complete(text, echo=True, logprobs=1, max_tokens=0)
    (choice,) = reply.choices
    assert (choice.text, choice.finish_reason) == (text, "length")
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (6, 0)
    found = choice.logprobs
    assert "".join(found.tokens) == text
    assert found.token_logprobs[0] is found.top_logprobs[0] is None
    generated = smol.complete(FRANCE, logprobs=0, max_tokens=1).choices[0].logprobs
    assert found.tokens[-1] == generated.tokens[0] == " Paris"
    assert found.token_logprobs[-1] == pytest.approx(generated.token_logprobs[0], abs=0.05)
    assert texts(smol.complete(smol.tokenize(text), echo=True, max_tokens=0)) == [text]
    *_, last = streamed(smol, text, echo=True, max_tokens=0)
    assert last.choices[0].finish_reason == "length"


def test_best_of_several(smol: ModelClient) -> None:
    sampled: dict[str, Any] = {"temperature": 1.2, "seed": 11, "logprobs": 0}
    best = smol.complete(FRANCE, best_of=4, **sampled)
    every = smol.complete(FRANCE, n=4, **sampled)

    def mean(choice: Any) -> float:
        logprobs: list[float] = choice.logprobs.token_logprobs
        return sum(logprobs) / len(logprobs)

    (chosen,) = best.choices
    ranked = sorted(every.choices, key=mean, reverse=True)
    assert chosen.text == ranked[0].text
    assert chosen.index == 0
    assert best.usage == every.usage
    two = smol.complete(FRANCE, best_of=4, n=2, **sampled)
    assert texts(two) == [choice.text for choice in ranked[:2]]


@pytest.mark.parametrize(
    ("fields", "status", "param", "code"),
    [
        ({"prompt": "a", "suffix": "z"}, 501, "suffix", "not_implemented"),
        ({"prompt": [49152]}, 400, "prompt", "invalid_value"),
        ({"prompt": ""}, 400, "prompt", "invalid_value"),
        ({"prompt": [5] * 2048}, 400, "prompt", "context_length_exceeded"),
        ({"prompt": "a", "logit_bias": {"50000": 1}}, 400, "logit_bias", "invalid_value"),
        ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens", "invalid_value"),
    ],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_bad_parameters(
    smol: ModelClient, stream: bool, fields: dict[str, Any], status: int, param: str, code: str
) -> None:
    with pytest.raises(openai.APIStatusError) as raised:
        smol.client.completions.create(model="smollm2", stream=stream, **fields)
    assert (raised.value.status_code, raised.value.param, raised.value.code) == (status, param, code)
