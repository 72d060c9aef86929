"""A chat: what it prints, its state and its commands. Each command is a method and an entry in COMMANDS.

Answers are printed as they arrive, reasoning and tool calls dimmed. A pipe gets only the answer. On a terminal, control
characters in model output are removed, so that a model cannot control the terminal.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import msgspec

from dragoman.client.sync_client import Client
from dragoman.core.errors import DECODE_ERRORS, ConfigError, DragomanError, StepLimitReached
from dragoman.core.events import Event, Finished, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart
from dragoman.core.request import Message, Text, ToolResult

Tools = Sequence[Callable[..., Any]]
DIM, BOLD, PLAIN = "\x1b[2m", "\x1b[1m", "\x1b[0m"
CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
MAX_RESULT_LENGTH = 200
"""Characters of a tool result that are printed."""


class Screen:
    """`is_verbose`: print reasoning, tool calls and notes too."""

    def __init__(self, out: TextIO, *, is_verbose: bool, environ: Mapping[str, str] = os.environ) -> None:
        self._out = out
        self._is_verbose = is_verbose
        self._is_terminal = out.isatty()
        self._has_colors = self._is_terminal and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
        self._block: type[Event] | None = None
        self._is_line_start = True

    def show(self, event: Event | ToolResult) -> None:
        if isinstance(event, TextDelta):
            self._print(TextDelta, event.text)
        elif isinstance(event, Finished):
            self.end_block()
            if event.reason == "length" and self._is_verbose:
                self.note("(cut off: the token limit was reached)")
        elif not self._is_verbose:
            return
        elif isinstance(event, ReasoningDelta):
            self._print(ReasoningDelta, event.text)
        elif isinstance(event, ToolCallStart):
            self.end_block()
            self._print(ToolCallStart, f"→ {event.name} ")
        elif isinstance(event, ToolCallDelta):
            self._print(ToolCallStart, event.arguments)
        elif isinstance(event, ToolResult):
            text = " ".join("".join(part.text for part in event.content if isinstance(part, Text)).split())
            self.note(f"← {text[:MAX_RESULT_LENGTH]}{'…' if len(text) > MAX_RESULT_LENGTH else ''}")

    def note(self, text: str) -> None:
        """Print a dimmed line."""
        self.end_block()
        text = self._clean(text)
        self._write(f"{DIM}{text}{PLAIN}\n" if self._has_colors else f"{text}\n")

    def line(self, text: str = "") -> None:
        self.end_block()
        self._write(self._clean(text) + "\n")

    def style_prompt(self, text: str) -> str:
        """Make the prompt bold. \\x01 and \\x02 mark the characters that have no width for readline."""
        return f"\x01{BOLD}\x02{text}\x01{PLAIN}\x02" if self._has_colors else text

    def _print(self, block: type[Event], text: str) -> None:
        if self._block is not block:
            self.end_block()
            self._block = block
            if block is not TextDelta and self._has_colors:
                self._write(DIM)
        self._write(self._clean(text))
        self._is_line_start = text.endswith("\n") if text else self._is_line_start

    def end_block(self) -> None:
        """End the text, reasoning or tool call that is being printed, and its line."""
        if self._block is not None and self._block is not TextDelta and self._has_colors:
            self._write(PLAIN)
        if self._block is not None and not self._is_line_start:
            self._write("\n")
        self._block, self._is_line_start = None, True

    def _clean(self, text: str) -> str:
        return text.translate(CONTROLS) if self._is_terminal else text

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


class SavedChat(msgspec.Struct, frozen=True):
    model: str
    system: str
    messages: tuple[Message, ...]


class Session:
    def __init__(self, client: Client, screen: Screen, *, model: str, system: str, tools: Tools) -> None:
        self.model = model
        self.system = system
        self.messages: tuple[Message, ...] = ()
        self.is_over = False
        self._client = client
        self._screen = screen
        self._tools = tools

    def send(self, text: str) -> None:
        """Send a message and print the answer. If it fails, the conversation stays as it was."""
        system = (Message("system", (Text(self.system),)),) if self.system else ()
        messages = [*system, *self.messages, Message("user", (Text(text),))]
        try:
            outcome = self._client.run(messages, model=self.model, tools=self._tools, on_event=self._screen.show)
        finally:
            self._screen.end_block()
        self.messages = outcome.messages[len(system) :]

    def handle_line(self, line: str) -> None:
        """Run a command or send a message."""
        if not line.strip():
            return
        try:
            if line.startswith("/"):
                self._run_command(line)
            else:
                self.send(line)
        except KeyboardInterrupt:
            self._screen.note("(stopped; the message was discarded)")
        except StepLimitReached as error:
            self._screen.note(f"({error.message}; the message was discarded)")
        except (DragomanError, ConfigError, OSError) as error:
            self._screen.note(f"error: {' '.join(str(error).split())}")

    def _run_command(self, line: str) -> None:
        name, _, argument = line[1:].strip().partition(" ")
        if name not in COMMANDS:
            raise ConfigError(f"unknown command /{name}; /help lists the commands")
        COMMANDS[name][0](self, argument.strip())

    def help(self, argument: str) -> None:
        width = max(len(usage) for _, usage, _ in COMMANDS.values())
        for _, usage, description in COMMANDS.values():
            self._screen.line(f"{usage.ljust(width)}  {description}")
        self._screen.line("End a line with \\ to continue it. Ctrl-C stops an answer, Ctrl-D ends the chat.")

    def switch_model(self, argument: str) -> None:
        self.model = argument or self.model
        self._screen.line(self.model or "the default model")

    def list_models(self, argument: str) -> None:
        for model in self._client.models():
            context = f"  ({model.context} tokens)" if model.context else ""
            self._screen.line(f"{'*' if model.name == self.model else ' '} {model.name}{context}")

    def set_system(self, argument: str) -> None:
        self.system = argument or self.system
        self._screen.line(self.system or "no system prompt")

    def list_tools(self, argument: str) -> None:
        for tool in self._tools:
            self._screen.line(f"{tool.__name__}  {(tool.__doc__ or '').strip().partition(chr(10))[0]}")
        if not self._tools:
            self._screen.line("none; start with --tools FILE.py")

    def clear(self, argument: str) -> None:
        self.messages = ()
        self._screen.line("conversation cleared")

    def save(self, argument: str) -> None:
        path = _parse_path(argument, "/save")
        saved = SavedChat(self.model, self.system, self.messages)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(saved), indent=2))
        self._screen.line(f"{len(self.messages)} messages in {path}")

    def load(self, argument: str) -> None:
        path = _parse_path(argument, "/load")
        try:
            saved = msgspec.json.decode(path.read_bytes(), type=SavedChat)
        except DECODE_ERRORS as error:
            raise ConfigError(f"{path} is not a saved chat: {error}") from error
        self.model, self.system, self.messages = saved.model, saved.system, saved.messages
        self._screen.line(f"{len(self.messages)} messages, with {self.model or 'the default model'}")

    def quit(self, argument: str) -> None:
        self.is_over = True


def _parse_path(argument: str, command: str) -> Path:
    if not argument:
        raise ConfigError(f"{command} needs the name of a file")
    return Path(argument).expanduser()


COMMANDS: dict[str, tuple[Callable[[Session, str], None], str, str]] = {
    "help": (Session.help, "/help", "this list"),
    "models": (Session.list_models, "/models", "list the models of the server"),
    "model": (Session.switch_model, "/model [NAME]", "switch to another model, or show the current one"),
    "system": (Session.set_system, "/system [TEXT]", "set or show the system prompt"),
    "tools": (Session.list_tools, "/tools", "list the functions that the model may call"),
    "clear": (Session.clear, "/clear", "clear the conversation"),
    "save": (Session.save, "/save FILE", "save the conversation to a file"),
    "load": (Session.load, "/load FILE", "load a saved conversation"),
    "quit": (Session.quit, "/quit", "end the chat"),
}
