"""The command line: `dragoman serve`, `check`, `chat`, `models`, `drain`, `pull`, `keys`, `bench`. One file per
command, and what several need:

    settings             those that `dragoman serve` would have
    obstacles            what keeps a server, or a model of it, from serving
    asking               a running server, asked by a command
    layout               an argument of `serve` and `pull`, and what it stands for
    conversing, screen   the state of a chat, and what it shows

A command is a module with `add`, which describes its arguments, and a function that takes them and returns the exit
code. 0 is success, 1 a failure that was told, 2 a mistake of the user's in one line on stderr (several in several),
130 a Ctrl-C.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from dragoman.cli import bench, chat, check, drain, keys, models, pull, serve
from dragoman.core.errors import ConfigError
from dragoman.core.version import __version__

EXAMPLES = """\
examples:
  dragoman serve                             the built-in model on http://127.0.0.1:8000/v1
  dragoman serve --model mine=./model.gguf   a model of your own
  dragoman check                             what is wrong with ./dragoman.yaml, if anything
  dragoman models                            what is served, or would be
  dragoman chat                              talk to what is served
  dragoman serve --model smollm2 --model minilm
                                             two built-in models: one to chat, one for embeddings
  dragoman pull smollm2                      only download the built-in model
  dragoman keys create anna                  a key for somebody
  dragoman drain smollm2 http://10.0.0.2:8000
                                             one of the servers behind a model gets nothing new
  dragoman bench --concurrency 1,4,16        how fast the server on http://127.0.0.1:8000 answers

`dragoman COMMAND --help` says more about a command.
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        code: int = arguments.run(arguments)
    except ConfigError as error:
        for mistake in error.mistakes:
            print(f"dragoman: {' '.join(mistake.split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return code


class _Parser(argparse.ArgumentParser):
    """Tells a mistake in one line, like every other mistake."""

    def error(self, message: str) -> NoReturn:
        print(f"dragoman: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)


def _parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = _Parser(
        prog="dragoman",
        description="Serve any model you run yourself to any program that speaks the OpenAI or the Anthropic API.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"dragoman {__version__}")
    commands: argparse._SubParsersAction[argparse.ArgumentParser] = parser.add_subparsers(
        dest="command", metavar="COMMAND", title="commands"
    )
    serve.add(commands)
    check.add(commands)
    chat.add(commands)
    models.add(commands)
    drain.add(commands)
    pull.add(commands)
    keys.add(commands)
    bench.add(commands)
    return parser
