"""The lines of batches: inputs in pieces, errors with their numbers, results, the order by prefix."""

import itertools
import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.core.errors import BadRequest
from dragoman.core.events import Usage
from dragoman.protocols import batch_lines
from dragoman.protocols.batch_lines import (
    AnthropicLines,
    InputLine,
    LineReader,
    LineResult,
    ResultLine,
    TooManyLines,
    encode_anthropic_result,
    encode_openai_result,
    read_usage,
    request_body,
)

ENDPOINT = "/v1/chat/completions"
LARGEST = 2000


def line(name: str | None = "a", **fields: Any) -> bytes:
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
    given = {"custom_id": name, "method": "POST", "url": ENDPOINT, "body": body} | fields
    return json.dumps({key: value for key, value in given.items() if value is not None}).encode()


def read(text: bytes, cuts: Sequence[int] = (), largest: int = LARGEST) -> list[InputLine]:
    reader = LineReader("openai", ENDPOINT, largest)
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    found = [one for begin, end in itertools.pairwise(places) for one in reader.feed(text[begin:end])]
    return found + reader.end()


def test_lines_are_numbered_and_located() -> None:
    text = b"\n".join([line("a"), b"", b"  ", line("b") + b"\r", line("ü")])
    first, second, third = read(text)
    assert [first.number, second.number, third.number] == [1, 4, 5]
    assert [one.custom_id for one in (first, second, third)] == ["a", "b", "ü"]
    for one in (first, second, third):
        assert one.error is None
        body = request_body("openai", text[one.begin : one.begin + one.length])
        assert json.loads(body)["messages"][0]["content"] == "hello"


@given(st.lists(st.integers(0, 10_000), max_size=12))
def test_pieces_of_an_input_do_not_matter(cuts: list[int]) -> None:
    lines = [line("a"), b"{", line("b"), b"x" * (LARGEST + 5), line("a"), b"\xff", line("\u2028 é"), b""]
    text = b"\n".join(lines) + b"\n" + line("last")
    assert read(text, cuts) == read(text)


@pytest.mark.parametrize(
    ("text", "code", "param", "name"),
    [
        (b"{", "invalid_json_line", None, None),
        (b"\xff\xfe", "invalid_json_line", None, None),
        (b"[" * 5000, "line_too_long", None, None),
        (b'{"x":' + b"[" * 1500, "invalid_json_line", None, None),
        (b"[]", "invalid_request", None, None),
        (line(None), "invalid_request", "custom_id", None),
        (line(""), "invalid_request", "custom_id", ""),
        (line("x" * 513), "invalid_request", "custom_id", "x" * 513),
        (line(custom_id=7), "invalid_request", "custom_id", None),
        (line(method="GET"), "invalid_request", "method", "a"),
        (line(url="/v1/embeddings"), "mismatched_url", "url", "a"),
        (line(body=[]), "invalid_request", "body", "a"),
        (line(body={"model": 5}), "invalid_request", "body.model", "a"),
        (line(body={"stream": True}), "invalid_request", "body.stream", "a"),
        (line(body={"background": True}), "invalid_request", "body.background", "a"),
    ],
)
def test_bad_line_is_reported_with_its_number(text: bytes, code: str, param: str | None, name: str | None) -> None:
    good, bad, other = read(b"\n".join([line("first"), text, line("third")]))
    assert (good.error, other.error) == (None, None)
    assert bad.error is not None
    assert (bad.error.code, bad.error.param, bad.error.line, bad.custom_id) == (code, param, 2, name)
    assert bad.error.message.startswith(f"line 2: {f'{param}: ' if param else ''}")
    result = msgspec.msgpack.decode(msgspec.msgpack.encode(batch_lines.refused_result(bad)), type=LineResult)
    encoded = json.loads(encode_openai_result("batch_0a", ResultLine(2, bad.custom_id, result), "completed"))
    error = {"code": code, "message": bad.error.message}
    assert encoded == {"id": "batch_req_0a_2", "custom_id": name, "response": None, "error": error}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"custom_id":"\xff"}', "line 1: the line is not valid UTF-8"),
        (b'{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{"model":"\xff"}}', "not valid UTF-8"),
        (line(method="GET"), "method: expected 'POST', the only method that is possible"),
        (line(""), "custom_id: expected a string of 1 to 512 characters"),
        (line(custom_id=7), "custom_id: expected a string of 1 to 512 characters"),
        (b"{}", "custom_id: required, but missing"),
    ],
)
def test_message_about_a_bad_line(text: bytes, message: str) -> None:
    (bad,) = read(text)
    assert bad.error is not None
    assert bad.error.message.startswith("line 1: ")
    assert bad.error.message.endswith(message)


def test_second_use_of_a_custom_id_is_an_error() -> None:
    first, bad, second = read(b"\n".join([line("a"), line("a"), line("A")]))
    assert (first.error, second.error) == (None, None)
    assert bad.error is not None
    assert bad.error.code == "duplicate_custom_id"


def test_custom_id_of_a_bad_line_may_be_used_by_a_good_one() -> None:
    bad, good = read(b"\n".join([line("a", method="GET"), line("a")]))
    assert bad.error is not None
    assert good.error is None


def test_byte_order_mark_is_skipped() -> None:
    text = b"\xef\xbb\xbf" + line("a")
    [only] = read(text)
    assert only.error is None
    assert request_body("openai", text[only.begin : only.begin + only.length])


def test_number_of_lines_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_lines, "MAX_LINES", 2)
    assert len(read(b"\n".join([line("a"), b"", b"x"]))) == 2
    with pytest.raises(TooManyLines):
        read(b"\n".join([line("a"), b"x", line("b")]))


def test_number_of_empty_lines_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_lines, "MAX_NUMBER", 4)
    assert len(read(b"\n\n\n" + line("a"))) == 1
    with pytest.raises(TooManyLines):
        read(b"\n\n\n\n" + line("a"))


def prefix_order(bodies: Sequence[dict[str, Any]]) -> list[int]:
    lines = read(b"\n".join(line(f"n{at}", body=body) for at, body in enumerate(bodies)), largest=100_000)
    assert not any(one.error for one in lines)
    return [int((one.custom_id or "")[1:]) for one in sorted(lines, key=lambda one: (one.prefix, one.number))]


def asking(content: str, system: str = "", model: str = "m", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": content}]
    return {"model": model, "messages": messages, **fields}


def test_lines_with_a_common_prompt_are_neighbours() -> None:
    systems = [word * 300 for word in ("one ", "two ", "three ")]
    bodies = [asking(f"{at}", systems[at % 3], model="m" if at % 2 else "n", tools=[]) for at in range(18)]
    order = prefix_order(bodies)
    assert sorted(order) == list(range(18))
    kinds = [(at % 2, at % 3) for at in order]
    assert len([at for at in range(1, 18) if kinds[at] != kinds[at - 1]]) == 5
    models = [kind[0] for kind in kinds]
    assert len([at for at in range(1, 18) if models[at] != models[at - 1]]) == 1


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (
            {
                "prompt_tokens": 9,
                "completion_tokens": 4,
                "prompt_tokens_details": {"cached_tokens": 5},
                "completion_tokens_details": {"reasoning_tokens": 2},
            },
            Usage(9, 4, 5, 2),
        ),
        (
            {
                "input_tokens": 9,
                "output_tokens": 4,
                "input_tokens_details": {"cached_tokens": 5},
                "output_tokens_details": {"reasoning_tokens": 2},
            },
            Usage(9, 4, 5, 2),
        ),
        (
            {
                "input_tokens": 4,
                "output_tokens": 4,
                "cache_read_input_tokens": 5,
                "cache_creation_input_tokens": None,
            },
            Usage(9, 4, 5),
        ),
        (None, Usage()),
        ("text", Usage()),
    ],
)
def test_usage_of_every_api(usage: object, expected: Usage) -> None:
    assert read_usage(json.dumps({"id": "x", "usage": usage}).encode()) == expected
    assert read_usage(b"not JSON") == Usage()


def test_openai_results() -> None:
    reply = LineResult(200, "chatcmpl-1", b'{"a":\n1}')
    encoded = encode_openai_result("batch_0a", ResultLine(3, "x", reply), "completed")
    assert encoded.count(b"\n") == 1
    assert json.loads(encoded)["response"] == {"status_code": 200, "request_id": "chatcmpl-1", "body": {"a": 1}}
    for outcome, code in (("cancelled", "batch_cancelled"), ("expired", "batch_expired")):
        entry = json.loads(encode_openai_result("batch_0a", ResultLine(3, "x", None), outcome))
        assert (entry["response"], entry["error"]["code"]) == (None, code)


def test_anthropic_results() -> None:
    failure = b'{"type":"error","error":{"type":"not_found_error","message":"m"},"request_id":"r"}'
    results = {
        "succeeded": LineResult(200, "msg_1", b'{"type":"message"}'),
        "errored": LineResult(404, "msg_2", failure),
        "canceled": None,
    }
    for kind, result in results.items():
        entry = json.loads(encode_anthropic_result(ResultLine(1, "x", result), "cancelled"))
        assert (entry["custom_id"], entry["result"]["type"]) == ("x", kind)
    refused = LineResult(code="invalid_request", message="line 1: params.stream: no", custom_id="x")
    error = json.loads(encode_anthropic_result(ResultLine(1, "x", refused), "completed"))["result"]["error"]
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")


def test_anthropic_requests_become_lines() -> None:
    lines = AnthropicLines("requests")
    written = lines.add(b'{"custom_id": "a",\r\n "params": {"model":\n"m"}}') + lines.add(
        b'{"params":{},"custom_id":"b"}'
    )
    reader = LineReader("anthropic", "/v1/messages", LARGEST)
    first, second = reader.feed(written)
    assert [first.custom_id, second.custom_id, first.error, second.error] == ["a", "b", None, None]
    assert json.loads(request_body("anthropic", written[: first.length])) == {"model": "m"}


@pytest.mark.parametrize(
    ("item", "path"),
    [
        (b'{"params": {}}', "requests[1].custom_id"),
        (b'{"custom_id": "a b", "params": {}}', "requests[1].custom_id"),
        (b'{"custom_id": "b"}', "requests[1].params"),
        (b'{"custom_id": "a", "params": {}}', "requests[1].custom_id"),
        (b'{"custom_id": "b", "params": {]', "requests[1]"),
    ],
)
def test_anthropic_request_without_a_usable_custom_id_is_refused(item: bytes, path: str) -> None:
    lines = AnthropicLines("requests")
    lines.add(b'{"custom_id": "a", "params": {}}')
    with pytest.raises(BadRequest) as caught:
        lines.add(item)
    assert caught.value.param == path
    assert caught.value.message.startswith(f"{path}: ")
