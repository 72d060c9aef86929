"""Checks of the prompt: its size, what the chat template keeps, and how much of it the next request repeats.

They need no generation. The prompts are those that the server would give to the model (`/render`).
"""

from collections.abc import Sequence
from datetime import datetime

from dragoman.agents.probe import CheckFailed, CheckSkipped, Probe
from dragoman.core.engine import RenderedPrompt
from dragoman.core.errors import NotSupported, quote
from dragoman.core.request import GenerationRequest, Message, Reasoning, Text, Tool, ToolCall, ToolResult

REPLY_ROOM = 1024
"""Tokens that must be left for the first reply."""
GENERATION_PROMPT_TOKENS = 16
"""The last tokens of a prompt begin the reply, and may differ in the history."""
EXCERPT = 40
DATES = ("%Y-%m-%d", "%d %b %Y", "%d %B %Y", "%B %d, %Y", "%b %d, %Y")

LIST_FILES = Tool(
    "list_files",
    "Lists the files of a folder.",
    {"type": "object", "properties": {"folder": {"type": "string"}}, "required": ["folder"]},
)
READ_FILE = Tool(
    "read_file",
    "Reads a file and returns its content.",
    {
        "type": "object",
        "properties": {"path": {"type": "string"}, "max_lines": {"type": "integer", "minimum": 1}},
        "required": ["path"],
        "additionalProperties": False,
    },
)
TOOLS = (LIST_FILES, READ_FILE)


def user(text: str) -> Message:
    return Message("user", (Text(text),))


def result(call_id: str, text: str) -> Message:
    return Message("tool", (ToolResult(call_id, (Text(text),)),))


def check_context(probe: Probe) -> str:
    """The first prompt of the agent fits, and leaves room to work."""
    agent, context = probe.agent, probe.endpoint.context
    first = probe.requests.first
    tokens = _count_tokens(probe, first)
    size = f"the first prompt of {agent.title} has about {tokens:,} tokens"
    if context is None:
        raise CheckSkipped(f"{size}; the server does not report the context of the model")
    if tokens + REPLY_ROOM > context:
        probe.fits = False
        raise CheckFailed(f"{size}; the context of {context:,} is too small: set `context`, or use another model")
    if context < agent.context:
        advice = f"{agent.context:,} or more is better"
        raise CheckFailed(f"{size}; the context of {context:,} leaves {context - tokens:,}: {advice}", is_limit=True)
    return f"{size}; the context of {context:,} leaves {context - tokens:,}"


def check_format(probe: Probe) -> str:
    """Tool calls of the model are recognized."""
    name = probe.endpoint.format
    if name is None:
        raise CheckSkipped("the server does not report the format of the model")
    if name == "plain":
        raise CheckFailed("plain: tool calls stay text; set `format` of the model")
    if name == "json":
        raise CheckFailed("json: the chat template is unknown; set `format` if calls stay text", is_limit=True)
    return name


def check_tools(probe: Probe) -> str:
    """The template shows tools, a call and its result."""
    call = ToolCall("call_1", "list_files", '{"folder": "probe-folder"}')
    messages = [user("List the files."), Message("assistant", (call,)), result("call_1", "probe-listing.txt")]
    prompt = _render(probe, messages)
    _require(prompt, "tools", *(tool.name for tool in TOOLS))
    _require(prompt, "tool calls", "probe-folder")
    _require(prompt, "tool results", "probe-listing.txt")
    return "shown, with calls and results"


def check_system_messages(probe: Probe) -> str:
    """The template keeps a system message in mid-conversation."""
    later = Message("system", (Text("probe-reminder"),))
    prompt = _render(probe, [Message("system", (Text("Be brief."),)), user("Hello."), later])
    _require(prompt, "system messages in mid-conversation", "probe-reminder")
    return "kept in mid-conversation"


def check_parallel_history(probe: Probe) -> str:
    """The template keeps two calls in one turn, and both results."""
    calls = tuple(ToolCall(f"call_{at}", "read_file", f'{{"path": "probe-{at}.txt"}}') for at in (1, 2))
    results = [result(f"call_{at}", f"probe-content-{at}") for at in (1, 2)]
    prompt = _render(probe, [user("Read both."), Message("assistant", calls), *results])
    _require(prompt, "parallel calls", "probe-1.txt", "probe-2.txt", "probe-content-1", "probe-content-2")
    return "kept"


def check_thinking_history(probe: Probe) -> str:
    """The template keeps the thinking of the current turn, so that the model goes on with it after a tool call."""
    if not probe.thinks:
        raise CheckSkipped("the model does not think")
    call = ToolCall("call_1", "list_files", '{"folder": "."}')
    turn = Message("assistant", (Reasoning("probe-thought"), call))
    prompt = _render(probe, [user("List the files."), turn, result("call_1", "a.txt")])
    _require(prompt, "thinking between tool calls", "probe-thought")
    return "kept between tool calls"


def check_next_step(probe: Probe) -> str:
    """The request after a tool call begins with the prompt of the request before it."""
    requests = probe.requests
    return _compare(probe, requests.first.messages, requests.second.messages)


def check_next_turn(probe: Probe) -> str:
    """The request after the next message of the user begins with the prompt of the last step."""
    earlier = probe.requests.second.messages
    answer = Message("assistant", (Reasoning("That was all."), Text("Done.")))
    return _compare(probe, earlier, (*earlier, answer, user("Thank you. Which files did you change?")))


def _count_tokens(probe: Probe, request: GenerationRequest) -> int:
    with probe.client() as client:
        try:
            return len(client.render(request.messages, tools=request.tools).tokens)
        except NotSupported:
            pass  # some engines only count
        try:
            return client.count_tokens(request.messages, tools=request.tools)
        except NotSupported as error:
            raise CheckSkipped(error.message) from error


def _render(probe: Probe, messages: Sequence[Message], tools: Sequence[Tool] = TOOLS) -> RenderedPrompt:
    with probe.client() as client:
        try:
            return client.render(messages, tools=tools)
        except NotSupported as error:
            raise CheckSkipped(error.message) from error


def _require(prompt: RenderedPrompt, what: str, *texts: str) -> None:
    missing = [text for text in texts if text not in prompt.text]
    if missing:
        raise CheckFailed(f"the chat template leaves out {what}: {', '.join(missing)} is not in the prompt")


def _compare(probe: Probe, earlier: Sequence[Message], later: Sequence[Message]) -> str:
    """Return how many tokens of a prompt are repeated by the next one."""
    tools = probe.requests.first.tools
    first, second = _render(probe, earlier, tools), _render(probe, later, tools)
    common = _common_length(first.tokens, second.tokens)
    total = len(first.tokens)
    shown = f"{common:,} of {total:,} tokens are repeated"
    if total - common > GENERATION_PROMPT_TOKENS:
        at = _common_length(first.text, second.text)
        before, after = (quote(prompt.text[at : at + EXCERPT]) for prompt in (first, second))
        raise CheckFailed(f"{shown}; then {before} becomes {after}")
    if any(datetime.now().strftime(form) in first.text for form in DATES):
        return f"{shown}; the template writes today's date"
    return shown


def _common_length(first: Sequence[object], second: Sequence[object]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(first), len(second)))
