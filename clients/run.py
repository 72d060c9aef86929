"""Runs coding agents and SDKs against `dragoman serve` with scripted models.

    python -m clients.run [--list] [--workers N] [NAME ...]

Each client asks the server, runs a tool and prints the final answer. The scripted model of an agent calls one tool, and
answers when it has seen what the tool printed. Every client gets a home and a folder of its own, the key of the server
and a time limit. The clients run one after the other.

    agents.py, sdks.py         declarations of the clients
    client.py                  what a declaration is
    scripted_server.py         the server
    client_run.py              runs one client, and finds out whether it has passed
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
from clients.client_run import run_client
from clients.scripted_server import Server, configure, run_server
from clients.sdks import sdks
from clients.sessions import run_long_session, sessions


class ClientTest(NamedTuple):
    client: Client
    run: Callable[[Server], Outcome]


def client_tests() -> Iterator[ClientTest]:
    for client in (*agents(), *sdks()):
        yield ClientTest(client, partial(run_client, client))
    for session in sessions():
        yield ClientTest(session.client, partial(run_long_session, session))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", metavar="NAME", nargs="*", help="only these clients, or those whose name begins so")
    parser.add_argument("--list", action="store_true", help="show their names")
    parser.add_argument("--workers", default="1", metavar="N", help="front ends of the server (1)")
    arguments = parser.parse_args()
    known = list(client_tests())
    names = [test.client.name for test in known]
    if arguments.list:
        print("\n".join(names))
        return
    if unknown := [wanted for wanted in arguments.names if not any(_is_chosen(name, [wanted]) for name in names)]:
        parser.error(f"no client {', '.join(unknown)}; there are {', '.join(names)}")
    packages.prepare()
    configuration = configure([test.client for test in known])
    outcomes = []
    with (
        tempfile.TemporaryDirectory() as folder,
        run_server(Path(folder), configuration, "--workers", arguments.workers) as server,
    ):
        for test in known:
            if _is_chosen(test.client.name, arguments.names):
                print(f"{test.client.name} ...", flush=True)
                outcomes.append(test.run(server))
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
