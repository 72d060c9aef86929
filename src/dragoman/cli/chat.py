"""`dragoman chat`: talk to any server from a terminal; in a pipe one question, and only its answer."""

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

from dragoman.core.errors import ConfigError, DragomanError

if TYPE_CHECKING:
    from dragoman.cli.chat_screen import Screen
    from dragoman.cli.chat_session import Session
    from dragoman.client.sync_client import Client

EXAMPLES = """\
examples:
  dragoman chat                              with the server on http://127.0.0.1:8000
  dragoman chat --url https://api.example.org/v1 --model some-model
  dragoman chat --tools ./tools.py           the model may call the public functions of this file
  echo 'Why is the sky blue?' | dragoman chat > answer.txt

The key may also be in $DRAGOMAN_API_KEY. What you type is remembered in ~/.dragoman/chat_history, or below
$DRAGOMAN_HOME. With $NO_COLOR nothing is dimmed.
"""
HISTORY_LINES = 1000
NOBODY_READS = 141
"""What a shell says of a program whose pipe was closed."""


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "chat",
        help="talk to a model",
        description="Talk to a model of a running server: this one, or any that speaks the OpenAI or Anthropic API.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the address of the server (%(default)s)")
    parser.add_argument("--model", metavar="NAME", help="the model to talk to; otherwise the first that is listed")
    parser.add_argument("--system", metavar="TEXT", default="", help="what the model is told first")
    parser.add_argument("--tools", metavar="FILE.py", help="a file whose public functions the model may call")
    parser.add_argument("--api-key", metavar="KEY", help="a key for the server")
    parser.add_argument(
        "--protocol",
        metavar="NAME",
        default="auto",
        help="the API to speak: chat, messages or responses; otherwise it is found out",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    # Imported only here: the other commands need no client.
    from dragoman.cli.chat_screen import Screen

    is_typed = sys.stdin.isatty()
    screen = Screen(_standard_output(), talkative=is_typed)
    # In a pipe the answer stands alone: what functions print goes where errors go.
    with nullcontext() if is_typed else redirect_stdout(sys.stderr):
        try:
            return _chat(arguments, screen, is_typed)
        except BrokenPipeError:
            # Whoever reads has enough. Nobody is to hear of it, not even when Python writes what is left.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno() if sys.__stdout__ else 1)
            return NOBODY_READS


def _standard_output() -> TextIO:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    return sys.stdout


def _chat(arguments: argparse.Namespace, screen: "Screen", is_typed: bool) -> int:
    from dragoman.cli.chat_session import Session
    from dragoman.client.sync_client import Client

    tools = [] if arguments.tools is None else _functions(Path(arguments.tools))
    key = arguments.api_key or os.environ.get("DRAGOMAN_API_KEY")
    with Client(arguments.url, api_key=key, protocol=arguments.protocol, retries=0) as client:
        try:
            model = arguments.model or _first(client)
            session = Session(client, screen, model=model, system=arguments.system, tools=tools)
            if not is_typed:
                _answer(session, _read(sys.stdin))
                return 0
        except DragomanError as error:
            raise ConfigError(_words(error, arguments.url)) from error
        screen.note(f"{session.model or 'the default model'} at {arguments.url}; /help lists the commands")
        _converse(session, lambda words: input(screen.prompt(words)))
    return 0


def _words(error: DragomanError, url: str) -> str:
    if error.code == "unreachable":
        return f"{error.message}; start one with `dragoman serve`, or give --url"
    if error.code == "invalid_api_key":
        return f"--url {url}: {error.message}; give --api-key"
    return f"--url {url}: {error.message}"


def _first(client: "Client") -> str:
    """The model to talk to where none is named; a server that lists none may have one all the same."""
    models = client.models()
    return models[0].name if models else ""


def _read(source: TextIO) -> str:
    try:
        return source.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"the standard input is no text in UTF-8: {error.reason} at byte {error.start}") from error


def _answer(session: "Session", question: str) -> None:
    if not question.strip():
        raise ConfigError("there is no question on the standard input")
    session.say(question)


def _converse(session: "Session", ask: Callable[[str], str]) -> None:
    with _history():
        while not session.is_over:
            try:
                line = ask("> ")
                while line.endswith("\\"):
                    line = line[:-1] + "\n" + ask("… ")
            except KeyboardInterrupt:
                print()
                continue
            except EOFError:
                print()
                return
            session.take(line)


@contextmanager
def _history() -> Iterator[None]:
    """Lines can be edited and are remembered, where Python was built with readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    from dragoman.files.sources import home

    file = home() / "chat_history"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists():
            readline.read_history_file(file)
    except OSError:
        pass  # a chat without memory is a chat
    readline.set_history_length(HISTORY_LINES)
    try:
        yield
    finally:
        try:
            readline.write_history_file(file)
            file.chmod(0o600)
        except OSError:
            pass


def _functions(file: Path) -> list[Callable[..., Any]]:
    """The public functions that a file defines."""
    from dragoman.client.python_types import tool_of

    if not file.is_file():
        raise ConfigError(f"--tools {file}: there is no such file")
    spec = importlib.util.spec_from_file_location(f"dragoman_tools_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"--tools {file}: expected a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    # As with `python FILE.py`: what lies beside the file can be imported.
    sys.path.insert(0, str(file.resolve().parent))
    try:
        spec.loader.exec_module(module)
        found = [value for name, value in vars(module).items() if _is_public(name, value, module.__name__)]
        for function in found:
            tool_of(function)
    except Exception as error:
        raise ConfigError(f"--tools {file}: {type(error).__name__}: {error}") from error
    if not found:
        raise ConfigError(f"--tools {file}: it defines no public functions")
    return found


def _is_public(name: str, value: object, module: str) -> bool:
    return inspect.isfunction(value) and not name.startswith("_") and value.__module__ == module
