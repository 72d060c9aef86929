"""`dragoman chat`: talks to any server from a terminal, or answers one question from a pipe."""

import argparse
import importlib.util
import inspect
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from dragoman.cli.common import Commands, add_command
from dragoman.core.errors import ConfigError, DragomanError

if TYPE_CHECKING:
    from dragoman.cli.chat_session import Screen, Session

EXAMPLES = """\
examples:
  dragoman chat                              with the server on http://127.0.0.1:8000
  dragoman chat --url https://api.example.org/v1 --model some-model
  dragoman chat --tools ./tools.py           the model may call the public functions of this file
  echo 'Why is the sky blue?' | dragoman chat > answer.txt

The address may also be in $DRAGOMAN_URL, the key in $DRAGOMAN_API_KEY. The input history is stored in chat_history in
~/.dragoman or $DRAGOMAN_HOME. $NO_COLOR disables colors.
"""
HISTORY_LINES = 1000
"""The exit code that a shell reports for a closed pipe."""


def add(commands: Commands) -> None:
    description = "Talk to a model of any running server that speaks the OpenAI or Anthropic API."
    parser = add_command(commands, "chat", "talk to a model", description, EXAMPLES)
    url = os.environ.get("DRAGOMAN_URL") or "http://127.0.0.1:8000"
    parser.add_argument("--url", default=url, help="the address of the server ($DRAGOMAN_URL, %(default)s)")
    parser.add_argument("--model", metavar="NAME", help="the model (the first that the server lists)")
    parser.add_argument("--system", metavar="TEXT", default="", help="the system prompt")
    parser.add_argument("--tools", metavar="FILE.py", help="a file whose public functions the model may call")
    parser.add_argument("--api-key", metavar="KEY", help="a key for the server")
    parser.add_argument(
        "--protocol",
        metavar="NAME",
        default="auto",
        help="the API to use: chat, messages or responses (detected)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    # Imported late to keep the start of other commands fast.
    from dragoman.cli.chat_session import Screen

    is_interactive = sys.stdin.isatty()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    screen = Screen(sys.stdout, is_verbose=is_interactive)
    # In a pipe, stdout has only the answer: what tools print goes to stderr.
    with nullcontext() if is_interactive else redirect_stdout(sys.stderr):
        return _chat(arguments, screen, is_interactive)


def _chat(arguments: argparse.Namespace, screen: "Screen", is_interactive: bool) -> int:
    from dragoman.cli.chat_session import Session
    from dragoman.client.sync_client import Client

    tools = [] if arguments.tools is None else _load_tools(Path(arguments.tools))
    key = arguments.api_key or os.environ.get("DRAGOMAN_API_KEY")
    with Client(arguments.url, api_key=key, protocol=arguments.protocol, retries=0) as client:
        try:
            # A server that lists no models may still have a default.
            model = arguments.model or next((model.name for model in client.models()), "")
            session = Session(client, screen, model=model, system=arguments.system, tools=tools)
            if not is_interactive:
                session.send(_read_question(sys.stdin))
                return 0
        except DragomanError as error:
            raise ConfigError(_describe(error, arguments.url)) from error
        screen.note(f"{session.model or 'the default model'} at {arguments.url}; /help lists the commands")
        _run_loop(session, lambda prompt: input(screen.style_prompt(prompt)))
    return 0


def _describe(error: DragomanError, url: str) -> str:
    if error.code == "unreachable":
        return f"{error.message}; start one with `dragoman serve`, or give --url"
    if error.code == "invalid_api_key":
        return f"--url {url}: {error.message}; give --api-key"
    return f"--url {url}: {error.message}"


def _read_question(source: TextIO) -> str:
    try:
        question = source.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"the standard input is not UTF-8 text: {error.reason} at byte {error.start}") from error
    if not question.strip():
        raise ConfigError("the standard input has no question")
    return question


def _run_loop(session: "Session", read_line: Callable[[str], str]) -> None:
    with _history():
        while not session.is_over:
            try:
                line = read_line("> ")
                while line.endswith("\\"):
                    line = line[:-1] + "\n" + read_line("… ")
            except KeyboardInterrupt:
                print()
                continue
            except EOFError:
                print()
                return
            session.handle_line(line)


@contextmanager
def _history() -> Iterator[None]:
    """Enable line editing and a stored history, if Python was built with readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    from dragoman.files.sources import home_directory

    file = home_directory() / "chat_history"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists():
            readline.read_history_file(file)
    except OSError:
        pass  # the chat works without a history
    readline.set_history_length(HISTORY_LINES)
    try:
        yield
    finally:
        try:
            readline.write_history_file(file)
            file.chmod(0o600)
        except OSError:
            pass


def _load_tools(file: Path) -> list[Callable[..., Any]]:
    """Return the public functions that a file defines."""
    from dragoman.client.python_types import tool_from_function

    if not file.is_file():
        raise ConfigError(f"--tools {file}: file not found")
    spec = importlib.util.spec_from_file_location(f"dragoman_tools_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"--tools {file}: expected a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    # As with `python FILE.py`, the file can import modules beside it.
    sys.path.insert(0, str(file.resolve().parent))
    try:
        spec.loader.exec_module(module)
        found = [value for name, value in vars(module).items() if _is_public(name, value, module.__name__)]
        for function in found:
            tool_from_function(function)
    except Exception as error:
        raise ConfigError(f"--tools {file}: {type(error).__name__}: {error}") from error
    if not found:
        raise ConfigError(f"--tools {file}: it defines no public functions")
    return found


def _is_public(name: str, value: object, module: str) -> bool:
    return inspect.isfunction(value) and not name.startswith("_") and value.__module__ == module
