"""Compaction over the wire, with the official SDKs: requests, streams, what the model reads afterwards, failures."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic import Anthropic, beta_tool
from openai import OpenAI
from openai.types.responses import Response, ResponseCompactionItem, ResponseStreamEvent

from tests.support.batches import finish, read_file, submit
from tests.support.requests import eventually, recorded, refused, talking, under_way
from tests.support.sdk import adapter, anthropic_sdk, sdk
from tests.support.server_process import Running, Serving, server_fixture

CLIENTS = Path(__file__).parents[1] / "data" / "clients"
RESPONSES, COMPACT = "/v1/responses", "/v1/responses/compact"
SUMMARY = {"match": "<conversation>", "output": "They met."}
SLOW = {"engine": "scripted", "tokens_per_second": 20, "slots": 1, "replies": [SUMMARY | {"output": "tick " * 12_000}]}
MODELS = {
    "reader": {"engine": "tests.support.engines:Reader"},
    "blind": {"engine": "tests.support.engines:BlindReader"},
    "small": {"engine": "scripted", "context": 800, "replies": [SUMMARY, {"output": "An answer."}]},
    "slow": SLOW,
    "pausing": SLOW | {"replies": [SUMMARY | {"output": "tick " * 100}, {"output": "An answer."}]},
    "silent": {"engine": "scripted", "replies": [{"match": "<conversation>", "output": ""}]},
    "failing": {"engine": "scripted", "fail_after": 2, "replies": [SUMMARY]},
    "thinker": {
        "engine": "scripted",
        "format": "hermes",
        "replies": [{"match": "<conversation>", "output": "<think>Well.</think>They met."}, {"output": "An answer."}],
    },
}
running = server_fixture(
    {
        "models": MODELS,
        "default": "reader",
        "limits": {"keepalive_seconds": 0.5},
        "compaction": {"max_tokens": 100},
    }
)
TRIGGER: Any = {"type": "compaction_trigger"}
HISTORY: list[Any] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": "Ann says hello to Bob. " * 20},
    {"role": "assistant", "content": "Bob says hello. " * 20},
    {"role": "user", "content": "And then?"},
]
AFTER = "Who met?"
SEEN = ["developer: Be brief.", "They met.", "user: And then?", f"user: {AFTER}"]
"""What the model reads after the compaction of this history, and what it does not."""
GONE = "Bob says hello."
EDIT: Any = {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 100}}


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[OpenAI]:
    with sdk(running) as made:
        yield made


@pytest.fixture(scope="module")
def claude(running: Running) -> Iterator[Anthropic]:
    with anthropic_sdk(running) as made:
        yield made


@pytest.fixture
def plain(running: Running) -> Iterator[httpx.Client]:
    with talking(running) as made:
        yield made


def threshold(tokens: int) -> list[Any]:
    return [{"type": "compaction", "compact_threshold": tokens}]


def create(client: OpenAI, said: Any, **fields: Any) -> Response:
    """The response, whose body is validated strictly against the SDK's type."""
    raw = client.responses.with_raw_response.create(**{"model": "reader", "input": said, **fields})
    return Response.model_validate_json(raw.content, strict=True)


def stream(client: OpenAI, said: Any, **fields: Any) -> list[Any]:
    """The events of a stream, validated strictly, numbered."""
    asked = {"model": "reader", "input": said, "stream": True, **fields}
    with client.responses.with_streaming_response.create(**asked) as response:
        blocks = [block for block in response.read().decode().split("\n\n") if "data: " in block]
    events = [adapter(ResponseStreamEvent).validate_json(block.partition("data: ")[2], strict=True) for block in blocks]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events


def compact(client: OpenAI, said: Any, **fields: Any) -> dict[str, Any]:
    """The compacted conversation. The SDK's type has only messages of the assistant, although OpenAI returns others."""
    raw = client.responses.with_raw_response.compact(**{"model": "reader", "input": said, **fields})
    assert raw.parse().object == "response.compaction"
    compacted: dict[str, Any] = raw.http_response.json()
    assert set(compacted) == {"id", "object", "created_at", "output", "usage"}
    *messages, item = compacted["output"]
    assert all(message["role"] in ("developer", "user") for message in messages)
    ResponseCompactionItem.model_validate(item, strict=True)
    return compacted


def kinds(items: Any) -> list[str]:
    return [item.type for item in items]


def check_seen(text: str, *others: str) -> None:
    assert all(part in text for part in (*SEEN, *others)), text
    assert GONE not in text


# OpenAI


def test_compact_route_output_continues_and_compacts_again(client: OpenAI) -> None:
    compacted = compact(client, HISTORY, instructions="Ignore this.")
    assert compacted["id"].startswith("resp_")
    assert [item.get("role") for item in compacted["output"]] == ["developer", "user", "user", None]
    usage = compacted["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] > 100
    answer = create(client, [*compacted["output"], {"role": "user", "content": AFTER}])
    check_seen(answer.output_text)
    # The output of a compaction can be compacted again.
    again = compact(client, [*compacted["output"], {"role": "user", "content": AFTER}])
    assert [item.get("role") for item in again["output"]] == ["developer", "user", "user", "user", None]
    with pytest.raises(openai.BadRequestError, match="not stored"):
        create(client, AFTER, previous_response_id=compacted["id"])


def test_compact_a_stored_response(client: OpenAI) -> None:
    first = create(client, HISTORY, store=True)
    compacted = compact(client, openai.omit, previous_response_id=first.id)
    check_seen(create(client, [*compacted["output"], {"role": "user", "content": AFTER}]).output_text)


@pytest.mark.parametrize("is_stream", [False, True])
def test_trigger_item_ends_the_response_with_a_compaction(client: OpenAI, is_stream: bool) -> None:
    said = [*HISTORY, TRIGGER]
    if is_stream:
        events = stream(client, said)
        names = [event.type.removeprefix("response.") for event in events]
        assert names == [
            *("created", "in_progress", "output_item.added", "compaction.compacting", "output_item.done", "completed"),
        ]
        response = events[-1].response
    else:
        response = create(client, said)
    assert (response.status, kinds(response.output)) == ("completed", ["compaction"])
    assert response.usage is not None
    assert response.usage.output_tokens > 0
    answer = create(client, AFTER, previous_response_id=response.id)
    check_seen(answer.output_text)
    kept = client.responses.input_items.list(answer.id, order="asc").data
    assert kinds(kept) == ["message", "message", "message", "compaction", "message"]


@pytest.mark.parametrize("is_stream", [False, True])
def test_conversation_above_the_threshold_is_compacted_before_the_reply(
    client: OpenAI, running: Running, is_stream: bool
) -> None:
    fields: dict[str, Any] = {"context_management": threshold(200)}
    short = create(client, HISTORY, context_management=threshold(250))
    assert kinds(short.output) == ["message"]
    assert GONE in short.output_text
    response = stream(client, HISTORY, **fields)[-1].response if is_stream else create(client, HISTORY, **fields)
    assert kinds(response.output) == ["compaction", "message"]
    assert "They met." in response.output_text
    assert GONE not in response.output_text
    (record,) = recorded(running, id=response.id)
    assert response.usage is not None
    used = (record["prompt_tokens"], record["completion_tokens"])
    assert used == (response.usage.input_tokens, response.usage.output_tokens)
    # The conversation goes on with the output, or by its id.
    check_seen(create(client, [*HISTORY, *response.output, {"role": "user", "content": AFTER}]).output_text)
    check_seen(create(client, AFTER, previous_response_id=response.id).output_text, "assistant: developer: Be brief.")


def test_a_long_chain_of_responses_does_not_grow(client: OpenAI) -> None:
    previous, sizes = None, []
    for turn in range(12):
        text = f"Turn {turn}. " + "More and more. " * 20
        response = create(client, text, previous_response_id=previous, context_management=threshold(300))
        previous = response.id
        sizes.append(len(client.responses.input_items.list(response.id, limit=100).data))
        assert "user: Turn" in response.output_text
    assert max(sizes) < 8


def test_compaction_is_added_to_a_stored_conversation(client: OpenAI) -> None:
    conversation = client.conversations.create(items=HISTORY)
    compacted = create(client, [TRIGGER], conversation=conversation.id)
    assert kinds(compacted.output) == ["compaction"]
    listed = client.conversations.items.list(conversation.id, order="asc").data
    assert kinds(listed) == ["message"] * 4 + ["compaction"]
    check_seen(create(client, AFTER, conversation=conversation.id).output_text)


def test_background_response_can_be_a_compaction(client: OpenAI) -> None:
    response = create(client, [*HISTORY, TRIGGER], background=True)
    assert eventually(lambda: client.responses.retrieve(response.id).status == "completed")
    found = client.responses.retrieve(response.id)
    assert kinds(found.output) == ["compaction"]
    check_seen(create(client, AFTER, previous_response_id=response.id).output_text)


def test_batch_line_compacts_above_the_threshold(client: OpenAI) -> None:
    body = {"model": "reader", "input": HISTORY, "context_management": threshold(200)}
    line = {"custom_id": "a", "method": "POST", "url": RESPONSES, "body": body}
    batch = finish(client, submit(client, [line], RESPONSES).id)
    (result,) = read_file(client, batch.output_file_id)
    assert [item["type"] for item in result["response"]["body"]["output"]] == ["compaction", "message"]


def test_recorded_codex_requests_compact_and_continue(plain: httpx.Client) -> None:
    """Codex compacts a conversation, sends what it keeps with the item, and goes on."""
    turn, after = (json.loads((CLIENTS / f"codex__remote-compact__{at}.json").read_text())["body"] for at in (1, 2))
    text = plain.post(RESPONSES, json=turn | {"model": "reader"}).text
    events = [json.loads(block.partition("data: ")[2]) for block in text.split("\n\n") if "data: " in block]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in done] == ["compaction"]
    assert events[-1]["type"] == "response.completed"
    # The item of the recording was made by another server.
    *retained, recorded_item = after["input"]
    for items, summary in ((done, "They met."), ([recorded_item], "The user wants the proof.")):
        reply = plain.post(RESPONSES, json=after | {"model": "reader", "input": [*retained, *items], "stream": False})
        assert reply.status_code == 200, reply.text
        seen = reply.json()["output"][-1]["content"][0]["text"]
        assert seen.index("Write the proof and tell me") < seen.index(summary)
    # Without a WebSocket and without triggers, Codex asks the other route.
    whole = plain.post(COMPACT, json={name: turn[name] for name in ("input", "tools", "reasoning")})
    assert [item["type"] for item in whole.json()["output"]][-1] == "compaction"


def test_a_conversation_that_does_not_fit_into_the_context(client: OpenAI, running: Running) -> None:
    long = [{"role": "user", "content": "word " * 5000}, {"role": "user", "content": AFTER}]
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        create(client, long, model="small")
    response = create(client, long, model="small", context_management=threshold(100_000))
    assert kinds(response.output) == ["compaction", "message"]
    assert response.output_text == "An answer."
    (record,) = recorded(running, id=response.id)
    # It was read in parts, each with an overhead.
    assert record["prompt_tokens"] > 25_000 / 4
    assert record["completion_tokens"] > 30
    assert [item["type"] for item in compact(client, long, model="small")["output"]] == ["message", "compaction"]


def test_thinking_is_no_part_of_a_summary(client: OpenAI) -> None:
    response = create(client, HISTORY, model="thinker", context_management=threshold(10))
    assert response.usage is not None
    assert kinds(response.output) == ["compaction", "message"]
    assert response.usage.output_tokens_details.reasoning_tokens == 0


def test_a_model_that_cannot_count(client: OpenAI, plain: httpx.Client) -> None:
    body = {"model": "blind", "input": HISTORY, "context_management": threshold(1)}
    reply = plain.post(RESPONSES, json=body)
    assert reply.headers["x-dragoman-ignored"] == "context_management[0]"
    assert [item["type"] for item in reply.json()["output"]] == ["message"]
    strict = plain.post(RESPONSES, json=body, headers={"x-dragoman-strict": "true"})
    refused(strict, 400, param="context_management[0]", code="unsupported_parameter")
    assert kinds(create(client, [*HISTORY, TRIGGER], model="blind").output) == ["compaction"]


FOREIGN = {"type": "compaction", "encrypted_content": "gAAAAABo"}


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        (RESPONSES, {"input": [FOREIGN]}, "input[0].encrypted_content", "invalid_encrypted_content"),
        (COMPACT, {"input": [FOREIGN]}, "input[0].encrypted_content", "invalid_encrypted_content"),
        (RESPONSES, {"input": [TRIGGER]}, "input", "invalid_value"),
        (RESPONSES, {"input": [TRIGGER], "instructions": "x"}, "input[0]", "invalid_value"),
        (COMPACT, {"input": HISTORY[:1]}, "input", "invalid_value"),
        (COMPACT, {}, "input", "invalid_value"),
        (
            RESPONSES,
            {"input": "x", "context_management": threshold(0)},
            "context_management[0].compact_threshold",
            None,
        ),
    ],
)
def test_invalid_compaction_requests_are_refused(
    plain: httpx.Client, path: str, body: dict[str, Any], param: str, code: str | None
) -> None:
    for is_stream in (False, True):
        refused(plain.post(path, json=body | {"stream": is_stream}), 400, param=param, code=code)


def test_a_conversation_with_a_foreign_item_is_not_created(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="the compaction cannot be read"):
        client.conversations.create(items=[FOREIGN])  # type: ignore[list-item]
    with pytest.raises(openai.BadRequestError, match="unknown type 'compaction_trigger'"):
        client.conversations.create(items=[TRIGGER])


def test_an_empty_summary_is_an_error(plain: httpx.Client, running: Running) -> None:
    for path, said in ((COMPACT, HISTORY), (RESPONSES, [*HISTORY, TRIGGER])):
        reply = plain.post(path, json={"model": "silent", "input": said})
        refused(reply, 500, code="compaction_failed")
        (record,) = recorded(running, id=reply.headers["x-request-id"])
        assert (record["error"], record["prompt_tokens"] > 100) == ("compaction_failed", True)


def test_a_model_that_fails_while_it_summarises(client: OpenAI, plain: httpx.Client) -> None:
    refused(plain.post(COMPACT, json={"model": "failing", "input": HISTORY}), 500, code="inference_error")
    events = stream(client, [*HISTORY, TRIGGER], model="failing")
    assert [event.type for event in events[-2:]] == ["error", "response.failed"]
    assert events[-1].response.output == []


@pytest.mark.parametrize("body", [{"stream": True}, {"stream": False}])
def test_a_client_that_leaves_ends_the_summary(running: Running, body: dict[str, Any]) -> None:
    asked = {"model": "slow", "input": [*HISTORY, TRIGGER], **body}
    # Without a stream, there is nothing to read before the client leaves.
    with (
        suppress(httpx.ReadTimeout),
        talking(running) as plain,
        plain.stream("POST", RESPONSES, json=asked, timeout=1.5) as reply,
    ):
        assert any("compacting" in line for line in reply.iter_lines())
    under_way(running, "slow", 0)
    record = recorded(running, model="slow", status=499)[-1]
    assert record["unfinished_tokens"] > record["unfinished_prompt_tokens"] > 100


def test_a_deadline_ends_the_summary(running: Running) -> None:
    with talking(running, {"x-dragoman-timeout": "1"}) as plain:
        refused(plain.post(COMPACT, json={"model": "slow", "input": HISTORY}), 504, code="deadline_exceeded")
    under_way(running, "slow", 0)


def test_a_slow_compaction_keeps_the_stream_alive(plain: httpx.Client) -> None:
    """The summary takes five seconds."""
    said = {"model": "pausing", "input": [*HISTORY, TRIGGER], "stream": True}
    text = plain.post(RESPONSES, json=said).text
    assert text.count("event: response.compaction.compacting") >= 3
    assert text.count(": keep-alive") >= 3
    asked = {"model": "pausing", "max_tokens": 50, "messages": HISTORY[1:], "stream": True}
    text = plain.post("/v1/messages", json=asked | {"context_management": {"edits": [EDIT]}}).text
    assert text.count("event: ping") >= 3
    order = ["event: message_start", "event: ping", "compaction_delta", "text_delta", "event: message_stop"]
    assert sorted(order, key=text.index) == order


# Anthropic


def ask(claude: Anthropic, **fields: Any) -> Any:
    asked = {"model": "reader", "max_tokens": 500, "system": "Be brief.", "messages": HISTORY[1:], **fields}
    return claude.beta.messages.create(**asked)


def types(message: Any) -> list[str]:
    return [block.type for block in message.content]


def said_after(message: Any) -> list[Any]:
    return [*HISTORY[1:], {"role": "assistant", "content": message.content}, {"role": "user", "content": AFTER}]


@pytest.mark.parametrize("is_stream", [False, True])
def test_message_above_the_threshold(claude: Anthropic, running: Running, is_stream: bool) -> None:
    management: Any = {"edits": [EDIT]}
    if is_stream:
        asked: Any = {"model": "reader", "max_tokens": 500, "system": "Be brief.", "messages": HISTORY[1:]}
        with claude.beta.messages.stream(**asked, context_management=management) as events:
            found = [event for event in events if event.type == "compaction"]
            assert [event.content for event in found] == ["They met."]
            message: Any = events.get_final_message()
    else:
        message = ask(claude, context_management=management)
    assert (types(message), message.stop_reason) == (["compaction", "text"], "end_turn")
    assert message.content[0].content == "They met."
    assert message.context_management.applied_edits == []
    assert "They met." in message.content[1].text
    assert "And then?" in message.content[1].text
    assert GONE not in message.content[1].text
    written, answered = message.usage.iterations
    assert (written.type, answered.type) == ("compaction", "message")
    assert (answered.input_tokens, answered.output_tokens) == (message.usage.input_tokens, message.usage.output_tokens)
    (record,) = recorded(running, id=message.id)
    assert record["prompt_tokens"] == written.input_tokens + answered.input_tokens
    assert record["completion_tokens"] == written.output_tokens + answered.output_tokens
    # What is before the block is not read.
    after = ask(claude, messages=said_after(message)).content[0].text
    assert "They met." in after
    assert f"user: {AFTER}" in after
    assert GONE not in after
    assert "Ann says hello" not in after
    changed = said_after(message)
    changed[-2]["content"] = [message.content[0].model_copy(update={"content": "They parted."})]
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[3\].content\[0\].signature"):
        ask(claude, messages=changed)


def test_pause_after_compaction(claude: Anthropic) -> None:
    paused = ask(claude, context_management={"edits": [EDIT | {"pause_after_compaction": True}]})
    assert (types(paused), paused.stop_reason) == (["compaction"], "compaction")
    assert (paused.usage.input_tokens, paused.usage.output_tokens) == (0, 0)
    messages = [*HISTORY[1:], {"role": "assistant", "content": paused.content}]
    resumed = ask(claude, messages=messages, context_management={"edits": [EDIT | {"pause_after_compaction": True}]})
    assert (types(resumed), resumed.stop_reason) == (["text"], "end_turn")
    assert "They met." in resumed.content[0].text


def test_compaction_on_demand(claude: Anthropic) -> None:
    compacted = ask(claude, compaction={"type": "summarize", "instructions": "Who met?"})
    assert (types(compacted), compacted.stop_reason) == (["compaction"], "compaction")
    assert compacted.content[0].signature
    after = ask(claude, messages=[compacted.to_param(), {"role": "user", "content": AFTER}])
    assert "They met." in after.content[0].text
    asked: Any = {"model": "reader", "max_tokens": 50, "messages": HISTORY[1:], "compaction": {"type": "summarize"}}
    with claude.beta.messages.stream(**asked) as events:
        assert events.get_final_message().content == ask(claude, compaction={"type": "summarize"}).content


def test_the_tool_runner_compacts(claude: Anthropic) -> None:
    @beta_tool
    def look(place: str) -> str:
        """Look at a place.

        Args:
            place: Where to look.
        """
        return place

    runner = claude.beta.messages.tool_runner(
        model="reader", max_tokens=500, tools=[look], messages=HISTORY[1:], max_iterations=3
    )
    runner.compact_before_next_turn()
    stops = [message.stop_reason for message in runner]
    assert stops[-1] in ("compaction", "end_turn")
    assert "compaction" in stops


def uses(count: int) -> list[Any]:
    messages: list[Any] = [{"role": "user", "content": "Look."}]
    for at in range(count):
        call = {"type": "tool_use", "id": f"t{at}", "name": "look", "input": {"at": at}}
        result = {"type": "tool_result", "tool_use_id": f"t{at}", "content": f"It is {at}. " + "A long text. " * 20}
        messages += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    return messages


CLEAR: Any = {"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 100}}
LOOK: Any = {"name": "look", "input_schema": {"type": "object"}}


@pytest.mark.parametrize("is_stream", [False, True])
def test_cleared_tool_uses(claude: Anthropic, is_stream: bool) -> None:
    asked: Any = {"messages": uses(5), "tools": [LOOK], "context_management": {"edits": [CLEAR]}}
    if is_stream:
        with claude.beta.messages.stream(model="reader", max_tokens=500, system="Be brief.", **asked) as events:
            message: Any = events.get_final_message()
    else:
        message = ask(claude, **asked)
    (applied,) = message.context_management.applied_edits
    assert (applied.type, applied.cleared_tool_uses) == ("clear_tool_uses_20250919", 2)
    text = message.content[0].text
    assert [f"It is {at}." in text for at in range(5)] == [False, False, True, True, True]
    plain = ask(claude, messages=uses(5), tools=[LOOK])
    assert plain.context_management is None
    assert plain.usage.input_tokens == message.usage.input_tokens + applied.cleared_input_tokens
    counted = claude.beta.messages.count_tokens(model="reader", system="Be brief.", **asked)
    assert counted.input_tokens == message.usage.input_tokens
    assert counted.context_management is not None
    assert counted.context_management.original_input_tokens == plain.usage.input_tokens


def test_edits_of_a_model_that_cannot_count(claude: Anthropic) -> None:
    asked: Any = {"model": "blind", "messages": uses(5), "tools": [LOOK]}
    raw = claude.beta.messages.with_raw_response.create(
        max_tokens=500, **asked, context_management={"edits": [CLEAR, EDIT]}
    )
    assert raw.headers["x-dragoman-ignored"] == "context_management.edits[0], context_management.edits[1]"
    parsed: Any = raw.parse()
    assert "It is 0." in parsed.content[0].text
    assert types(ask(claude, **asked, compaction={"type": "summarize"})) == ["compaction"]


# Configurations


def test_a_conversation_goes_on_on_another_server(tmp_path: Path, serving: Serving, client: OpenAI) -> None:
    compacted = compact(client, HISTORY)
    prompt = "Who met whom?"
    config = {"models": {"reader": MODELS["reader"], "echo": {"engine": "scripted"}}, "compaction": {"prompt": prompt}}
    with serving(tmp_path, config) as other, sdk(other) as second:
        check_seen(create(second, [*compacted["output"], {"role": "user", "content": AFTER}]).output_text)
        # This model repeats its prompt.
        answer = create(second, compact(second, "hello", model="echo")["output"], model="reader").output_text
        assert f"{prompt}\n\n<conversation>\n[user]\nhello\n</conversation>" in answer


def test_smollm2_summarises_what_does_not_fit(tmp_path: Path, serving: Serving, smollm2_path: Path) -> None:
    model = {"source": str(smollm2_path), "layout": "as-is", "context": 1024, "sampling": {"temperature": 0}}
    with (
        serving(tmp_path, {"models": {"smollm2": model}, "compaction": {"max_tokens": 64}}) as other,
        sdk(other) as real,
    ):
        said = [
            {"role": "user", "content": "My name is Ada and I live in Paris. " * 120},
            {"role": "assistant", "content": "It is a nice town. " * 100},
            {"role": "user", "content": "What is my name?"},
        ]
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            create(real, said, model="smollm2")
        response = create(real, said, model="smollm2", max_output_tokens=20, context_management=threshold(900))
        assert kinds(response.output) == ["compaction", "message"]
        assert response.output_text
        (record,) = recorded(other, id=response.id)
        assert record["prompt_tokens"] > 1500
        counted = real.responses.input_tokens.count(model="smollm2", input=[*said, *response.output])  # type: ignore[list-item]
        assert counted.input_tokens < 500
