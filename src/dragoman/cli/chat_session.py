"""The state of a chat, and the commands that change it. A command is a method and a line in COMMANDS."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from dragoman.cli.chat_screen import Screen
from dragoman.client.sync_client import Client
from dragoman.core.errors import DECODE_ERRORS, ConfigError, DragomanError, StepLimitReached
from dragoman.core.request import Message, Text

Tools = Sequence[Callable[..., Any]]


class Saved(msgspec.Struct, frozen=True):
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

    def say(self, text: str) -> None:
        """Asks, and shows the answer. What fails leaves the conversation as it was."""
        opening = (Message("system", (Text(self.system),)),) if self.system else ()
        asked = (*self.messages, Message("user", (Text(text),)))
        try:
            outcome = self._client.run(
                [*opening, *asked], model=self.model, tools=self._tools, on_event=self._screen.hear
            )
        finally:
            self._screen.stop()
        self.messages = outcome.messages[len(opening) :]

    def take(self, line: str) -> None:
        """One line that somebody typed: a command, or something to say."""
        if not line.strip():
            return
        try:
            if line.startswith("/"):
                self._command(line)
            else:
                self.say(line)
        except KeyboardInterrupt:
            self._screen.note("(stopped; the question was taken back)")
        except StepLimitReached as error:
            self._screen.note(f"({error.message}; the question was taken back)")
        except (DragomanError, ConfigError, OSError) as error:
            self._screen.note(f"error: {' '.join(str(error).split())}")

    def _command(self, line: str) -> None:
        name, _, rest = line[1:].strip().partition(" ")
        if name not in COMMANDS:
            raise ConfigError(f"there is no command /{name}; /help lists them")
        COMMANDS[name][0](self, rest.strip())

    def help(self, rest: str) -> None:
        width = max(len(usage) for _, usage, _ in COMMANDS.values())
        for _, usage, words in COMMANDS.values():
            self._screen.line(f"{usage.ljust(width)}  {words}")
        self._screen.line("A line that ends with \\ goes on in the next. Ctrl-C stops an answer, Ctrl-D ends the chat.")

    def switch_model(self, rest: str) -> None:
        self.model = rest or self.model
        self._screen.line(self.model or "the server's own choice")

    def list_models(self, rest: str) -> None:
        for model in self._client.models():
            context = f"  ({model.context} tokens)" if model.context else ""
            self._screen.line(f"{'*' if model.name == self.model else ' '} {model.name}{context}")

    def set_system(self, rest: str) -> None:
        self.system = rest or self.system
        self._screen.line(self.system or "no system prompt")

    def list_tools(self, rest: str) -> None:
        for tool in self._tools:
            self._screen.line(f"{tool.__name__}  {(tool.__doc__ or '').strip().partition(chr(10))[0]}")
        if not self._tools:
            self._screen.line("none; start with --tools FILE.py")

    def clear(self, rest: str) -> None:
        self.messages = ()
        self._screen.line("forgotten")

    def save(self, rest: str) -> None:
        path = _path(rest, "/save")
        saved = Saved(self.model, self.system, self.messages)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(saved), indent=2))
        self._screen.line(f"{len(self.messages)} messages in {path}")

    def load(self, rest: str) -> None:
        path = _path(rest, "/load")
        try:
            saved = msgspec.json.decode(path.read_bytes(), type=Saved)
        except DECODE_ERRORS as error:
            raise ConfigError(f"{path} is no saved chat: {error}") from error
        self.model, self.system, self.messages = saved.model, saved.system, saved.messages
        self._screen.line(f"{len(self.messages)} messages, with {self.model or 'the server’s own choice'}")

    def quit(self, rest: str) -> None:
        self.is_over = True


def _path(rest: str, command: str) -> Path:
    if not rest:
        raise ConfigError(f"{command} needs the name of a file")
    return Path(rest).expanduser()


COMMANDS: dict[str, tuple[Callable[[Session, str], None], str, str]] = {
    "help": (Session.help, "/help", "this list"),
    "models": (Session.list_models, "/models", "what the server has"),
    "model": (Session.switch_model, "/model [NAME]", "talk to another model, or say which it is"),
    "system": (Session.set_system, "/system [TEXT]", "what the model is told first"),
    "tools": (Session.list_tools, "/tools", "the functions that the model may call"),
    "clear": (Session.clear, "/clear", "forget the conversation"),
    "save": (Session.save, "/save FILE", "keep the conversation in a file"),
    "load": (Session.load, "/load FILE", "go on with one that was kept"),
    "quit": (Session.quit, "/quit", "end the chat"),
}
