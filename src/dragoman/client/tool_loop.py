"""Runs a conversation in which the model calls Python functions until it has an answer.

    loop := (request -> reply, calls -> results)*        a generator that is sent the result of each step

Rules
1. All calls of one reply run concurrently; their results are returned in the order of the calls.
2. Failures are results too: an exception, invalid arguments, an unknown tool.
3. Arguments that are not a JSON object produce an error result and are replaced by `{}` in the history, because servers
   reject them.
4. After `steps` replies with calls the loop raises `StepLimitReached`, which has the conversation so far.
"""

from collections.abc import Generator, Mapping
from typing import Any

import msgspec

from dragoman.client.options import ClientRequest
from dragoman.client.python_types import PythonTool, error_result
from dragoman.core.errors import StepLimitReached
from dragoman.core.events import Usage, total_usage
from dragoman.core.reply import Reply
from dragoman.core.request import Message, ToolCall, ToolResult
from dragoman.protocols.json_body import is_object

DEFAULT_STEPS = 10


class Outcome(msgspec.Struct, frozen=True):
    """`reply` is the last reply, `messages` the whole conversation including it, `usage` the sum over all replies."""

    reply: Reply
    messages: tuple[Message, ...]
    usage: Usage
    steps: int

    @property
    def text(self) -> str:
        return self.reply.text

    @property
    def output(self) -> Any:
        return self.reply.output


class Invocation(msgspec.Struct, frozen=True):
    """A call and the function it names, or the reason why the call cannot be made."""

    call: ToolCall
    tool: PythonTool | None
    error: str = ""

    def run(self) -> ToolResult:
        return error_result(self.call, self.error) if self.tool is None else self.tool.run(self.call)

    async def run_async(self) -> ToolResult:
        return error_result(self.call, self.error) if self.tool is None else await self.tool.run_async(self.call)


LoopStep = ClientRequest | tuple[Invocation, ...]
"""The result of a request is its reply, that of calls the list of their results."""


def run_tool_loop(client_request: ClientRequest, steps: int) -> Generator[LoopStep, Any, Outcome]:
    _check(client_request, steps)
    messages = client_request.request.messages
    usages: list[Usage] = []
    for step in range(1, steps + 1):
        request = msgspec.structs.replace(client_request.request, messages=messages)
        reply: Reply = yield msgspec.structs.replace(client_request, request=request)
        usages.append(reply.usage)
        messages = (*messages, _repair_arguments(reply.message))
        if not reply.tool_calls or reply.reason == "length":
            return Outcome(reply, messages, total_usage(usages), step)
        functions = client_request.functions
        results: list[ToolResult] = yield tuple(_invocation(call, functions) for call in reply.tool_calls)
        messages = (*messages, *(Message("tool", (result,)) for result in results))
    error = StepLimitReached(f"the model still calls tools after {steps} replies; raise `steps` to allow more")
    error.messages = messages
    raise error


def _check(client_request: ClientRequest, steps: int) -> None:
    if steps < 1:
        raise ValueError("steps: at least 1")
    unknown = [tool.name for tool in client_request.request.tools if tool.name not in client_request.functions]
    if unknown:
        raise TypeError(f"{', '.join(unknown)}: `run` needs Python functions as tools, not descriptions of tools")


def _repair_arguments(message: Message) -> Message:
    parts = tuple(
        msgspec.structs.replace(part, arguments="{}")
        if isinstance(part, ToolCall) and not is_object(part.arguments)
        else part
        for part in message.parts
    )
    return msgspec.structs.replace(message, parts=parts)


def _invocation(call: ToolCall, functions: Mapping[str, PythonTool]) -> Invocation:
    tool = functions.get(call.name)
    if tool is None:
        available = ", ".join(functions) or "none"
        return Invocation(call, None, f"unknown tool {call.name!r:.100}; available: {available}")
    if not is_object(call.arguments):
        return Invocation(call, None, f"the arguments are not a JSON object: {call.arguments[:500]}")
    return Invocation(call, tool)
