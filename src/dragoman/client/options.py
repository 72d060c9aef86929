"""What callers of a client may say, and the request that it is.

messages := text | message+           message := Message | a dict (`dicts`)
tool     := function | Tool | a dict (`dicts`)
thinking := on or off | an effort | a budget in tokens | Thinking

A value that is none is a `BadRequest` with the name of the option; an option that nobody knows is a `TypeError`, as for
any function.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict

import msgspec

from dragoman.client import message_dicts
from dragoman.client.python_types import PythonTool, Shape, shape_of, tool_of
from dragoman.core.errors import BadRequest
from dragoman.core.request import (
    GenerationRequest,
    JsonSchema,
    Message,
    Sampling,
    Text,
    Thinking,
    Tool,
    ToolChoice,
)

Messages = str | Message | Mapping[str, Any] | Sequence[Message | Mapping[str, Any]]


class Options(TypedDict, total=False):
    """`tools` are functions, `Tool`s or dicts; `tool_choice` is auto, none, required or the name of one of them.
    `output_schema` is a JSON schema or a type."""

    model: str
    tools: Sequence[Tool | Mapping[str, Any] | Callable[..., Any]]
    tool_choice: str | ToolChoice
    output_schema: Any
    thinking: bool | str | int | Thinking
    max_tokens: int
    stop: str | Sequence[str]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]


class Question(msgspec.Struct, frozen=True):
    request: GenerationRequest
    shape: Shape | None = None
    functions: Mapping[str, PythonTool] = {}


def question(messages: Messages, model: str, options: Options) -> Question:
    unknown = sorted(set(options) - set(Options.__annotations__))
    if unknown:
        raise TypeError(f"no option is called {', '.join(unknown)}; there are: {', '.join(Options.__annotations__)}")
    functions = {made.tool.name: made for made in map(_python_tool, options.get("tools") or ()) if made is not None}
    given = options.get("output_schema")
    shape = None if given is None else shape_of(given)
    tools = tuple(_tool(tool, functions, f"tools[{at}]") for at, tool in enumerate(options.get("tools") or ()))
    request = GenerationRequest(
        model=_converted(options.get("model") or model, str, "model"),
        messages=conversation(messages),
        tools=tools,
        tool_choice=_choice(options.get("tool_choice"), tools),
        constraint=None if shape is None else JsonSchema(shape.schema, shape.name, shape.is_strict),
        thinking=_thinking(options.get("thinking")),
        sampling=_sampling(options),
        max_tokens=_converted(options.get("max_tokens"), int | None, "max_tokens"),
        stop=_stops(options.get("stop")),
    )
    return Question(request, shape, functions)


def _converted(value: object, kind: Any, param: str) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        words = str(error).partition(" - at `$")[0]
        raise BadRequest(f"{param}: {words[:1].lower()}{words[1:]}", param=param) from error


def conversation(messages: Messages) -> tuple[Message, ...]:
    if isinstance(messages, str):
        return (Message("user", (Text(messages),)),)
    if isinstance(messages, Message | Mapping):
        messages = [messages]
    if not isinstance(messages, Iterable):
        raise BadRequest("messages: expected a text, a message or a list of messages", param="messages")
    return tuple(_message(message, f"messages[{at}]") for at, message in enumerate(messages))


def _message(given: Message | Mapping[str, Any], path: str) -> Message:
    if isinstance(given, Message):
        return given
    if not isinstance(given, Mapping):
        raise BadRequest(f"{path}: expected a Message or a dict, not {type(given).__name__}", param=path)
    return message_dicts.message(given, path)


def _python_tool(given: Tool | Mapping[str, Any] | Callable[..., Any]) -> PythonTool | None:
    return None if isinstance(given, Tool | Mapping) else tool_of(given)


def _tool(given: Tool | Mapping[str, Any] | Callable[..., Any], functions: Mapping[str, PythonTool], path: str) -> Tool:
    if isinstance(given, Tool):
        return given
    return message_dicts.tool(given, path) if isinstance(given, Mapping) else functions[given.__name__].tool


def _choice(given: str | ToolChoice | None, tools: Sequence[Tool]) -> ToolChoice:
    choice = _chosen(given)
    names = [tool.name for tool in tools]
    if choice.mode == "named" and choice.name not in names:
        words = f"tool_choice: no tool is called {choice.name!r:.100}; there are: {', '.join(names) or 'none'}"
        raise BadRequest(words, param="tool_choice")
    if choice.mode == "required" and not names:
        raise BadRequest("tool_choice: a call is required, but there are no tools", param="tool_choice")
    return choice


def _chosen(given: str | ToolChoice | None) -> ToolChoice:
    if isinstance(given, ToolChoice):
        return given
    if given is None or given == "auto":
        return ToolChoice()
    if given == "none":
        return ToolChoice("none")
    if given == "required":
        return ToolChoice("required")
    return ToolChoice("named", _converted(given, str, "tool_choice"))


def _thinking(given: bool | str | int | Thinking | None) -> Thinking:
    if isinstance(given, Thinking):
        return given
    if given is None:
        return Thinking()
    if isinstance(given, bool):
        return Thinking(enabled=given)
    if isinstance(given, int):
        return Thinking(enabled=True, budget_tokens=given)
    thinking: Thinking = _converted({"effort": given}, Thinking, "thinking")
    return thinking


def _sampling(options: Options) -> Sampling:
    given = {name: options[name] for name in Sampling.__struct_fields__ if options.get(name) is not None}  # type: ignore[literal-required]
    for name, value in given.items():
        read = getattr(_converted({name: value}, Sampling, name), name)
        numbers = read.values() if isinstance(read, Mapping) else (read,)
        if not all(math.isfinite(number) for number in numbers):
            # JSON has no word for it, and null would mean something else.
            raise BadRequest(f"{name}: expected a number, not {value!r:.100}", param=name)
    return msgspec.convert(given, Sampling)


def _stops(given: str | Sequence[str] | None) -> tuple[str, ...]:
    if given is None or isinstance(given, str):
        return () if given is None else (given,)
    stops: tuple[str, ...] = _converted(given, tuple[str, ...], "stop")
    return stops
