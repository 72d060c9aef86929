"""Converts the arguments of the client methods to a `GenerationRequest`.

messages := text | message+           message := Message | dict (`message_dicts`)
tool     := function | Tool | dict (`message_dicts`)
thinking := True or False | effort | budget in tokens | Thinking

An invalid value raises `BadRequest` with the name of the option. An unknown option raises `TypeError`, as for any
function.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict

import msgspec

from dragoman.client import message_dicts
from dragoman.client.python_types import OutputType, PythonTool, output_type_of, tool_from_function
from dragoman.core.errors import BadRequest, parse_validation_error
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
ToolOption = Tool | Mapping[str, Any] | Callable[..., Any]


class Options(TypedDict, total=False):
    """`tool_choice` is auto, none, required or the name of a tool. `output_schema` is a JSON schema or a type, alone or
    in `{"name": …, "schema": …, "strict": …}`."""

    model: str
    tools: Sequence[ToolOption]
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


class ClientRequest(msgspec.Struct, frozen=True):
    """A request, the type of its output, and the functions that the model may call, by name."""

    request: GenerationRequest
    output_type: OutputType | None = None
    functions: Mapping[str, PythonTool] = {}


def check_options(options: Options) -> Options:
    unknown = sorted(set(options) - set(Options.__annotations__))
    if unknown:
        raise TypeError(f"unknown option {', '.join(unknown)}; available: {', '.join(Options.__annotations__)}")
    return options


def build_request(messages: Messages, options: Options) -> ClientRequest:
    check_options(options)
    given_tools = options.get("tools") or ()
    python_tools = [tool_from_function(tool) for tool in given_tools if not isinstance(tool, Tool | Mapping)]
    functions = {tool.tool.name: tool for tool in python_tools}
    schema = options.get("output_schema")
    output = None if schema is None else output_type_of(schema)
    tools = tuple(_tool(tool, functions, f"tools[{at}]") for at, tool in enumerate(given_tools))
    request = GenerationRequest(
        model=_convert(options.get("model") or "", str, "model"),
        messages=build_messages(messages),
        tools=tools,
        tool_choice=_tool_choice(options.get("tool_choice"), tools),
        constraint=None if output is None else JsonSchema(output.schema, output.name, output.is_strict),
        thinking=_thinking(options.get("thinking")),
        sampling=_sampling(options),
        max_tokens=_convert(options.get("max_tokens"), int | None, "max_tokens"),
        stop=_stop_strings(options.get("stop")),
    )
    return ClientRequest(request, output, functions)


def _convert(value: object, kind: Any, param: str) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise BadRequest(f"{param}: {parse_validation_error(error)[1]}", param=param) from error


def build_messages(messages: Messages) -> tuple[Message, ...]:
    if isinstance(messages, str):
        return (Message("user", (Text(messages),)),)
    if isinstance(messages, Message | Mapping):
        messages = [messages]
    if not isinstance(messages, Iterable):
        raise BadRequest("messages: expected a string, a message or a list of messages", param="messages")
    return tuple(_message(message, f"messages[{at}]") for at, message in enumerate(messages))


def _message(value: Message | Mapping[str, Any], path: str) -> Message:
    if isinstance(value, Message):
        return value
    if not isinstance(value, Mapping):
        raise BadRequest(f"{path}: expected a Message or a dict, not {type(value).__name__}", param=path)
    return message_dicts.message(value, path)


def _tool(value: ToolOption, functions: Mapping[str, PythonTool], path: str) -> Tool:
    if isinstance(value, Tool):
        return value
    return message_dicts.tool(value, path) if isinstance(value, Mapping) else functions[value.__name__].tool


def _tool_choice(value: str | ToolChoice | None, tools: Sequence[Tool]) -> ToolChoice:
    if isinstance(value, ToolChoice):
        choice = value
    elif value is None or value in ("auto", "none", "required"):
        choice = msgspec.convert({"mode": value or "auto"}, ToolChoice)
    else:
        choice = ToolChoice("named", _convert(value, str, "tool_choice"))
    names = [tool.name for tool in tools]
    if choice.mode == "named" and choice.name not in names:
        message = f"tool_choice: unknown tool {choice.name!r:.100}; available: {', '.join(names) or 'none'}"
        raise BadRequest(message, param="tool_choice")
    if choice.mode == "required" and not names:
        raise BadRequest("tool_choice: 'required' needs at least one tool", param="tool_choice")
    return choice


def _thinking(value: bool | str | int | Thinking | None) -> Thinking:
    if isinstance(value, Thinking):
        return value
    if value is None:
        return Thinking()
    if isinstance(value, bool):
        return Thinking(enabled=value)
    if isinstance(value, int):
        return Thinking(enabled=True, budget_tokens=value)
    thinking: Thinking = _convert({"effort": value}, Thinking, "thinking")
    return thinking


def _sampling(options: Options) -> Sampling:
    given = {name: options[name] for name in Sampling.__struct_fields__ if options.get(name) is not None}  # type: ignore[literal-required]
    for name, value in given.items():
        converted = getattr(_convert({name: value}, Sampling, name), name)
        numbers = converted.values() if isinstance(converted, Mapping) else (converted,)
        if not all(math.isfinite(number) for number in numbers):
            # JSON cannot express NaN or infinity.
            raise BadRequest(f"{name}: expected a finite number, not {value!r:.100}", param=name)
    return msgspec.convert(given, Sampling)


def _stop_strings(value: str | Sequence[str] | None) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    stops: tuple[str, ...] = _convert(() if value is None else value, tuple[str, ...], "stop")
    return stops
