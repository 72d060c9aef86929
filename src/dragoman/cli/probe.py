"""`dragoman probe`: answers whether a model can drive a coding agent."""

import argparse
import json
import sys

import msgspec

from dragoman.agents.sample_requests import has_sample_requests
from dragoman.agents.table import AGENTS
from dragoman.cli import admin_client
from dragoman.cli.common import Commands, add_command, print_progress
from dragoman.core.errors import ConfigError

EXAMPLES = """\
examples:
  dragoman probe mine                        can this model drive Claude Code?
  dragoman probe mine --agent codex
  dragoman probe ./model.gguf --json
  dragoman probe mine --url http://10.0.0.2:8000 --api-key KEY

The checks use recorded requests of the agent. Tools are not run: their results are part of the check. The server is
found, or started, as by `dragoman launch`. The exit code is 0 if the model works, also with limits, otherwise 1.
"""
NAMES = tuple(name for name, agent in AGENTS.items() if has_sample_requests(agent))


def add(commands: Commands) -> None:
    description = "Check whether a model can drive a coding agent."
    parser = add_command(commands, "probe", "check a model for an agent", description, EXAMPLES)
    parser.add_argument("model", metavar="MODEL", nargs="?", help="the model (the default model)")
    parser.add_argument("--agent", choices=NAMES, default=NAMES[0], help="the agent (%(default)s)")
    admin_client.add_flags(parser)
    timeout_help = "the time limit of each check (%(default)g)"
    parser.add_argument("--timeout", metavar="SECONDS", type=float, default=180.0, help=timeout_help)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if not arguments.timeout > 0:
        raise ConfigError(f"--timeout {arguments.timeout:g}: expected more than 0 seconds")
    # Imported late to keep the start of other commands fast.
    from dragoman.agents.generation_checks import CHECKS
    from dragoman.agents.probe import Probe, find_verdict, run_checks
    from dragoman.cli.agent_server import open_endpoint

    agent = AGENTS[arguments.agent]
    width = max(len(check.name) for check in CHECKS)
    with open_endpoint(arguments) as endpoint:
        probe = Probe(agent, endpoint, arguments.timeout)
        print_progress(f"{agent.title} {probe.requests.version} with the model {endpoint.model} of {endpoint.root_url}")
        results = []
        for found in run_checks(probe, CHECKS):
            results.append(found)
            if not arguments.json:
                print(
                    f"{found.check.ljust(width)}  {found.result.ljust(7)}  {' '.join(found.detail.split())}", flush=True
                )
    verdict = find_verdict(results)
    if arguments.json:
        head = {"model": endpoint.model, "agent": agent.name, "verdict": verdict}
        json.dump(head | {"checks": msgspec.to_builtins(results)}, sys.stdout, indent=2)
        print()
    else:
        print(
            f"{endpoint.model} {verdict} with {agent.title}" if verdict == "works" else f"{endpoint.model}: {verdict}"
        )
    return 1 if verdict == "does not work" else 0
