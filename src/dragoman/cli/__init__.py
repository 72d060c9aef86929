"""The command line: `dragoman serve`, `check`, `chat`, `launch`, `probe`, `models`, `drain`, `pull`, `tune`, `keys`,
`usage`, `batch`, `replay`, `bench`.

    common         helpers shared by the commands
    admin_client   requests to a running server
    agent_server   the server for an agent
    chat_session   the state and the output of `dragoman chat`

Each command is a module with `add`, which defines its arguments, and a function that takes them and returns the exit
code: 0 success, 1 reported failure, 2 user error (one line on stderr per error), 130 Ctrl-C, 141 if the reader of the
output has closed it, such as `head`.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from dragoman.cli import batch, bench, chat, check, drain, keys, launch, models, probe, pull, replay, serve, tune, usage
from dragoman.core.errors import ConfigError
from dragoman.core.version import __version__

SIGPIPE_EXIT_CODE = 141
EXAMPLES = """\
examples:
  dragoman serve                             serve the built-in model on http://127.0.0.1:8000/v1
  dragoman serve --model mine=./model.gguf   serve your own model
  dragoman check                             check ./dragoman.yaml
  dragoman models                            list the models
  dragoman chat                              talk to a model
  dragoman launch claude                     start a coding agent that uses your model
  dragoman probe mine --agent claude         check whether a model can drive an agent
  dragoman serve --model smollm2 --model minilm
                                             serve two built-in models, for chat and for embeddings
  dragoman pull smollm2                      download the built-in model
  dragoman tune smollm2                      find the fastest layout and number of threads
  dragoman keys create anna                  create an API key
  dragoman usage --since 7d                  show the tokens that were used, and by whom
  dragoman batch submit requests.jsonl --wait
                                             run a file of requests in the background
  dragoman replay recording.jsonl --model other
                                             send recorded requests again, and compare the replies
  dragoman drain smollm2 http://10.0.0.2:8000
                                             send no new requests to one server behind a model
  dragoman bench --concurrency 1,4,16        measure the server on http://127.0.0.1:8000

Run `dragoman COMMAND --help` for details of a command.
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    words, agent_arguments = _split_words(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(words)
    arguments.agent_arguments = agent_arguments
    if arguments.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except ConfigError as error:
        for message in error.messages:
            print(f"dragoman: {' '.join(message.split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Redirect stdout, so that Python's flush at exit does not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno() if sys.__stdout__ else 1)
        return SIGPIPE_EXIT_CODE
    return code


def _split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split off the arguments after `--` of `dragoman launch`, which are those of the agent."""
    if words[:1] == ["launch"] and "--" in words:
        at = words.index("--")
        return list(words[:at]), list(words[at + 1 :])
    return list(words), []


class _Parser(argparse.ArgumentParser):
    """Prints an error as one line."""

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
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for command in (serve, check, chat, launch, probe, models, drain, pull, tune, keys, usage, batch, replay, bench):
        command.add(commands)
    return parser
