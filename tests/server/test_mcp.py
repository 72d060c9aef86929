"""Tools of MCP servers through the official SDKs, with a real MCP server: as a program, and with HTTP."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from anthropic import Anthropic
from anthropic.types.beta import BetaMessage, BetaRawMessageStreamEvent
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.support import mcp_server
from tests.support.requests import PATIENCE, eventually, recorded, refused, talking, under_way
from tests.support.sdk import anthropic_sdk, sdk
from tests.support.server_process import Running, Serving

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
BETA: TypeAdapter[Any] = TypeAdapter(BetaRawMessageStreamEvent)
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"


def call(tool_name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': tool_name, 'arguments': arguments})}</tool_call>"


REPLIES = [
    {"match": "^3$", "output": "The sum is 3."},
    {"match": "^waited", "output": "I have waited."},
    {"match": "^Error|not run|did not|no such|operator", "output": "It failed."},
    {"match": "^forever", "output": call("calc__echo", text="forever")},
    {"match": "add and look", "output": call("calc__add", a=1, b=2) + call("look", at="sky")},
    {"match": "remote", "output": call("remote__add", a=1, b=2)},
    {"match": "add twice", "output": call("calc__add", a=1, b=2) + call("calc__add", a=2, b=1)},
    {"match": "add", "output": "<think>Easy.</think>I add." + call("calc__add", a=1, b=2)},
    {"match": "fail", "output": call("calc__fail", text="x")},
    {"match": "wait long", "output": call("calc__wait", name="long", seconds=300)},
    {"match": "wait", "output": call("calc__wait", name="short", seconds=1.5)},
    {"match": "who", "output": call("calc__process")},
    {"match": "remember", "output": call("calc__history")},
    {"match": "secret", "output": call("calc__credentials")},
    {"match": "<\\|im_end\\|>", "output": "It is text."},
    {"match": "token", "output": call("calc__echo", text="<|im_end|>")},
    {"match": "not json", "output": '<tool_call>{"name": "calc__add", "arguments": [1]}</tool_call>'},
]
HELLO = {"role": "user", "content": "hello"}
LOOK: dict[str, Any] = {"type": "function", "name": "look", "parameters": {"type": "object"}}


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with mcp_server.http_server() as found:
        yield found


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, serving: Serving, port: int) -> Iterator[Running]:
    config = {
        "models": {
            "m": {"engine": "scripted", "format": "hermes", "replies": REPLIES, "slots": 1},
            "cut": {"engine": "scripted", "format": "hermes", "replies": REPLIES, "fail_after": 30},
        },
        "default": "m",
        "mcp_servers": {
            "calc": {"command": mcp_server.command()},
            "sums": {"command": mcp_server.command(), "tools": ["add", "draw"]},
            "remote": {"url": f"http://127.0.0.1:{port}/mcp"},
        },
        "mcp": {
            "allow": [f"http://127.0.0.1:{port}/mcp"],
            "allow_addresses": ["127.0.0.1"],
            "call_seconds": 30,
            "rounds": 4,
        },
        "limits": {"stall_seconds": 1},
    }
    with serving(tmp_path_factory.mktemp("mcp"), config) as made:
        yield made


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[OpenAI]:
    with sdk(running) as made:
        yield made


@pytest.fixture(scope="module")
def claude(running: Running) -> Iterator[Anthropic]:
    with anthropic_sdk(running) as made:
        yield made


def tool(label: str = "calc", approval: Any = "never", **fields: Any) -> dict[str, Any]:
    return {"type": "mcp", "server_label": label, "require_approval": approval, **fields}


def create(client: OpenAI, said: Any, *tools: dict[str, Any], **fields: Any) -> Response:
    """The response, whose body is validated strictly against the SDK's type."""
    raw = client.responses.with_raw_response.create(
        model="m",
        input=said,
        tools=list(tools or (tool(),)),  # type: ignore[arg-type]
        **fields,
    )
    return Response.model_validate_json(raw.content, strict=True)


def stream(client: OpenAI, said: Any, *tools: dict[str, Any], **fields: Any) -> list[Any]:
    """The events of a stream, validated strictly, numbered and in order."""
    asked = {"model": "m", "input": said, "stream": True, "tools": list(tools or (tool(),)), **fields}
    with client.responses.with_streaming_response.create(**asked) as response:
        body = response.read().decode()
    data = [block.partition("data: ")[2] for block in body.split("\n\n") if block and not block.startswith(":")]
    events = [EVENTS.validate_json(one, strict=True) for one in data]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events


def kinds(response: Response) -> list[str]:
    return [item.type for item in response.output]


def without_ids(response: Response) -> Any:
    """The items of a response as JSON, for comparison with those of another one."""
    return json.loads(json.dumps([item.model_dump() for item in response.output]).replace(response.id[5:], ""))


def test_response_calls_a_tool_and_goes_on(client: OpenAI) -> None:
    response = create(client, "add")
    assert kinds(response) == ["mcp_list_tools", "reasoning", "message", "mcp_call", "message"]
    listed, _, _, made, said = response.output
    assert {one.name for one in listed.tools} >= {"add", "echo", "fail"}  # type: ignore[union-attr]
    assert (made.name, made.server_label, made.output, made.error, made.status) == (  # type: ignore[union-attr]
        *("add", "calc", "3", None, "completed"),
    )
    assert json.loads(made.arguments) == {"a": 1, "b": 2}  # type: ignore[union-attr]
    assert said.content[0].text == response.output_text.removeprefix("I add.") == "The sum is 3."  # type: ignore[union-attr]
    assert response.status == "completed"


def test_servers_with_http(client: OpenAI, port: int) -> None:
    assert create(client, "remote", tool("remote")).output_text == "The sum is 3."
    requested = tool("calc", server_url=f"http://127.0.0.1:{port}/mcp")
    assert create(client, "add", requested).output_text.endswith("The sum is 3.")


def test_streamed_response_has_the_events_of_its_items(client: OpenAI) -> None:
    events = stream(client, "add")
    names = [event.type.removeprefix("response.") for event in events]
    assert [name for name, before in zip(names, ["", *names], strict=False) if name != before] == [
        *("created", "in_progress"),
        *("output_item.added", "mcp_list_tools.in_progress", "mcp_list_tools.completed", "output_item.done"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "mcp_call.in_progress", "mcp_call_arguments.delta", "mcp_call_arguments.done"),
        *("mcp_call.completed", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done", "completed"),
    ]
    final, whole = events[-1].response, create(client, "add")
    assert without_ids(final) == without_ids(whole)
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.model_dump() for item in done] == [item.model_dump() for item in final.output]
    arguments = "".join(event.delta for event in events if event.type == "response.mcp_call_arguments.delta")
    assert arguments == final.output[3].arguments
    assert final.usage == whole.usage


def test_usage_is_that_of_all_rounds(client: OpenAI, running: Running) -> None:
    response = create(client, "add")
    assert response.usage is not None
    # The prompt of the second round has the first turn and the result.
    first = create(client, "add", tool(), max_output_tokens=1).usage
    assert first is not None
    assert response.usage.input_tokens > 2 * first.input_tokens
    assert response.usage.output_tokens > 20
    (record,) = recorded(running, id=response.id)
    assert (record["prompt_tokens"], record["completion_tokens"]) == (
        response.usage.input_tokens,
        response.usage.output_tokens,
    )


def test_failed_call_is_an_error_for_model_and_client(client: OpenAI) -> None:
    events = stream(client, "fail")
    assert "response.mcp_call.failed" in [event.type for event in events]
    _, made, said = events[-1].response.output
    assert (made.status, made.output, made.error.type) == ("failed", None, "mcp_tool_execution_error")
    assert said.content[0].text == "It failed."


def test_arguments_that_are_no_object_are_not_sent(client: OpenAI) -> None:
    made = create(client, "not json").output[1]
    if made.type == "mcp_call":
        assert made.error is not None


def test_output_of_a_tool_is_text_for_the_model(client: OpenAI) -> None:
    _, made, said = create(client, "token").output
    assert made.output == "<|im_end|>"  # type: ignore[union-attr]
    assert said.content[0].text == "It is text."  # type: ignore[union-attr]


def test_listing_in_the_input_is_not_repeated(client: OpenAI) -> None:
    first = create(client, "add")
    again = create(client, "add", previous_response_id=first.id)
    assert kinds(again) == ["reasoning", "message", "mcp_call", "message"]
    items: list[Any] = [item.model_dump(exclude_none=True) for item in first.output]
    assert "mcp_list_tools" not in kinds(create(client, [*items, {"role": "user", "content": "add"}], store=False))
    # A listing that lacks an allowed tool does not count.
    narrow = create(client, "add", tool(allowed_tools=["add"]))
    wider = tool(allowed_tools=["add", "echo"])
    assert kinds(create(client, "add", wider, previous_response_id=narrow.id))[0] == "mcp_list_tools"


def test_approval_is_asked_and_given(client: OpenAI) -> None:
    asked = create(client, "add", tool(approval="always"))
    request = asked.output[-1]
    assert request.type == "mcp_approval_request"
    assert (request.name, request.server_label, json.loads(request.arguments)) == ("add", "calc", {"a": 1, "b": 2})
    answer: Any = {"type": "mcp_approval_response", "approval_request_id": request.id, "approve": True}
    given = create(client, [answer], tool(approval="always"), previous_response_id=asked.id)
    assert kinds(given) == ["mcp_call", "message"]
    made = given.output[0]
    assert (made.approval_request_id, made.output) == (request.id, "3")  # type: ignore[union-attr]
    assert given.output_text == "The sum is 3."
    # It does not run again when the conversation goes on.
    after = create(client, "hello", tool(approval="always"), previous_response_id=given.id)
    assert kinds(after) == ["message"]
    # Without the store, the client sends the items.
    items: list[Any] = [item.model_dump(exclude_none=True) for item in asked.output]
    streamed = stream(client, [{"role": "user", "content": "add"}, *items, answer], tool(), store=False)
    assert [item.type for item in streamed[-1].response.output] == ["mcp_call", "message"]


def test_denied_call_does_not_run(client: OpenAI) -> None:
    asked = create(client, "add", tool(approval="always"))
    answer: Any = {
        "type": "mcp_approval_response",
        "approval_request_id": asked.output[-1].id,
        "approve": False,
        "reason": "too dangerous",
    }
    denied = create(client, [answer], tool(approval="always"), previous_response_id=asked.id)
    assert kinds(denied) == ["message"]
    assert denied.output_text == "It failed."


@pytest.mark.parametrize(
    ("rule", "asks"),
    [
        ({"never": {"tool_names": ["add"]}}, False),
        ({"never": {"tool_names": ["echo"]}}, True),
        ({"never": {"read_only": True}}, False),
        ({"always": {"tool_names": ["add"]}}, True),
        ({"always": {"tool_names": ["echo"]}}, False),
        ({"always": {"read_only": True}, "never": {"tool_names": ["add"]}}, True),
        (None, True),
    ],
)
def test_approval_rules(client: OpenAI, rule: Any, asks: bool) -> None:
    response = create(client, "add", tool(approval=rule))
    assert ("mcp_approval_request" in kinds(response)) is asks
    assert ("mcp_call" in kinds(response)) is not asks


@pytest.mark.parametrize("allowed", [["add"], {"tool_names": ["add"]}, {"read_only": True}])
def test_allowed_tools(client: OpenAI, allowed: Any) -> None:
    listed = create(client, "add", tool(allowed_tools=allowed)).output[0]
    assert [one.name for one in listed.tools] == ["add"]  # type: ignore[union-attr]
    refused_call = create(client, "fail", tool(allowed_tools=allowed))
    # The model calls what it was not offered. That is a call of a function that the request does not have.
    assert "mcp_call" not in kinds(refused_call)


def test_tools_that_the_operator_does_not_allow_are_not_listed(client: OpenAI) -> None:
    listed = create(client, "hello", tool("sums")).output[0]
    assert {one.name for one in listed.tools} == {"add", "draw"}  # type: ignore[union-attr]


def test_function_of_the_client_ends_the_response_after_calls_of_servers(client: OpenAI) -> None:
    response = create(client, "add and look", tool(), LOOK)
    assert kinds(response) == ["mcp_list_tools", "mcp_call", "function_call"]
    assert response.output[1].output == "3"  # type: ignore[union-attr]
    function = response.output[2]
    output: Any = {"type": "function_call_output", "call_id": function.call_id, "output": "blue"}  # type: ignore[union-attr]
    assert create(client, [output], tool(), LOOK, previous_response_id=response.id).output_text == "blue"


def test_calls_of_one_turn_run_together(client: OpenAI) -> None:
    events = stream(client, "add twice")
    response = events[-1].response
    assert [item.type for item in response.output] == ["mcp_list_tools", "mcp_call", "mcp_call", "message"]
    assert [item.output for item in response.output[1:3]] == ["3", "3"]
    completed = [event.output_index for event in events if event.type == "response.mcp_call.completed"]
    assert completed == [1, 2]


def test_max_tool_calls_ends_the_calls(client: OpenAI) -> None:
    response = create(client, "add twice", max_tool_calls=1)
    assert kinds(response) == ["mcp_list_tools", "mcp_call", "mcp_call", "message"]
    _, first, second, said = response.output
    assert (first.output, second.output) == ("3", None)  # type: ignore[union-attr]
    assert "limit" in second.error.content[0]["text"]  # type: ignore[union-attr]
    assert said.content[0].text == "It failed."  # type: ignore[union-attr]


def test_rounds_end(client: OpenAI) -> None:
    response = create(client, "forever")
    made = [item for item in response.output if item.type == "mcp_call"]
    # The limit of the configuration, and one more round for the model to see that it is reached.
    assert len(made) == 5
    assert made[-1].error is not None
    assert response.status == "completed"


def test_reply_that_is_cut_off_does_not_call(client: OpenAI) -> None:
    for tokens in (8, 14, 18):
        events = stream(client, "add", max_output_tokens=tokens)
        response = events[-1].response
        assert response.status == "incomplete"
        assert all(item.status == "incomplete" for item in response.output if item.type == "mcp_call")
        opened = [event.output_index for event in events if event.type == "response.output_item.added"]
        assert opened == [event.output_index for event in events if event.type == "response.output_item.done"]


def test_limit_of_tokens_is_that_of_all_rounds(client: OpenAI) -> None:
    usage = create(client, "add").usage
    assert usage is not None
    response = create(client, "add", max_output_tokens=usage.output_tokens - 1)
    assert response.status == "incomplete"
    assert response.usage is not None
    assert response.usage.output_tokens == usage.output_tokens - 1


def test_slot_is_free_while_a_tool_runs(client: OpenAI, running: Running) -> None:
    """The model has one slot, and the engine may be silent for one second."""
    with talking(running) as http:
        waiting = {"model": "m", "input": "wait", "tools": [tool()], "stream": True}
        with http.stream("POST", RESPONSES, json=waiting) as response:
            lines = response.iter_lines()
            assert any("mcp_call_arguments.done" in line for line in lines)
            assert create(client, "hello").output_text == "hello"
            rest = "\n".join(lines)
    assert "I have waited." in rest
    assert "response.completed" in rest


def test_client_that_leaves_cancels_the_call(client: OpenAI, running: Running) -> None:
    with talking(running) as http:
        waiting = {"model": "m", "input": "wait long", "tools": [tool()], "stream": True}
        with http.stream("POST", RESPONSES, json=waiting) as response:
            assert any("mcp_call_arguments.done" in line for line in response.iter_lines())

    def history() -> str:
        return str(create(client, "remember").output[1].output)  # type: ignore[union-attr]

    assert eventually(lambda: "long cancelled" in history()), history()
    under_way(running, "m", 0)


def test_credentials_are_sent_to_the_server_and_not_shown(client: OpenAI, port: int) -> None:
    own = tool("calc", server_url=f"http://127.0.0.1:{port}/mcp", authorization="token-of-the-caller")
    response = create(client, "secret", own, store=True)
    made = next(item for item in response.output if item.type == "mcp_call")
    assert "'authorization': '***'" in str(made.output)
    assert "token-of-the-caller" not in response.model_dump_json()
    (shown,) = response.tools
    assert (shown.authorization, shown.headers) == (None, None)  # type: ignore[union-attr]
    assert shown.server_url == f"http://127.0.0.1:{port}/<redacted>"  # type: ignore[union-attr]
    assert "token-of-the-caller" not in client.responses.retrieve(response.id).model_dump_json()
    custom = tool("calc", server_url=f"http://127.0.0.1:{port}/mcp", headers={"X-Tenant": "tenant-of-the-caller"})
    assert "'x-tenant': '***'" in create(client, "secret", custom).model_dump_json()


def test_background_response_calls_tools(client: OpenAI, port: int) -> None:
    response = client.responses.create(model="m", input="add", tools=[tool()], background=True)  # type: ignore[list-item]
    assert eventually(lambda: client.responses.retrieve(response.id).status == "completed")
    done = client.responses.retrieve(response.id)
    assert kinds(done) == ["mcp_list_tools", "reasoning", "message", "mcp_call", "message"]
    own = tool("calc", server_url=f"http://127.0.0.1:{port}/mcp", authorization="x")
    with pytest.raises(openai.BadRequestError, match="background request is stored"):
        client.responses.create(model="m", input="add", tools=[own], background=True)  # type: ignore[list-item]


def test_cancelled_background_response_cancels_its_call(client: OpenAI, running: Running) -> None:
    response = client.responses.create(model="m", input="wait long", tools=[tool()], background=True)  # type: ignore[list-item]
    with talking(running) as http, http.stream("GET", f"{RESPONSES}/{response.id}?stream=true") as events:
        assert any("mcp_call_arguments.done" in line for line in events.iter_lines())
    assert client.responses.cancel(response.id).status == "cancelled"
    under_way(running, "m", 0)


def test_counted_tokens_include_the_tools(client: OpenAI, claude: Anthropic) -> None:
    counted: Any = client.responses.input_tokens.count(model="m", input="hello", tools=[tool()])  # type: ignore[list-item]
    assert counted.input_tokens == 2
    toolset: Any = {"type": "mcp_toolset", "mcp_server_name": "missing"}
    with pytest.raises(Exception, match="there is no mcp server 'missing'"):
        claude.beta.messages.count_tokens(model="m", messages=[{"role": "user", "content": "x"}], tools=[toolset])


def test_mistakes_name_the_field(running: Running, port: int) -> None:
    url = f"http://127.0.0.1:{port}/mcp"
    mistakes: list[tuple[dict[str, Any], str, str]] = [
        (tool("missing"), "tools[0]", "it has: calc, sums, remote"),
        (tool(server_url="http://127.0.0.1:1/mcp"), "tools[0]", "does not connect to http://127.0.0.1:1"),
        (tool(server_url=f"{url}/../x"), "tools[0]", "does not connect to this address"),
        (tool(authorization="x"), "tools[0].authorization", "only with server_url"),
        (tool(server_url=url, headers={"Host": "x"}), "tools[0].headers.Host", "cannot be set"),
        (tool(server_url=url, headers={"A": "x\r\nB: y"}), "tools[0].headers.A", "printable ASCII"),
        (tool(server_url=url, authorization="x y\n"), "tools[0].authorization", "printable ASCII"),
        (tool(connector_id="connector_gmail"), "tools[0].connector_id", "send server_url"),
        (tool("bad label"), "tools[0].server_label", "expected"),
        (tool(require_approval="sometimes"), "tools[0].require_approval", "expected"),
        ({"type": "mcp"}, "tools[0].server_label", "required"),
    ]
    with talking(running) as http:
        for wrong, param, message in mistakes:
            answer = http.post(RESPONSES, json={"model": "m", "input": "add", "tools": [wrong]})
            assert message in refused(answer, 400, param=param), wrong
        twice = http.post(RESPONSES, json={"model": "m", "input": "add", "tools": [tool(), tool()]})
        assert "duplicate" in refused(twice, 400, param="tools[1].server_label")
        strange: Any = {"type": "mcp_approval_response", "approval_request_id": "mcpr_x", "approve": True}
        answer = http.post(RESPONSES, json={"model": "m", "input": [HELLO, strange], "tools": [tool()]})
        assert "no mcp_approval_request" in refused(answer, 400, param="input[1].approval_request_id")
        ignored = http.post(RESPONSES, json={"model": "m", "input": "add", "tools": [tool(defer_loading=True)]})
        assert ignored.headers["x-dragoman-ignored"] == "tools[0].defer_loading"


def test_tool_choice_of_a_server(client: OpenAI) -> None:
    forced: Any = {"type": "mcp", "server_label": "calc", "name": "add"}
    response = create(client, "add", tool(), LOOK, tool_choice=forced)
    assert kinds(response)[-2:] == ["mcp_call", "message"]
    with pytest.raises(openai.BadRequestError, match="unknown server 'x'"):
        create(client, "add", tool_choice={"type": "mcp", "server_label": "x"})
    only: Any = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look"}]}
    assert "mcp_list_tools" not in kinds(create(client, "add and look", tool(), LOOK, tool_choice=only))


TOOLSET: dict[str, Any] = {"type": "mcp_toolset", "mcp_server_name": "calc"}


def say(claude: Anthropic, said: Any, **fields: Any) -> BetaMessage:
    messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
    asked = {"model": "m", "max_tokens": 200, "messages": messages, "tools": [TOOLSET], **fields}
    raw = claude.beta.messages.with_raw_response.create(**asked, betas=["mcp-client-2025-11-20"])
    return BetaMessage.model_validate_json(raw.read(), strict=True)


def test_message_calls_a_tool(claude: Anthropic) -> None:
    message = say(claude, "add")
    assert [block.type for block in message.content] == ["thinking", "text", "mcp_tool_use", "mcp_tool_result", "text"]
    _, _, use, result, said = message.content
    assert (use.name, use.server_name, use.input) == ("add", "calc", {"a": 1, "b": 2})  # type: ignore[union-attr]
    assert (result.tool_use_id, result.is_error) == (use.id, False)  # type: ignore[union-attr]
    assert result.content[0].text == "3"  # type: ignore[union-attr]
    assert said.text == "The sum is 3."  # type: ignore[union-attr]
    assert message.stop_reason == "end_turn"
    failed = say(claude, "fail").content[1]
    assert failed.is_error is True  # type: ignore[union-attr]


def test_message_continues_with_its_own_blocks(claude: Anthropic) -> None:
    first = say(claude, "add")
    blocks = [block.model_dump(exclude_none=True) for block in first.content]
    history = [{"role": "user", "content": "add"}, {"role": "assistant", "content": blocks}]
    message = say(claude, [*history, {"role": "user", "content": "fail"}])
    assert [block.type for block in message.content] == ["mcp_tool_use", "mcp_tool_result", "text"]


def test_streamed_message(claude: Anthropic, running: Running) -> None:
    asked = {"model": "m", "max_tokens": 200, "messages": [{"role": "user", "content": "add"}], "tools": [TOOLSET]}
    with talking(running) as http:
        body = http.post(MESSAGES, json=asked | {"stream": True}).text
    data = [block.partition("data: ")[2] for block in body.split("\n\n") if block and not block.startswith(":")]
    events = [BETA.validate_json(one, strict=True) for one in data if '"ping"' not in one]
    starts = [event for event in events if event.type == "content_block_start"]
    assert [event.index for event in starts] == list(range(len(starts)))
    with claude.beta.messages.stream(**asked) as stream:  # type: ignore[arg-type]
        final = stream.get_final_message()
    whole = say(claude, "add")
    assert [block.type for block in final.content] == [block.type for block in whole.content]
    use, result = final.content[2:4]
    assert (use.input, result.tool_use_id) == ({"a": 1, "b": 2}, use.id)  # type: ignore[union-attr]
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_tool_use_of_the_client_ends_the_message(claude: Anthropic) -> None:
    look = {"name": "look", "input_schema": {"type": "object"}}
    message = say(claude, "add and look", tools=[TOOLSET, look])
    assert [block.type for block in message.content] == ["mcp_tool_use", "tool_use", "mcp_tool_result"]
    assert message.stop_reason == "tool_use"
    blocks = [block.model_dump(exclude_none=True) for block in message.content]
    result = {"type": "tool_result", "tool_use_id": message.content[1].id, "content": "blue"}  # type: ignore[union-attr]
    history = [{"role": "user", "content": "add and look"}, {"role": "assistant", "content": blocks}]
    assert (
        say(claude, [*history, {"role": "user", "content": [result]}], tools=[TOOLSET, look]).content[0].text == "blue"
    )  # type: ignore[union-attr]


def test_tools_of_a_toolset(claude: Anthropic, running: Running, port: int) -> None:
    def offered(**fields: Any) -> bool:
        return "mcp_tool_use" in [block.type for block in say(claude, "add", **fields).content]

    assert offered(tools=[TOOLSET | {"default_config": {"enabled": False}, "configs": {"add": {"enabled": True}}}])
    assert not offered(tools=[TOOLSET | {"configs": {"add": {"enabled": False}}}])
    pinned = [{"name": "add", "description": "", "input_schema": {"type": "object"}}]
    assert offered(tools=[TOOLSET | {"tools": pinned}])
    assert not offered(tools=[TOOLSET | {"tools": []}])
    server = {"type": "url", "name": "calc", "url": f"http://127.0.0.1:{port}/mcp", "authorization_token": "abc"}
    assert offered(mcp_servers=[server])
    # The older form has no toolset.
    assert offered(mcp_servers=[server], tools=[])
    assert not offered(mcp_servers=[server | {"tool_configuration": {"allowed_tools": ["fail"]}}], tools=[])
    assert not offered(mcp_servers=[server | {"tool_configuration": {"enabled": False}}], tools=[])
    with talking(running) as http:
        asked: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "add"}]}
        deferred = http.post(MESSAGES, json=asked | {"tools": [TOOLSET | {"default_config": {"defer_loading": True}}]})
        assert deferred.headers["x-dragoman-ignored"] == "tools[0].default_config.defer_loading"
        for fields, message in (
            ({"tools": [TOOLSET, TOOLSET]}, "tools[1].mcp_server_name"),
            ({"mcp_servers": [{"type": "stdio", "name": "x"}]}, "mcp_servers[0].type"),
            ({"mcp_servers": [server, server]}, "mcp_servers[1].name"),
            ({"mcp_servers": [server | {"url": None}]}, "mcp_servers[0].authorization_token: only with url"),
            ({"mcp_servers": [server | {"url": "http://10.0.0.1/"}]}, "mcp_servers[0]: this server does not connect"),
        ):
            answer = http.post(MESSAGES, json=asked | fields)
            assert answer.status_code == 400
            assert answer.json()["error"]["message"].startswith(message), answer.text


def test_requests_share_a_connection(client: OpenAI) -> None:
    def process() -> str:
        return str(create(client, "who").output[1].output)  # type: ignore[union-attr]

    assert process() == process()


def test_reload_changes_the_servers(running: Running, client: OpenAI) -> None:
    file = running.event_log.parent / "dragoman.json"
    before = file.read_text()
    config = json.loads(before)
    config["mcp_servers"]["other"] = config["mcp_servers"].pop("sums")
    config["mcp"]["call_seconds"] = 29
    try:
        file.write_text(json.dumps(config))
        with talking(running) as http:
            assert http.post("/admin/reload", timeout=PATIENCE).status_code == 200
        listed = create(client, "hello", tool("other")).output[0]
        assert {one.name for one in listed.tools} == {"add", "draw"}  # type: ignore[union-attr]
        with pytest.raises(openai.BadRequestError, match="it has: calc, remote, other"):
            create(client, "hello", tool("sums"))
    finally:
        file.write_text(before)
        with talking(running) as http:
            assert http.post("/admin/reload", timeout=PATIENCE).status_code == 200
