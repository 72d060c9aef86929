"""The tools of servers during one request: lists them, offers them to the model, runs the calls.

Rules
1. Every tool becomes a function. Its name is changed if the request has another tool of this name.
2. Calls that an earlier response asked for, and that are approved now, run before the model does.
3. The tools outlive the attempt with one model: a fallback model must not run approved calls again.
"""

import asyncio
from collections.abc import Sequence

import msgspec

from dragoman.core.errors import BadRequest, quote
from dragoman.core.events import Event, ToolCallDelta, ToolCallStart, ToolOutput
from dragoman.core.request import GenerationRequest, Message, Text, Tool, ToolCall, ToolChoice, ToolResult
from dragoman.core.tool_schemas import ANY_OBJECT, usable_schema
from dragoman.core.tool_servers import ListedTool, ToolServer, digest_name, function_name
from dragoman.protocols.json_body import parse_text
from dragoman.server.tool_servers import ToolServers


class OfferedTool(msgspec.Struct, frozen=True):
    """The tool of a server that a function of the model stands for."""

    server: ToolServer
    tool: ListedTool

    @property
    def needs_approval(self) -> bool:
        return self.server.approval.needs_approval(self.tool)


class RequestTools:
    def __init__(self, servers: ToolServers, request: GenerationRequest, request_id: str, principal: str) -> None:
        self.opening: list[Event] = []
        """What happened before the model ran."""
        self.functions: dict[str, OfferedTool] = {}
        """By function name."""
        self._servers = servers
        self._request = request
        self._caller = request_id, principal
        self._tools: list[Tool] = []
        self._results: dict[str, ToolResult] = {}
        self._is_listed = False

    async def list_tools(self) -> None:
        """List the tools and offer them. Further calls do nothing."""
        if self._is_listed:
            return
        servers = self._request.tool_servers
        wanted = tuple([server.label for server in servers if server.needs_listing])
        plain = [msgspec.structs.replace(server, listed=None) for server in servers]
        listings = {listing.server: listing for listing in await self._servers.list_tools(*self._caller, plain, wanted)}
        for server in plain:
            error = listings[server.label].error if server.label in listings else None
            if error is not None and server.must_list:
                raise BadRequest(f"{server.path}: the tools cannot be listed: {error}", param=server.path)
        for server, known in zip(plain, servers, strict=True):
            listing = listings.get(server.label)
            self._offer(server, (known.listed or ()) if listing is None else listing.tools)
        self.opening += listings.values()
        self._is_listed = True

    async def run_approved(self) -> None:
        """Run the approved calls. Further calls do nothing."""
        calls = [call for call in self._request.approved_calls if call.id not in self._results]
        outputs = await asyncio.gather(*map(self._call_approved, calls))
        for call, output in zip(calls, outputs, strict=True):
            start = ToolCallStart(call.id, call.name, call.server, call.approval)
            self.opening += [start, ToolCallDelta(call.arguments), output]
            self._results[call.id] = as_result(output)

    def complete(self, request: GenerationRequest) -> GenerationRequest:
        """Return the request with the tools of servers as functions."""
        tools, most = (*request.tools, *self._tools), request.max_tool_calls
        return msgspec.structs.replace(
            request,
            tools=tools,
            tool_choice=self._resolve_choice(request.tool_choice, tools),
            tool_servers=(),
            max_tool_calls=None if most is None else max(0, most - len(request.approved_calls)),
        )

    def fill_results(self, request: GenerationRequest) -> GenerationRequest:
        """Return the request with the results of approved calls."""
        messages = tuple([self._fill(message) for message in request.messages])
        return msgspec.structs.replace(request, messages=messages, approved_calls=())

    async def call(self, function: OfferedTool, call: ToolCall) -> ToolOutput:
        arguments = call.arguments.strip() or "{}"
        try:
            parse_text(arguments, "arguments")
        except BadRequest as error:
            return ToolOutput(call.id, f"not run: {error.message}", is_error=True)
        named = ToolCall(call.id, function.tool.name, arguments)
        return await self._servers.call_tool(*self._caller, function.server, named)

    def accept_any_arguments(self, request: GenerationRequest) -> GenerationRequest:
        """Return the request with tools of servers that accept every object."""
        tools = [
            msgspec.structs.replace(tool, parameters=ANY_OBJECT) if tool.name in self.functions else tool
            for tool in request.tools
        ]
        return msgspec.structs.replace(request, tools=tuple(tools))

    def _offer(self, server: ToolServer, tools: Sequence[ListedTool]) -> None:
        taken = {tool.name for tool in self._request.tools} | self.functions.keys()
        # A server may list a tool twice.
        offered = dict.fromkeys([tool.name for tool in tools if server.offered.matches(tool)])
        by_name = {tool.name: tool for tool in reversed(tools)}
        for at, tool in enumerate([by_name[name] for name in offered]):
            name = function_name(server.label, tool.name)
            while name in taken:
                name = digest_name(server.label, name)
            taken.add(name)
            # The description of a server is added to its first tool only.
            about = server.description if at == 0 else ""
            description = "\n".join([text for text in (about, tool.description) if text])
            self._tools.append(Tool(name, description, usable_schema(tool.input_schema), path=server.path))
            self.functions[name] = OfferedTool(server, tool)

    def _resolve_choice(self, choice: ToolChoice, tools: Sequence[Tool]) -> ToolChoice:
        """Check a forced call, which may name a tool as its server does."""
        if choice.mode == "required" and not tools:
            raise BadRequest("tool_choice: a tool call is required, but no server offers a tool", param="tool_choice")
        if choice.mode != "named" or any(tool.name == choice.name for tool in tools):
            return choice
        names = [name for name, function in self.functions.items() if function.tool.name == choice.name]
        if not names:
            raise BadRequest(f"tool_choice: no tool named {quote(choice.name)}", param="tool_choice")
        return msgspec.structs.replace(choice, name=names[0])

    async def _call_approved(self, call: ToolCall) -> ToolOutput:
        for function in self.functions.values():
            if (function.server.label, function.tool.name) == (call.server, call.name):
                return await self.call(function, call)
        message = f"not run: the mcp server {quote(call.server or '')} does not offer the tool {quote(call.name)}"
        return ToolOutput(call.id, message, is_error=True)

    def _fill(self, message: Message) -> Message:
        """Return the message with the result of an approved call, if it waits for one."""
        if message.role != "tool":
            return message
        parts = [
            self._results.get(part.call_id, part) if isinstance(part, ToolResult) else part for part in message.parts
        ]
        return msgspec.structs.replace(message, parts=tuple(parts))


def as_result(output: ToolOutput) -> ToolResult:
    return ToolResult(output.call_id, (Text(output.text),), output.is_error)
