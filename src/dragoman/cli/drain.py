"""`dragoman drain`: a server behind a model gets nothing new, or something again."""

import argparse
import json
from typing import Any

from dragoman.cli import admin_client
from dragoman.core.errors import ConfigError

EXAMPLES = """\
examples:
  dragoman drain smollm2                                  the servers behind this model, and how they are
  dragoman drain smollm2 http://10.0.0.12:8000            nothing new goes there; what is running goes on
  dragoman drain smollm2 http://10.0.0.12:8000 --undo     it is asked again

When its state is `drained` and no longer `draining`, it can be stopped. URL is written as in the configuration. The
Dragoman that is asked is the one at --url, or where the configuration has it listen, found as for `dragoman serve`.
The key, --api-key or $DRAGOMAN_API_KEY, needs the scope `admin`.
"""


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "drain",
        help="take a server out of a pool",
        description="Have a running Dragoman send nothing new to one of the servers behind a model.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="NAME", help="the model")
    parser.add_argument("place", metavar="URL", nargs="?", help="the address of the server behind it")
    parser.add_argument("--undo", action="store_true", help="send something there again")
    parser.add_argument("--json", action="store_true", help="print JSON for machines")
    admin_client.add_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    server = admin_client.named(arguments)
    try:
        listed = _asked(server, arguments)["data"]
        places = [place for place in listed if place["model"].lower() == arguments.name.lower()]
        lines = [f"{place['url']}  {place['state']}, {place['running']} running" for place in places]
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{server.place}: what answers there is no list of servers") from error
    if not places:
        raise ConfigError(f"{server.place}: no servers are known behind a model {arguments.name!r}")
    print(json.dumps(places, indent=2) if arguments.json else "\n".join(lines))
    return 0


def _asked(server: admin_client.Server, arguments: argparse.Namespace) -> Any:
    if arguments.place is None:
        if arguments.undo:
            raise ConfigError("--undo where? give the URL of a server")
        return server.get("/admin/upstreams")
    asked = {"model": arguments.name, "url": arguments.place, "drain": not arguments.undo}
    return server.post("/admin/upstreams/drain", asked)
