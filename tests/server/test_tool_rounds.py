"""Rounds of a model and of the tools of servers: one stream of events, whatever the model and the servers do."""

import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from hypothesis import given, settings

from dragoman import Hooks, create_app
from dragoman.core.errors import EngineDied, InvalidSchema, PermissionDenied
from dragoman.core.events import (
    Event,
    Finished,
    Listener,
    Started,
    TextDelta,
    ToolCallStart,
    ToolOutput,
    ToolsListed,
    Usage,
    notify,
)
from dragoman.core.request import GenerationRequest, Message, Text, ToolCall, ToolResult
from dragoman.core.tool_servers import ListedTool, ToolServer
from dragoman.engines.scripted import ScriptedEngine, ScriptedOptions
from dragoman.engines.scripted_replies import ScriptedReply
from dragoman.server import tool_servers
from tests.server.mcp_fixtures import call
from tests.support.requests import refused, talk
from tests.support.text_splits import cut, cuttings

FIRST = "<think>Both, then.</think>I try « both »." + call("s__one", text="é\n<tool_call>") + call("s__two") + "\n"
SECOND = "And now" + call("other__one", a=[1, {"b": None}])
LAST = "<think>Done.</think>Fine."
OUTPUTS = {"one": "first result", "two": "second result"}
TOOLS = tuple([ListedTool(name, f"Tool {name}.", {"type": "object"}) for name in OUTPUTS])
REPLIES = (
    ScriptedReply(SECOND, match="second result"),
    ScriptedReply(LAST, match="first result"),
    ScriptedReply(FIRST, match="start"),
)
SERVERS = [{"type": "mcp", "server_label": label, "require_approval": "never"} for label in ("s", "other")]
START: dict[str, Any] = {"input": "start", "tools": SERVERS}


class Servers:
    """Tool servers that note what they are asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, str]] = []
        self.listings = 0

    async def list_tools(
        self, request_id: str, principal: str, servers: Sequence[ToolServer], wanted: Sequence[str]
    ) -> tuple[ToolsListed, ...]:
        self.listings += 1
        return tuple([ToolsListed(label, TOOLS) for label in wanted])

    async def call_tool(self, request_id: str, principal: str, server: ToolServer, call: ToolCall) -> ToolOutput:
        self.calls.append((server.label, call.name, call.arguments))
        return ToolOutput(call.id, OUTPUTS[call.name])


class Model(ScriptedEngine):
    """Plays its script in pieces, and notes its requests."""

    def __init__(self, places: Sequence[int] = (), replies: Sequence[ScriptedReply] = REPLIES) -> None:
        super().__init__("m", ScriptedOptions(tuple(replies), format="hermes"))
        self.places = list(places)
        self.requests: list[GenerationRequest] = []

    async def deliver(self, request: GenerationRequest, listener: Listener) -> None:
        self.requests.append(request)
        await self.play(request, listener, cut(self.choose_reply(request).output or "", self.places))

    async def play(self, request: GenerationRequest, listener: Listener, pieces: Sequence[str]) -> None:
        await notify(listener, [Started(10)])
        for piece in pieces:
            await notify(listener, [TextDelta(piece)])
        await notify(listener, [Finished(usage=Usage(prompt=10, completion=len(pieces)))])


def post(*engines: ScriptedEngine, servers: Servers | None = None, hooks: Hooks | None = None, **fields: Any) -> Any:
    """The response of an app with these engines; that of a stream is its last one."""
    app = create_app(*engines, hooks=hooks)
    app.tool_servers = servers or Servers()  # type: ignore[assignment]

    async def send(client: httpx.AsyncClient) -> Any:
        answer = await client.post("/v1/responses", json={**START, **fields})
        if not fields.get("stream"):
            return answer.json()
        return json.loads(answer.text.rstrip().rpartition("data: ")[2])["response"]

    return talk(app, send)


def items(response: Any) -> Any:
    """The items of a response without its id."""
    return json.loads(json.dumps(response["output"]).replace(response["id"].removeprefix("resp_"), ""))


EXPECTED = items(post(Model()))


def test_calls_after_a_message_that_the_reply_continues() -> None:
    """The model gets what it has written as one message."""
    model = Model()
    app = create_app(model)
    app.tool_servers = Servers()  # type: ignore[assignment]
    body = {
        "max_tokens": 50,
        "messages": [{"role": "user", "content": "start"}, {"role": "assistant", "content": "Well,"}],
        "mcp_servers": [{"type": "url", "name": name, "url": "https://example.org"} for name in ("s", "other")],
        "tools": [{"type": "mcp_toolset", "mcp_server_name": name} for name in ("s", "other")],
    }
    reply = talk(app, lambda client: client.post("/v1/messages", json=body)).json()
    assert [block["type"] for block in reply["content"]].count("mcp_tool_use") == 3
    first, second, third = model.requests
    assert (first.prefill, second.continues_last, third.continues_last) == (Text("Well,"), False, False)
    assert [message.role for message in second.messages] == ["user", "assistant", "tool", "tool"]
    turn = second.messages[1]
    assert turn.text.startswith("Well,I try")
    assert [call.name for call in turn.tool_calls] == ["s__one", "s__two"]


def test_three_rounds_are_one_response() -> None:
    kinds = [item["type"] for item in EXPECTED]
    assert kinds == [
        *("mcp_list_tools", "mcp_list_tools", "reasoning", "message", "mcp_call", "mcp_call"),
        *("message", "mcp_call", "reasoning", "message"),
    ]
    calls = [item for item in EXPECTED if item["type"] == "mcp_call"]
    assert [(item["server_label"], item["name"], item["output"]) for item in calls] == [
        ("s", "one", "first result"),
        ("s", "two", "second result"),
        ("other", "one", "first result"),
    ]
    assert json.loads(calls[0]["arguments"]) == {"text": "é\n<tool_call>"}


@given(cuttings())
@settings(max_examples=60)
def test_response_is_the_same_for_every_cutting(places: list[int]) -> None:
    assert items(post(Model(places))) == EXPECTED
    assert items(post(Model(places), stream=True)) == EXPECTED


def test_model_sees_its_turns_and_the_results() -> None:
    model, servers = Model(), Servers()
    response = post(model, servers=servers)
    _, second, third = model.requests
    assert [tool.name for tool in second.tools] == ["s__one", "s__two", "other__one", "other__two"]
    turn, *results = second.messages[1:]
    assert [name for name, *_ in ((made.name, made) for made in turn.tool_calls)] == ["s__one", "s__two"]
    assert turn.reasoning == "Both, then."
    assert [message.text for message in results] == ["first result", "second result"]
    assert [part.call_id for message in results for part in message.parts if isinstance(part, ToolResult)] == [
        made.id for made in turn.tool_calls
    ]
    assert len(third.messages) == len(second.messages) + 2
    # A request that reaches an engine has nothing of the servers, whose headers may be secret.
    assert all(one.tool_servers == () for one in model.requests)
    assert servers.calls[2] == ("other", "one", '{"a": [1, {"b": null}]}')
    assert response["usage"]["input_tokens"] == 30
    # In the next request, the model sees the same conversation.
    again = Model(replies=[ScriptedReply("ok")])
    post(again, input=[{"role": "user", "content": "start"}, *response["output"], {"role": "user", "content": "on"}])
    seen = [message for message in again.requests[0].messages if message.role == "tool"]
    assert [message.text for message in seen] == ["first result", "second result", "first result"]
    assert {made.name for message in again.requests[0].messages for made in message.tool_calls} == {
        *("s__one", "s__two", "other__one"),
    }


def test_forced_call_is_forced_once() -> None:
    model = Model()
    post(model, tool_choice="required")
    assert [request.tool_choice.mode for request in model.requests] == ["required", "auto", "auto"]


def test_model_that_does_not_stop_calling_is_stopped() -> None:
    servers = Servers()
    response = post(Model(replies=[ScriptedReply(call("s__one"))]), servers=servers, max_tool_calls=2)
    made = [item for item in response["output"] if item["type"] == "mcp_call"]
    assert [item["status"] for item in made] == ["completed", "completed", "failed", "failed"]
    assert (len(servers.calls), response["status"]) == (2, "completed")


def test_names_that_collide_or_cannot_be_functions() -> None:
    class Odd(Servers):
        async def list_tools(
            self, request_id: str, principal: str, servers: Sequence[ToolServer], wanted: Sequence[str]
        ) -> tuple[ToolsListed, ...]:
            names = ("one", "a b", "a_b", "x" * 100, "x" * 101, "one")
            return tuple([ToolsListed(label, tuple(map(ListedTool, names))) for label in wanted])

    model = Model(replies=[ScriptedReply("ok")])
    taken = {"type": "function", "name": "s__one", "parameters": {"type": "object"}}
    post(model, servers=Odd(), tools=[taken, *SERVERS])
    names = [tool.name for tool in model.requests[0].tools]
    assert len(set(names)) == len(names) == 11
    assert all(len(name) <= 64 and name.replace("-", "_").isidentifier() for name in names)


def test_restarted_turn_replaces_only_itself() -> None:
    """An engine may start again, if the reply is not streamed."""

    class Restarting(Model):
        async def play(self, request: GenerationRequest, listener: Listener, pieces: Sequence[str]) -> None:
            await notify(listener, [Started(10)])
            await notify(listener, [TextDelta("lost " + call("s__two"))])
            await super().play(request, listener, pieces)

    servers = Servers()
    assert items(post(Restarting(), servers=servers)) == EXPECTED
    assert len(servers.calls) == 3


def test_failure_of_a_later_round_is_one_of_the_response() -> None:
    class Dying(Model):
        async def play(self, request: GenerationRequest, listener: Listener, pieces: Sequence[str]) -> None:
            if len(self.requests) > 1:
                raise EngineDied("the engine died")
            await super().play(request, listener, pieces)

    failed = post(Dying(), stream=True)
    assert (failed["status"], failed["error"]["message"]) == ("failed", "the engine died")
    assert [item["status"] for item in failed["output"] if item["type"] == "mcp_call"] == ["completed"] * 2
    assert post(Dying())["error"]["message"] == "the engine died"


def test_schemas_that_the_engine_rejects_are_not_enforced() -> None:
    class Picky(Model):
        async def play(self, request: GenerationRequest, listener: Listener, pieces: Sequence[str]) -> None:
            if any(tool.parameters != {"type": "object"} for tool in request.tools):
                raise InvalidSchema("tools: too complex", param="tools")
            await super().play(request, listener, pieces)

    class Complex(Servers):
        async def list_tools(
            self, request_id: str, principal: str, servers: Sequence[ToolServer], wanted: Sequence[str]
        ) -> tuple[ToolsListed, ...]:
            tools = [ListedTool(name, input_schema={"properties": {"a": {}}}) for name in OUTPUTS]
            return tuple([ToolsListed(label, tuple(tools)) for label in wanted])

    assert post(Picky(), servers=Complex())["status"] == "completed"
    # The schema of a function of the client is an error.
    own = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}
    assert post(Picky(), servers=Complex(), tools=[*SERVERS, own])["error"]["code"] == "invalid_schema"


def test_ids_that_an_engine_repeats_are_told_apart() -> None:
    class Upstream(Model):
        emits_tool_calls = True

        async def play(self, request: GenerationRequest, listener: Listener, pieces: Sequence[str]) -> None:
            calls: list[Event] = []
            if len(self.requests) < 3:
                calls = [ToolCallStart("0", "s__one"), ToolCallStart("0", "s__two")]
            reason = "tool_calls" if calls else "stop"
            await notify(listener, [Started(10), *calls, Finished(reason, usage=Usage(10, 1))])  # type: ignore[arg-type]

    model = Upstream()
    response = post(model)
    outputs = [item["output"] for item in response["output"] if item["type"] == "mcp_call"]
    assert outputs == ["first result", "second result"] * 2
    ids = [made.id for message in model.requests[-1].messages for made in message.tool_calls]
    assert len(set(ids)) == len(ids) == 4


def test_hooks_see_one_generation() -> None:
    finished: list[Any] = []
    tokens: list[str] = []
    hooks = Hooks(
        on_token=lambda request, choice, event: tokens.append(type(event).__name__),
        on_finish=lambda request, usage, error: finished.append((len(request.tools), usage.prompt, error)),
    )
    post(Model(), hooks=hooks)
    assert finished == [(4, 30, None)]
    assert tokens.count("ToolOutput") == 3


def refuse(request: GenerationRequest) -> None:
    raise PermissionDenied(f"no {request.approved_calls[0].name} here")


def test_approved_call_runs_before_the_model() -> None:
    request = {
        "type": "mcp_approval_request",
        "id": "mcpr_1",
        "server_label": "s",
        "name": "two",
        "arguments": '{"a":1}',
    }
    answer = {"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": True}
    servers, model = Servers(), Model(replies=[ScriptedReply("ok")])
    asked = [{"role": "user", "content": "x"}, request, answer]
    refused_by_hook = post(model, servers=servers, hooks=Hooks(on_request=refuse), input=asked)
    assert (refused_by_hook["error"]["message"], servers.calls) == ("no two here", [])
    response = post(model, servers=servers, input=asked)
    assert servers.calls == [("s", "two", '{"a":1}')]
    made = next(item for item in response["output"] if item["type"] == "mcp_call")
    assert (made["approval_request_id"], made["output"]) == ("mcpr_1", "second result")
    assert [message.role for message in model.requests[0].messages] == ["user", "assistant", "tool"]
    assert model.requests[0].messages[-1] == Message("tool", (ToolResult("mcpr_1", (Text("second result"),)),))
    # The answer may come before an item of the assistant only in a conversation that has gone on.
    later = [{"role": "user", "content": "x"}, request, answer, {"role": "assistant", "content": "done"}]
    post(model, servers=servers, input=[*later, {"role": "user", "content": "y"}])
    assert len(servers.calls) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_server_that_cannot_be_listed_fails_a_message_only(stream: bool) -> None:
    class Broken(Servers):
        async def list_tools(
            self, request_id: str, principal: str, servers: Sequence[ToolServer], wanted: Sequence[str]
        ) -> tuple[ToolsListed, ...]:
            return tuple([ToolsListed(label, error="out of order") for label in wanted])

    response = post(Model(replies=[ScriptedReply("ok")]), servers=Broken(), stream=stream)
    assert [item.get("error") for item in response["output"]] == ["out of order", "out of order", None]
    app = create_app(Model())
    app.tool_servers = Broken()  # type: ignore[assignment]
    body = {
        "max_tokens": 9,
        "stream": stream,
        "messages": [{"role": "user", "content": "start"}],
        "tools": [{"type": "mcp_toolset", "mcp_server_name": "s"}],
    }

    answer = talk(app, lambda client: client.post("/v1/messages", json=body))
    assert answer.status_code == 400
    assert "tools[0]: the tools cannot be listed: out of order" in answer.text


def test_without_the_package_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_servers, "find_spec", lambda name: None)
    app = create_app(Model())
    answer = talk(app, lambda client: client.post("/v1/responses", json=START))
    assert "pip install 'dragoman[mcp]'" in refused(answer, 501, param="tools")
    assert answer.headers["x-should-retry"] == "false"
