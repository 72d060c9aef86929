"""A conversation in which the model calls functions, until it has an answer.

    loop := (request -> reply, calls -> results)*        a generator: it is sent what came of what it asks for

Rules
1. All calls of one reply run at the same time; their results go back in the order of the calls.
2. What goes wrong with a call is a result too: an exception, arguments that do not fit, a tool that nobody knows.
3. Arguments that are no JSON are answered like that, and do not go back: servers choke on them.
4. After `steps` replies without an answer it is enough: `StepLimitReached`, with the conversation so far.
"""

from collections.abc import Generator, Mapping
from typing import Any

import msgspec

from dragoman.client.options import Question
from dragoman.client.python_types import PythonTool
from dragoman.core.errors import StepLimitReached
from dragoman.core.events import Usage, total_usage
from dragoman.core.reply import Reply
from dragoman.core.request import Message, Text, ToolCall, ToolResult
from dragoman.protocols.client.tool_calls import is_object

STEPS = 10


class Outcome(msgspec.Struct, frozen=True):
    """`reply` is the last one; `messages` the whole conversation, with it; `usage` that of all replies together."""

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
    """A call to be made. `tool` is None where there is none of that name."""

    call: ToolCall
    tool: PythonTool | None
    refusal: str = ""
    """Why it is not made."""

    def run(self) -> ToolResult:
        return self._refused() if self.tool is None or self.refusal else self.tool.run(self.call)

    async def run_async(self) -> ToolResult:
        return self._refused() if self.tool is None or self.refusal else await self.tool.run_async(self.call)

    def _refused(self) -> ToolResult:
        return ToolResult(self.call.id, (Text(f"error: {self.refusal}"),), is_error=True)


Loop = Generator[Question | tuple[Invocation, ...], Any, Outcome]


def loop(asked: Question, steps: int = STEPS) -> Loop:
    _check(asked, steps)
    messages = asked.request.messages
    usages: list[Usage] = []
    for step in range(1, steps + 1):
        request = msgspec.structs.replace(asked.request, messages=messages)
        reply: Reply = yield msgspec.structs.replace(asked, request=request)
        usages.append(reply.usage)
        messages = (*messages, _sendable(reply.message))
        if not reply.tool_calls or reply.reason == "length":
            return Outcome(reply, messages, total_usage(usages), step)
        results: list[ToolResult] = yield tuple(_invocation(call, asked.functions) for call in reply.tool_calls)
        messages = (*messages, *(Message("tool", (result,)) for result in results))
    error = StepLimitReached(f"after {steps} replies the model still calls tools")
    error.messages = messages
    raise error


def _check(asked: Question, steps: int) -> None:
    if steps < 1:
        raise ValueError("steps: at least 1")
    unknown = [tool.name for tool in asked.request.tools if tool.name not in asked.functions]
    if unknown:
        raise TypeError(f"{', '.join(unknown)}: `run` needs functions, not descriptions of tools")


def _sendable(message: Message) -> Message:
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
        known = ", ".join(functions) or "none"
        return Invocation(call, None, f"no tool is called {call.name!r:.100}; there are: {known}")
    if not is_object(call.arguments):
        return Invocation(call, tool, f"the arguments are no JSON object: {call.arguments[:500]}")
    return Invocation(call, tool)
