"""`dragoman drain`: stops or resumes new requests to one upstream server of a model."""

import argparse
import json
from typing import Any

from dragoman.cli import admin_client
from dragoman.cli.common import Commands, add_command
from dragoman.core.errors import ConfigError

EXAMPLES = """\
examples:
  dragoman drain smollm2                                  list the upstream servers of this model
  dragoman drain smollm2 http://10.0.0.12:8000            send no new requests there; running ones finish
  dragoman drain smollm2 http://10.0.0.12:8000 --undo     send requests there again

The upstream server can be stopped when its state changes from `draining` to `drained`. Write URL as in the
configuration. The command talks to the Dragoman at --url or $DRAGOMAN_URL, or to the one of the configuration
file, which is found as for `dragoman serve`. The key, from --api-key or $DRAGOMAN_API_KEY, needs the scope `admin`.
"""


def add(commands: Commands) -> None:
    description = "Tell a running Dragoman to send no new requests to one upstream server of a model."
    parser = add_command(commands, "drain", "take a server out of a pool", description, EXAMPLES)
    parser.add_argument("name", metavar="NAME", help="the model")
    parser.add_argument("upstream", metavar="URL", nargs="?", help="the address of the upstream server")
    parser.add_argument("--undo", action="store_true", help="send requests there again")
    parser.add_argument("--json", action="store_true", help="print JSON")
    admin_client.add_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    server = admin_client.from_arguments(arguments)
    try:
        entries = _request(server, arguments)["data"]
        upstreams = [entry for entry in entries if entry["model"].lower() == arguments.name.lower()]
        lines = [f"{entry['url']}  {entry['state']}, {entry['running']} running" for entry in upstreams]
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{server.address}: the answer is not a list of servers") from error
    if not upstreams:
        raise ConfigError(f"{server.address}: model {arguments.name!r} has no upstream servers")
    print(json.dumps(upstreams, indent=2) if arguments.json else "\n".join(lines))
    return 0


def _request(server: admin_client.AdminClient, arguments: argparse.Namespace) -> Any:
    if arguments.upstream is None:
        if arguments.undo:
            raise ConfigError("--undo needs the URL of a server")
        return server.get("/admin/upstreams")
    body = {"model": arguments.name, "url": arguments.upstream, "drain": not arguments.undo}
    return server.post("/admin/upstreams/drain", body)
