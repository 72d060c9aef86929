"""Whether the programs that people use work: each asks a real server, runs a tool and prints the final answer.

    python -m clients.run [--list] [--workers N] [NAME ...]

`dragoman serve` plays a model for each agent: it calls one tool, and answers when it has seen what that printed. Every
client gets a home and a folder of its own, the key of the rehearsal and a time limit, and runs after the one before.

    agents.py, programs.py     declarations of the clients
    client.py                  what a declaration is
    rehearsal.py               the server
    trial.py                   one client: runs it, and finds out whether it has passed
    sessions.py                long sessions: three compactions, a cancelled turn, a resumed session
    packages.py                what `make clients` has installed
    settings/                  configuration files, as a person would write them
    sdks/                      programs for the SDKs
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from clients import packages
from clients.agents import agents
from clients.client import Client, Outcome
from clients.programs import programs
from clients.rehearsal import Server, configure, serving
from clients.sessions import hold, sessions
from clients.trial import try_out


class Trial(NamedTuple):
    client: Client
    run: Callable[[Server], Outcome]


def trials() -> Iterator[Trial]:
    for client in (*agents(), *programs()):
        yield Trial(client, partial(try_out, client))
    for session in sessions():
        yield Trial(session.client, partial(hold, session))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", metavar="NAME", nargs="*", help="only these clients, or those whose name begins so")
    parser.add_argument("--list", action="store_true", help="show their names")
    parser.add_argument("--workers", default="1", metavar="N", help="front ends of the server (1)")
    arguments = parser.parse_args()
    known = list(trials())
    names = [trial.client.name for trial in known]
    if arguments.list:
        print("\n".join(names))
        return
    if unknown := [wanted for wanted in arguments.names if not any(_is_chosen(name, [wanted]) for name in names)]:
        parser.error(f"no client {', '.join(unknown)}; there are {', '.join(names)}")
    packages.prepare()
    configuration = configure([trial.client for trial in known])
    outcomes = []
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder), configuration, "--workers", arguments.workers) as server,
    ):
        for trial in known:
            if _is_chosen(trial.client.name, arguments.names):
                print(f"{trial.client.name} ...", flush=True)
                outcomes.append(trial.run(server))
    show(outcomes)
    sys.exit(any(outcome.problem for outcome in outcomes))


def _is_chosen(name: str, wanted: Sequence[str]) -> bool:
    return not wanted or any(name == part or name.startswith(f"{part}-") for part in wanted)


def show(outcomes: Sequence[Outcome]) -> None:
    print(f"\n{'client':<24}{'package':<33}{'version':<10}{'API':<11}{'requests':>8}{'seconds':>9}  result")
    for client, version, requests, seconds, problem in outcomes:
        row = f"{client.name:<24}{client.package:<33}{version:<10}{client.api:<11}{requests:>8}{seconds:>9.1f}"
        print(f"{row}  {problem or 'passed'}")


if __name__ == "__main__":
    main()
