"""The Responses API through the official SDK."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from tests.support.sdk import sdk
from tests.support.server_process import Running, server_fixture

PATCH = '*** Begin Patch\n+Gr\u00fc\u00dfe "q"\n*** End Patch'
REPLIES = [
    {
        "match": "(?i)weather",
        "output": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>',
    },
    {"match": "^sunny", "output": "It is sunny in Köln."},
    {"match": "think", "output": "<think>Let me see.</think>Here you are."},
    {"match": "person", "output": '{"name": "Ada", "age": 36}'},
    {
        "match": "patch it",
        "output": "<tool_call>\n" + json.dumps({"name": "apply", "arguments": {"input": PATCH}}) + "\n</tool_call>",
    },
    {"match": "nothing", "output": ""},
]
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


running = server_fixture(
    {
        "models": {
            "hermes": {"engine": "scripted", "format": "hermes", "replies": REPLIES},
            "failing": {"engine": "scripted", "fail_after": 2, "replies": [{"output": "one two three four"}]},
            "short": {"engine": "scripted", "context": 20},
        },
        "aliases": {"gpt-*": "hermes"},
        "default": "hermes",
    }
)


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[OpenAI]:
    with sdk(running) as made:
        yield made


def create(client: OpenAI, said: Any, **fields: Any) -> Response:
    """The response, whose body is validated strictly against the SDK's type."""
    raw = client.responses.with_raw_response.create(model="hermes", input=said, **fields)
    return Response.model_validate_json(raw.content, strict=True)


def stream(client: OpenAI, said: Any, **fields: Any) -> list[Any]:
    """The events of a stream, validated strictly, numbered and in order."""
    asked = {"model": "hermes", "input": said, "stream": True, **fields}
    with client.responses.with_streaming_response.create(**asked) as response:
        body = response.read().decode()
    blocks = [block.split("\n") for block in body.removesuffix("\n\n").split("\n\n")]
    told = [(name.removeprefix("event: "), data.removeprefix("data: ")) for name, data in blocks]
    events = [EVENTS.validate_json(data, strict=True) for _, data in told]
    assert [event.type for event in events] == [name for name, _ in told]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events


def test_text(client: OpenAI) -> None:
    response = create(client, "hello", instructions="be brief", metadata={"a": "b"}, temperature=0.5)
    assert response.id.startswith("resp_")
    assert (response.status, response.output_text, response.model) == ("completed", "hello", "hermes")
    assert (response.instructions, response.metadata, response.temperature) == ("be brief", {"a": "b"}, 0.5)
    assert response.usage is not None
    assert response.usage.output_tokens == 2
    assert response.usage.total_tokens == response.usage.input_tokens + 2
    counted = client.responses.input_tokens.count(model="hermes", input="hello", instructions="be brief")
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", response.usage.input_tokens)


def test_same_as_a_stream(client: OpenAI) -> None:
    events = stream(client, "think")
    names = [event.type.removeprefix("response.") for event in events]
    assert [name for name, before in zip(names, ["", *names], strict=False) if name != before] == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("reasoning_text.delta", "reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done", "completed"),
    ]
    whole = create(client, "think")
    final = events[-1].response
    assert [item.type for item in final.output] == ["reasoning", "message"]
    assert final.output_text == whole.output_text == "Here you are."
    assert final.usage == whole.usage
    assert final.usage.output_tokens_details.reasoning_tokens > 0


def test_truncated_response_is_incomplete(client: OpenAI) -> None:
    response = create(client, "a long story", max_output_tokens=2)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[-1].status == "incomplete"  # type: ignore[union-attr]
    assert stream(client, "a long story", max_output_tokens=2)[-1].type == "response.incomplete"


def test_empty_answer_is_a_message(client: OpenAI) -> None:
    assert [item.type for item in create(client, "nothing").output] == ["message"]
    assert stream(client, "nothing")[-1].response.output_text == ""


class Person(BaseModel):
    name: str
    age: int


def test_parse(client: OpenAI) -> None:
    parsed = client.responses.parse(model="hermes", input="a person", text_format=Person)
    assert parsed.output_parsed == Person(name="Ada", age=36)
    with client.responses.stream(model="hermes", input="a person", text_format=Person) as events:
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        final = events.get_final_response()
    assert final.output_parsed == Person(name="Ada", age=36)
    assert "".join(deltas) == '{"name": "Ada", "age": 36}'


def test_chain_of_responses(client: OpenAI) -> None:
    tools: Any = [WEATHER]
    first = client.responses.create(model="hermes", input="What is the weather?", tools=tools)
    call = first.output[0]
    assert call.type == "function_call"
    result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    second = client.responses.create(model="hermes", input=result, previous_response_id=first.id, tools=tools)
    assert second.output_text == "It is sunny in Köln."
    assert second.previous_response_id == first.id
    raw = client.responses.input_items.with_raw_response.list(second.id, order="asc")
    listed = ResponseItemList.model_validate_json(raw.content, strict=True)
    assert [item.type for item in listed.data] == ["message", "function_call", "function_call_output"]
    third = client.responses.create(model="hermes", input="and thanks", previous_response_id=second.id)
    assert third.usage is not None
    assert second.usage is not None
    assert third.usage.input_tokens > second.usage.input_tokens


def test_free_text_tool(client: OpenAI) -> None:
    tools: Any = [{"type": "custom", "name": "apply", "description": "Applies a patch."}]
    whole = create(client, "patch it", tools=tools).output[0]
    assert whole.type == "custom_tool_call"
    assert (whole.name, whole.input) == ("apply", PATCH)
    events = stream(client, "patch it", tools=tools)
    pieces = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    assert len(pieces) > 1
    assert "".join(pieces) == PATCH
    assert events[-1].response.output[0].input == PATCH
    again: Any = [
        {"role": "user", "content": "patch it"},
        whole.model_dump(exclude_none=True),
        {"type": "custom_tool_call_output", "call_id": whole.call_id, "output": "done"},
    ]
    assert create(client, again, tools=tools).output_text == "done"


def test_encrypted_reasoning_is_replayed(client: OpenAI) -> None:
    include: Any = ["reasoning.encrypted_content"]
    thought = create(client, "think", include=include, store=False).output[0]
    assert thought.type == "reasoning"
    assert thought.encrypted_content
    sealed: Any = {"type": "reasoning", "summary": [], "encrypted_content": thought.encrypted_content}
    raw = client.responses.with_raw_response.create(
        model="hermes", input=[{"role": "user", "content": "think"}, sealed, {"role": "user", "content": "on"}]
    )
    assert "x-dragoman-ignored" not in raw.headers
    foreign: Any = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}
    raw = client.responses.with_raw_response.create(model="hermes", input=[foreign, {"role": "user", "content": "on"}])
    assert raw.headers["x-dragoman-ignored"] == "input[0].encrypted_content"


def test_retrieve_and_delete(client: OpenAI) -> None:
    streamed = stream(client, "hello")[-1].response
    assert client.responses.retrieve(streamed.id) == streamed
    made = create(client, "hello")
    assert client.responses.retrieve(made.id) == made
    client.responses.delete(made.id)
    for ask in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            ask(made.id)
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, "on", previous_response_id=made.id)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")


def test_pages_of_items(client: OpenAI) -> None:
    said: Any = [{"role": "user", "content": str(number)} for number in range(5)]
    made = create(client, said)
    pages = list(client.responses.input_items.list(made.id, limit=2))
    assert [item.content[0].text for item in pages] == ["4", "3", "2", "1", "0"]  # type: ignore[union-attr,index]
    rising = client.responses.input_items.list(made.id, order="asc", limit=3)
    assert rising.has_more
    assert [item.content[0].text for item in rising.data] == ["0", "1", "2"]  # type: ignore[union-attr,index]


def test_cancel_needs_a_background_response(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(create(client, "hello").id)
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel("resp_none")


def test_failures(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
        client.responses.create(model="short", input="long " * 100)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
    events = stream(client, "hello", model="failing")
    assert [event.type for event in events[-2:]] == ["error", "response.failed"]
    failed = events[-1].response
    assert (failed.status, failed.error.code) == ("failed", "server_error")
