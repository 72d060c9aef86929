"""The state of a chat and its commands. Each command is a method and an entry in COMMANDS."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from dragoman.cli.chat_screen import Screen
from dragoman.client.sync_client import Client
from dragoman.core.errors import DECODE_ERRORS, ConfigError, DragomanError, StepLimitReached
from dragoman.core.request import Message, Text

Tools = Sequence[Callable[..., Any]]


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
