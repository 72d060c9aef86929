"""Tools of MCP servers in responses, through the official SDK."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.server.mcp_fixtures import McpTest, mcp
from tests.support.batches import finish, read_file, submit
from tests.support.requests import PATIENCE, eventually, recorded, refused, talking, under_way
from tests.support.sdk import sdk

__all__ = ["mcp"]
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
RESPONSES = "/v1/responses"
HELLO = {"role": "user", "content": "hello"}
LOOK: dict[str, Any] = {"type": "function", "name": "look", "parameters": {"type": "object"}}


@pytest.fixture(scope="module")
def client(mcp: McpTest) -> Iterator[OpenAI]:
    with sdk(mcp.running) as made:
        yield made


def tool(label: str = "calc", approval: Any = "never", **fields: Any) -> Any:
    return {"type": "mcp", "server_label": label, "require_approval": approval, **fields}


def create(client: OpenAI, said: Any, *tools: Any, **fields: Any) -> Any:
    """The response, whose body is validated strictly against the SDK's type."""
    raw = client.responses.with_raw_response.create(
        model="m",
        input=said,
        tools=list(tools or (tool(),)),
        **fields,
    )
    return Response.model_validate_json(raw.content, strict=True)


def stream(client: OpenAI, said: Any, *tools: Any, **fields: Any) -> list[Any]:
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
    assert {one.name for one in listed.tools} >= {"add", "echo", "fail"}
    assert (made.name, made.server_label, made.output, made.error, made.status) == (
        *("add", "calc", "3", None, "completed"),
    )
    assert json.loads(made.arguments) == {"a": 1, "b": 2}
    assert said.content[0].text == response.output_text.removeprefix("I add.") == "The sum is 3."
    assert response.status == "completed"


def test_servers_with_http(client: OpenAI, mcp: McpTest) -> None:
    assert create(client, "remote", tool("remote")).output_text == "The sum is 3."
    requested = tool("calc", server_url=mcp.url)
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


def test_usage_is_that_of_all_rounds(client: OpenAI, mcp: McpTest) -> None:
    response = create(client, "add")
    assert response.usage is not None
    # The prompt of the second round has the first turn and the result.
    first = create(client, "add", tool(), max_output_tokens=1).usage
    assert first is not None
    assert response.usage.input_tokens > 2 * first.input_tokens
    assert response.usage.output_tokens > 20
    (record,) = recorded(mcp.running, id=response.id)
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
    assert made.output == "<|im_end|>"
    assert said.content[0].text == "It is text."


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
    assert (made.approval_request_id, made.output) == (request.id, "3")
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
    assert [one.name for one in listed.tools] == ["add"]
    refused_call = create(client, "fail", tool(allowed_tools=allowed))
    # The model calls what it was not offered. That is a call of a function that the request does not have.
    assert "mcp_call" not in kinds(refused_call)


def test_tools_that_the_operator_does_not_allow_are_not_listed(client: OpenAI) -> None:
    listed = create(client, "hello", tool("sums")).output[0]
    assert {one.name for one in listed.tools} == {"add", "draw"}


def test_function_of_the_client_ends_the_response_after_calls_of_servers(client: OpenAI) -> None:
    response = create(client, "add and look", tool(), LOOK)
    assert kinds(response) == ["mcp_list_tools", "mcp_call", "function_call"]
    assert response.output[1].output == "3"
    function = response.output[2]
    output: Any = {"type": "function_call_output", "call_id": function.call_id, "output": "blue"}
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
    assert (first.output, second.output) == ("3", None)
    assert "limit" in second.error.content[0]["text"]
    assert said.content[0].text == "It failed."


def test_rounds_end(client: OpenAI) -> None:
    response = create(client, "forever")
    made = [item for item in response.output if item.type == "mcp_call"]
    # The limit of the configuration, and one more call, after which the model sees that it is reached.
    assert [item.error is None for item in made] == [True] * 4 + [False]
    assert response.output_text == "It failed."


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


def test_slot_is_free_while_a_tool_runs(client: OpenAI, mcp: McpTest) -> None:
    """The model has one slot, and the engine may be silent for one second."""
    with talking(mcp.running) as http:
        waiting = {"model": "m", "input": "wait", "tools": [tool()], "stream": True}
        with http.stream("POST", RESPONSES, json=waiting) as response:
            lines = response.iter_lines()
            assert any("mcp_call_arguments.done" in line for line in lines)
            assert create(client, "hello").output_text == "hello"
            rest = "\n".join(lines)
    assert "I have waited." in rest
    assert "response.completed" in rest


def test_client_that_leaves_cancels_the_call(client: OpenAI, mcp: McpTest) -> None:
    with talking(mcp.running) as http:
        waiting = {"model": "m", "input": "wait long", "tools": [tool()], "stream": True}
        with http.stream("POST", RESPONSES, json=waiting) as response:
            assert any("mcp_call_arguments.done" in line for line in response.iter_lines())

    def history() -> str:
        return str(create(client, "remember").output[1].output)

    assert eventually(lambda: "long cancelled" in history()), history()
    under_way(mcp.running, "m", 0)


def test_credentials_are_sent_to_the_server_and_not_shown(client: OpenAI, mcp: McpTest) -> None:
    own = tool("calc", server_url=mcp.url, authorization="token-of-the-caller")
    response = create(client, "secret", own, store=True)
    made = next(item for item in response.output if item.type == "mcp_call")
    assert "'authorization': '***'" in str(made.output)
    assert "token-of-the-caller" not in response.model_dump_json()
    (shown,) = response.tools
    assert (shown.authorization, shown.headers) == (None, None)
    assert shown.server_url == f"http://127.0.0.1:{mcp.port}/***"
    assert "token-of-the-caller" not in client.responses.retrieve(response.id).model_dump_json()
    custom = tool("calc", server_url=mcp.url, headers={"X-Tenant": "tenant-of-the-caller"})
    assert "'x-tenant': '***'" in create(client, "secret", custom).model_dump_json()


def test_background_response_calls_tools(client: OpenAI, mcp: McpTest) -> None:
    response = client.responses.create(model="m", input="add", tools=[tool()], background=True)
    assert eventually(lambda: client.responses.retrieve(response.id).status == "completed")
    done = client.responses.retrieve(response.id)
    assert kinds(done) == ["mcp_list_tools", "reasoning", "message", "mcp_call", "message"]
    own = tool("calc", server_url=mcp.url, authorization="x")
    with pytest.raises(openai.BadRequestError, match="background request is stored"):
        client.responses.create(model="m", input="add", tools=[own], background=True)


# The SDK uses `websockets` in a way that version 17 deprecates.
@pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager:DeprecationWarning")
def test_websocket_calls_tools(client: OpenAI) -> None:
    with client.responses.connect() as connection:
        connection.response.create(model="m", input="add", tools=[tool()], store=False)
        final: Any = next(event for event in connection if event.type == "response.completed")
    assert kinds(final.response) == ["mcp_list_tools", "reasoning", "message", "mcp_call", "message"]


def test_batch_calls_tools(client: OpenAI) -> None:
    body = {"model": "m", "input": "add", "tools": [tool()]}
    line = {"custom_id": "one", "method": "POST", "url": RESPONSES, "body": body}
    batch = finish(client, submit(client, [line], RESPONSES).id)
    (done,) = read_file(client, batch.output_file_id)
    kinds_of_items = [item["type"] for item in done["response"]["body"]["output"]]
    assert kinds_of_items == ["mcp_list_tools", "reasoning", "message", "mcp_call", "message"]


def test_cancelled_background_response_cancels_its_call(client: OpenAI, mcp: McpTest) -> None:
    response = client.responses.create(model="m", input="wait long", tools=[tool()], background=True)
    with talking(mcp.running) as http, http.stream("GET", f"{RESPONSES}/{response.id}?stream=true") as events:
        assert any("mcp_call_arguments.done" in line for line in events.iter_lines())
    assert client.responses.cancel(response.id).status == "cancelled"
    under_way(mcp.running, "m", 0)


def test_counted_tokens(client: OpenAI, mcp: McpTest) -> None:
    fields: dict[str, Any] = {"model": "m", "input": "hello"}
    counted = client.responses.input_tokens.count(**fields, tools=[tool()])
    assert counted.input_tokens == client.responses.input_tokens.count(**fields).input_tokens
    with talking(mcp.running) as http:
        answer = http.post(f"{RESPONSES}/input_tokens", json=fields | {"tools": [tool("missing")]})
        assert "there is no mcp server 'missing'" in refused(answer, 400, param="tools[0]")


def test_mistakes_name_the_field(mcp: McpTest) -> None:
    url = mcp.url
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
    with talking(mcp.running) as http:
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


def test_requests_share_a_connection(client: OpenAI) -> None:
    def process() -> str:
        return str(create(client, "who").output[1].output)

    assert process() == process()


def test_reload_changes_the_servers(mcp: McpTest, client: OpenAI) -> None:
    file = mcp.running.event_log.parent / "dragoman.json"
    before = file.read_text()
    config = json.loads(before)
    config["mcp_servers"]["other"] = config["mcp_servers"].pop("sums")
    config["mcp"]["call_seconds"] = 29
    try:
        file.write_text(json.dumps(config))
        with talking(mcp.running) as http:
            assert http.post("/admin/reload", timeout=PATIENCE).status_code == 200
        listed = create(client, "hello", tool("other")).output[0]
        assert {one.name for one in listed.tools} == {"add", "draw"}
        with pytest.raises(openai.BadRequestError, match="it has: calc, remote, other"):
            create(client, "hello", tool("sums"))
    finally:
        file.write_text(before)
        with talking(mcp.running) as http:
            assert http.post("/admin/reload", timeout=PATIENCE).status_code == 200
