"""Checks with generations: tool calls, thinking, and a task with the agent's own prompt and tools."""

import json
from collections.abc import Sequence
from typing import Any

import msgspec
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from referencing.exceptions import Unresolvable

from dragoman.agents.probe import Check, CheckFailed, CheckSkipped, Probe
from dragoman.agents.prompt_checks import (
    READ_FILE,
    TOOLS,
    check_context,
    check_format,
    check_next_step,
    check_next_turn,
    check_parallel_history,
    check_system_messages,
    check_thinking_history,
    check_tools,
    result,
    user,
)
from dragoman.core.errors import quote, truncate
from dragoman.core.reply import Reply
from dragoman.core.request import Message, Text, Tool, ToolCall

SYSTEM = Message("system", (Text("You are a coding agent. You work with the tools that you have."),))
MAX_TOKENS = 2048
MAX_ROUNDS = 6
FILE, CODE = "notes.txt", "7351-KILO"
TASK = f"The file {FILE} contains an access code. Find it with your tools, and answer with the code."
CONTENT = f"Meeting on Tuesday.\nThe access code is {CODE}.\n"
LISTING = f"README.md\n{FILE}\nsrc\n"
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Texts of which a client must see nothing."""


def check_call(probe: Probe) -> str:
    """The model calls a tool that it needs, with arguments that fit."""
    reply = probe.ask([SYSTEM, user("Read the file src/main.py.")], TOOLS, max_tokens=MAX_TOKENS)
    call = _first_call(reply, TOOLS)
    if call.name != READ_FILE.name or "main.py" not in str(call.parsed_arguments["path"]):
        raise CheckFailed(f"called {_shown(call)} instead of read_file with src/main.py")
    return _shown(call)


def check_parallel_calls(probe: Probe) -> str:
    """The model makes two calls in one reply."""
    text = "Read the files src/a.py and src/b.py. Call the tool for both files in one reply."
    reply = probe.ask([SYSTEM, user(text)], TOOLS, max_tokens=MAX_TOKENS)
    _first_call(reply, TOOLS)
    paths = {str(call.parsed_arguments.get("path")) for call in reply.tool_calls}
    if len(paths) < 2:
        raise CheckFailed(f"one call in a reply where two were needed: {_shown(reply.tool_calls[0])}")
    return ", ".join(map(_shown, reply.tool_calls))


def check_second_call(probe: Probe) -> str:
    """The model uses the result of a call in the next one."""
    call = ToolCall("call_1", "list_files", '{"folder": "."}')
    text = "List the files of the folder, then read the file that ends in .txt."
    messages = [SYSTEM, user(text), Message("assistant", (call,)), result("call_1", LISTING)]
    reply = probe.ask(messages, TOOLS, max_tokens=MAX_TOKENS)
    second = _first_call(reply, TOOLS)
    if second.name != READ_FILE.name or FILE not in str(second.parsed_arguments["path"]):
        raise CheckFailed(f"called {_shown(second)} instead of read_file with {FILE}")
    return _shown(second)


def check_thinking(probe: Probe) -> str:
    """Thinking can be turned on and off, and stays out of the text."""
    question = [user("How much is 17 + 25? Answer with the number.")]
    on = probe.ask(question, thinking=True, max_tokens=MAX_TOKENS)
    off = probe.ask(question, thinking=False, max_tokens=MAX_TOKENS)
    probe.thinks = bool(on.reasoning)
    for reply in (on, off):
        if not reply.text.strip():
            raise CheckFailed(f"no answer within {MAX_TOKENS:,} tokens: {quote(reply.reasoning[-60:])}")
        leaked = [marker for marker in MARKERS if marker in reply.text]
        if leaked:
            raise CheckFailed(f"{leaked[0]} is in the text; check the `format` of the model")
    if off.reasoning:
        raise CheckFailed("thinks although thinking is turned off")
    return "on and off" if on.reasoning else "the model does not think"


def check_task(probe: Probe) -> str:
    """The model solves a small task with the agent's prompt and tools. Their results come from the probe."""
    if not probe.fits:
        raise CheckSkipped("the prompt does not fit into the context")
    first = probe.requests.first
    messages = _replace_question(first.messages, TASK)
    cached = ""
    for number in range(1, MAX_ROUNDS + 1):
        reply = probe.ask(messages, first.tools)
        if number == 2:
            cached = f"; {reply.usage.cached:,} of {reply.usage.prompt:,} tokens of the second request were cached"
        if not reply.tool_calls:
            if CODE not in reply.text:
                raise CheckFailed(f"round {number}: answered {quote(reply.text)} instead of {CODE}")
            if number == 1:
                raise CheckFailed("answered without a tool")
            return f"solved in {number} rounds{cached}"
        _first_call(reply, first.tools, prefix=f"round {number}: ")
        messages = (*messages, reply.message, *(result(call.id, _run(call)) for call in reply.tool_calls))
    raise CheckFailed(f"no answer after {MAX_ROUNDS} rounds of tool calls")


def _run(call: ToolCall) -> str:
    """The result of any tool: the file if the call is about it, otherwise the list of files."""
    return CONTENT if FILE in call.arguments else LISTING


def _replace_question(messages: Sequence[Message], text: str) -> tuple[Message, ...]:
    """Replace what the user wrote: the last text of the last message of the user."""
    at = max(index for index, message in enumerate(messages) if message.role == "user")
    message = messages[at]
    asked = msgspec.structs.replace(message, parts=(*message.parts[:-1], Text(text)))
    return (*messages[:at], asked, *messages[at + 1 :])


def _first_call(reply: Reply, tools: Sequence[Tool], prefix: str = "") -> ToolCall:
    """Return the first call, after checking all calls."""
    if not reply.tool_calls:
        wrote = f"wrote {quote(reply.text)}" if reply.text.strip() else f"ended with {reply.reason} and no text"
        raise CheckFailed(f"{prefix}no tool call; the model {wrote}")
    schemas = {tool.name: tool.parameters or {} for tool in tools}
    for call in reply.tool_calls:
        if call.name not in schemas:
            raise CheckFailed(f"{prefix}called {quote(call.name)}, which is not a tool")
        if problem := _find_problem(call.parsed_arguments, schemas[call.name]):
            raise CheckFailed(f"{prefix}{_shown(call)} does not fit the schema: {problem}")
    return reply.tool_calls[0]


def _find_problem(arguments: dict[str, Any], schema: Any) -> str:
    try:
        error = next(iter(Draft202012Validator(schema).iter_errors(arguments)), None)
    except (SchemaError, Unresolvable):
        return ""
    return "" if error is None else truncate(error.message)


def _shown(call: ToolCall) -> str:
    return truncate(f"{call.name}({json.dumps(call.parsed_arguments)})", 100)


CHECKS = (
    Check("context", check_context),
    Check("tool syntax", check_format),
    Check("template: tools", check_tools),
    Check("template: system messages", check_system_messages, is_required=False),
    Check("template: parallel calls", check_parallel_history, is_required=False),
    Check("prefix: next step", check_next_step, is_required=False),
    Check("prefix: next turn", check_next_turn, is_required=False),
    Check("tool call", check_call),
    Check("parallel calls", check_parallel_calls, is_required=False),
    Check("call after a result", check_second_call),
    Check("thinking", check_thinking, is_required=False),
    Check("template: thinking", check_thinking_history, is_required=False),
    Check("task", check_task),
)
