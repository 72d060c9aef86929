"""Server side of completions: decoding requests, encoding replies."""

import json
from functools import partial
from typing import Any

import msgspec
import pytest

from dragoman.core.events import Event, Finished, Started, TextDelta, TokenLogprob, Usage
from dragoman.core.features import Feature
from dragoman.core.request import Asked, Delivery, GenerationRequest, Logprobs, OneOf
from tests.protocols import wire
from tests.protocols.wire import collected, encode_reply, frames, invalid, rejected_param

decode = partial(wire.decode, "completions")


PROMPTS = [("hi", ("hi",)), ("", ("",)), (["a", "b"], ("a", "b")), ([1, 2], ((1, 2),)), ([[1, 2], [3]], ((1, 2), (3,)))]


@pytest.mark.parametrize(("prompt", "prompts"), PROMPTS)
def test_prompt_types(prompt: Any, prompts: tuple[Any, ...]) -> None:
    request = decode(prompt=prompt)
    assert request.prompts == prompts
    has_tokens = any(entry.feature == Feature.TOKEN_PROMPT for entry in request.asked)
    assert has_tokens == any(isinstance(entry, tuple) for entry in prompts)


INVALID: list[tuple[dict[str, Any], str]] = [
    *invalid("prompt", "prompt", [], None, {"a": 1}, ["x"] * 2000),
    *invalid("prompt", "prompt[0]", [[]], [-1], [1.5], [True]),
    *invalid("prompt", "prompt[1]", [1, "a"], ["a", 1]),
    ({"prompt": [[1], [2, "a"]]}, "prompt[1][1]"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"logprobs": 21}, "logprobs"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"best_of": 2, "prompt": ["a", "b"]}, "best_of"),
]


@pytest.mark.parametrize(("fields", "param"), INVALID)
def test_invalid_field_is_named(fields: dict[str, Any], param: str) -> None:
    assert rejected_param("completions", **fields) == param


def test_requested_features() -> None:
    request = decode(echo=True, max_tokens=0, logprobs=2, suffix="end", best_of=3, n=2, return_token_ids=True)
    assert request.logprobs == Logprobs(2, prompt=2)
    assert (request.echo, request.max_tokens, request.choices, request.best_of) == (True, 0, 2, 3)
    assert {(entry.feature, entry.param) for entry in request.asked} == {
        ("completion", "prompt"),
        ("infill", "suffix"),
        ("prompt_logprobs", "logprobs"),
        ("token_ids", "return_token_ids"),
        ("best_of", "best_of"),
        ("logprobs", "best_of"),
        ("choices", "n"),
    }


REQUEST = GenerationRequest(id="cmpl-1", model="m", prompts=("Hello",))
STARTED = Started(1, prompt_logprobs=(TokenLogprob(1, b"Hello", None),), prompt_ids=(1,))
WORLD = TokenLogprob(2, b" world", -0.5, (TokenLogprob(2, b" world", -0.5), TokenLogprob(3, b" moon", -1.5)))


def test_stream_frames() -> None:
    encoded = frames("completions", REQUEST, (0, [Started(1), TextDelta(" world"), Finished("length")]))
    choices = [entry["choices"][0] for entry in encoded[:-1]]
    assert [(choice["text"], choice["finish_reason"]) for choice in choices] == [(" world", None), ("", "length")]
    assert encoded[0]["object"] == "text_completion"
    assert encoded[-1] == "[DONE]"


def test_echo_with_logprobs_and_token_ids() -> None:
    delivery = Delivery(stream=True, usage=True, token_ids=True)
    request = msgspec.structs.replace(REQUEST, echo=True, logprobs=Logprobs(2, prompt=2), delivery=delivery)
    events: list[Event] = [STARTED, TextDelta(" world", tokens=(2,), logprobs=(WORLD,)), Finished(usage=Usage(1, 1))]
    prompt, text, end, usage, _ = frames("completions", request, (0, events))
    logprobs = {"tokens": ["Hello"], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]}
    assert (prompt["choices"][0]["text"], prompt["choices"][0]["logprobs"]) == ("Hello", logprobs)
    assert text["choices"][0]["ids"] == text["choices"][0]["token_ids"] == [2]
    assert prompt["choices"][0]["prompt_token_ids"] == [1]
    assert text["choices"][0]["logprobs"] == {
        "tokens": [" world"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{" world": -0.5, " moon": -1.5}],
        "text_offset": [5],
    }
    assert end["choices"][0]["finish_reason"] == "stop"
    assert usage["usage"]["total_tokens"] == 2

    choice = json.loads(encode_reply("completions", request, collected(events)))["choices"][0]
    assert (choice["text"], choice["ids"], choice["token_ids"]) == ("Hello world", [2], [2])
    assert choice["prompt_token_ids"] == [1]
    assert choice["logprobs"]["text_offset"] == [0, 5]


def test_logprobs_contain_the_sampled_token() -> None:
    request = msgspec.structs.replace(REQUEST, logprobs=Logprobs(0))
    alone = TokenLogprob(2, b" world", -0.5)
    unlikely = TokenLogprob(4, b" void", -9.5, WORLD.top)
    events: list[Event] = [STARTED, TextDelta(" world", logprobs=(alone, unlikely)), Finished()]
    logprobs = json.loads(encode_reply("completions", request, collected(events)))["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{" world": -0.5}, {" void": -9.5, " world": -0.5, " moon": -1.5}]


def test_constrained_output() -> None:
    request = decode(prompt="a", guided_choice=["yes", "no"])
    assert request.constraint == OneOf(("yes", "no"))
    assert Asked(Feature.CONSTRAINT, "guided_choice") in request.asked
    assert decode(prompt="a", response_format={"type": "text"}).constraint is None
