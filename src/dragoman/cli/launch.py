"""`dragoman launch`: starts a coding agent that uses a model of Dragoman.

The agent is a child process in the same process group, so the terminal belongs to it. Ctrl-C reaches it from the
terminal; other signals are passed on to it. Its settings are in its environment, its arguments and temporary files.
"""

import argparse
import difflib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import msgspec

from dragoman.agents.setup import NO_KEY, SCRIPT_DIRECTORY, AgentSetup, Endpoint, build_setup, format_script
from dragoman.agents.table import AGENTS, Agent
from dragoman.cli import admin_client
from dragoman.cli.common import Commands, add_command, format_table, print_progress
from dragoman.core.errors import ConfigError
from dragoman.core.urls import REDACTED

EXAMPLES = """\
examples:
  dragoman launch                            list the agents
  dragoman launch claude                     with the running server, or with one that is started for it
  dragoman launch claude --model ./model.gguf
  dragoman launch codex --url http://10.0.0.2:8000 --api-key KEY --model mine
  dragoman launch claude -- --print 'What is in this folder?' --allowedTools Bash
  dragoman launch opencode --print-config    show the settings, and start nothing

The arguments after -- are those of the agent. Its own settings stay as they are: those of Dragoman are in variables,
arguments and temporary files. The server is that of --url or $DRAGOMAN_URL, or the one at the address of the
configuration; without one, a server is started on a free port, and ended with the agent. If the server requires a key,
give --api-key or set $DRAGOMAN_API_KEY.
"""
FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def add(commands: Commands) -> None:
    description = "Start a coding agent that uses a model of Dragoman."
    parser = add_command(commands, "launch", "start a coding agent", description, EXAMPLES)
    parser.add_argument("agent", nargs="?", metavar="AGENT", help=f"one of {', '.join(AGENTS)}")
    parser.add_argument("--model", metavar="NAME", help="the model (the default model)")
    admin_client.add_flags(parser)
    parser.add_argument("--print-config", action="store_true", help="print the settings as a shell script")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.agent is None:
        print(format_table([["AGENT", "TITLE", "INSTALLED"], *map(_row, AGENTS.values())]))
        return 0
    agent = find_agent(arguments.agent)
    # Imported late: the list needs no configuration.
    from dragoman.cli.agent_server import configured_endpoint, find_endpoint, open_endpoint

    if arguments.print_config:
        endpoint = find_endpoint(arguments)
        if endpoint is None:
            endpoint = configured_endpoint(arguments)
            print_progress(f"no server runs at {endpoint.root_url}; the settings are for one that does")
        print(_format_config(agent, endpoint))
        return 0
    program = shutil.which(agent.program)
    if program is None:
        raise ConfigError(f"{agent.title} is not installed: {agent.install}")
    with open_endpoint(arguments) as endpoint, _temporary_directory() as directory:
        for warning in find_warnings(agent, endpoint):
            print_progress(f"warning: {warning}")
        setup = build_setup(agent, endpoint, directory)
        setup.write_files(Path(directory))
        print_progress(f"starting {agent.title} with the model {endpoint.model} of {endpoint.root_url}")
        return _run_agent(program, setup, arguments.agent_arguments)


def find_agent(name: str) -> Agent:
    agent = AGENTS.get(name)
    if agent is None:
        similar = difflib.get_close_matches(name, AGENTS, n=1)
        hint = f"; did you mean {similar[0]}?" if similar else "."
        raise ConfigError(f"unknown agent {name!r}{hint} The agents are {', '.join(AGENTS)}")
    return agent


def find_warnings(agent: Agent, endpoint: Endpoint) -> Iterator[str]:
    """Yield what will keep the agent from working with this model."""
    model = f"the model {endpoint.model}"
    if endpoint.context is not None and endpoint.context < agent.context:
        needed = f"{agent.title} needs at least {agent.context:,}"
        yield f"{model} has a context of {endpoint.context:,} tokens, and {needed}: set its `context`, or use another"
    if endpoint.format == "plain":
        yield f"{model} has the format plain, so {agent.title} gets no tool calls: set its `format`, or use another"


def _row(agent: Agent) -> list[str]:
    return [agent.name, agent.title, shutil.which(agent.program) or f"no: {agent.install}"]


def _format_config(agent: Agent, endpoint: Endpoint) -> str:
    key = endpoint.key if endpoint.key == NO_KEY else REDACTED
    return format_script(build_setup(agent, msgspec.structs.replace(endpoint, key=key), SCRIPT_DIRECTORY))


@contextmanager
def _temporary_directory() -> Iterator[str]:
    """A directory that only this user can read. The agent may still write to it while it is removed."""
    with tempfile.TemporaryDirectory(prefix="dragoman-", ignore_cleanup_errors=True) as directory:
        yield directory


def _run_agent(program: str, setup: AgentSetup, arguments: list[str]) -> int:
    """Run the agent and return its exit code, as a shell would."""
    process: subprocess.Popen[bytes] | None = None

    def forward(number: int, frame: FrameType | None) -> None:
        if process is not None and not (number == signal.SIGINT and _is_foreground()):
            process.send_signal(number)

    previous = {number: signal.signal(number, forward) for number in (signal.SIGINT, *FORWARDED_SIGNALS)}
    try:
        command = [program, *setup.command[1:], *arguments]
        process = subprocess.Popen(command, env=setup.apply(os.environ))  # noqa: S603 (what the user asks for)
        code = process.wait()
    except OSError as error:
        raise ConfigError(f"{program} cannot be started: {error.strerror or error}") from error
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _is_foreground() -> bool:
    """Whether Ctrl-C on the terminal is sent to this process and to the agent."""
    try:
        with Path("/dev/tty").open("rb", buffering=0) as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False
