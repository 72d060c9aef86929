"""`dragoman models`: what a configuration would serve, or what a running server does."""

import argparse
import json
import os
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from typing import Any

import msgspec

from dragoman.catalog import foreseen
from dragoman.config import Flags, ModelSpec, load_settings
from dragoman.engines import engine_class
from dragoman.errors import ConfigError

EXAMPLES = """\
examples:
  dragoman models                                what `dragoman serve` would serve
  dragoman models --config team.yaml --json
  dragoman models --url http://127.0.0.1:8000    what is served there, and which models are loaded

Without --config the file is found as for `dragoman serve`. With --url the key may also be in $DRAGOMAN_API_KEY.
"""
PATIENCE_SECONDS = 10


class Row(msgspec.Struct, frozen=True):
    name: str
    engine: str | None = None
    format: str | None = None
    context: int | None = None
    source: str | None = None
    device: str | None = None
    state: str | None = None


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "models",
        help="list models",
        description="List the models of a configuration, or of a running server, with their formats.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    of = parser.add_mutually_exclusive_group()
    of.add_argument("--config", metavar="FILE", help="a configuration file (YAML or JSON)")
    of.add_argument("--url", help="the address of a running server")
    parser.add_argument("--api-key", metavar="KEY", help="a key for that server")
    parser.add_argument("--json", action="store_true", help="print JSON for machines")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.url is not None:
        rows = _served(arguments.url, arguments.api_key or os.environ.get("DRAGOMAN_API_KEY"))
    elif arguments.api_key is not None:
        raise ConfigError("--api-key is for a running server: give its --url too")
    else:
        # As for `dragoman serve`: an engine of the user's own lies in the folder where the command is given.
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
        specs = load_settings(arguments.config, Flags(), os.environ).models
        rows = [_configured(spec, name) for spec in specs for name in spec.names]
    print(json.dumps(msgspec.to_builtins(rows), indent=2) if arguments.json else table(rows))
    return 0


def table(rows: Sequence[Row]) -> str:
    """Aligned columns, those that say something."""
    named = [name for name in Row.__struct_fields__ if any(getattr(row, name) is not None for row in rows)]
    lines = [[name.upper() for name in named]]
    for row in rows:
        values = (getattr(row, name) for name in named)
        lines.append(["-" if value is None else str(value) for value in values])
    widths = [max(len(line[at]) for line in lines) for at in range(len(named))]
    padded = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(line.rstrip() for line in padded)


def _configured(spec: ModelSpec, name: str) -> Row:
    known = foreseen(spec)
    # A model whose file cannot be read yet has a format all the same, if its engine has any.
    unread = "auto" if "format" in engine_class(spec.engine).Options.__struct_fields__ else None
    return Row(
        name=name,
        engine=spec.engine,
        format=known.format or (unread if known.writes else None),
        context=known.context,
        source=spec.source,
        state=known.file,
    )


def _served(url: str, key: str | None) -> list[Row]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(f"{_address(url)}/v1/models", headers=headers)  # noqa: S310 (it is http or https)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as response:  # noqa: S310
            return [_listed(entry) for entry in json.load(response)["data"]]
    except urllib.error.HTTPError as error:
        way_out = "; give --api-key" if error.code == 401 else ""
        raise ConfigError(f"--url {url}: the server answered {error.code} {error.reason}{way_out}") from error
    except (OSError, HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise ConfigError(f"--url {url}: no answer: {reason}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"--url {url}: what answers there is no list of models") from error


def _address(url: str) -> str:
    """The server's own, also where that of its API was given."""
    try:
        parts = urllib.parse.urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(f"--url {url}: expected an address such as http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1")


def _listed(entry: dict[str, Any]) -> Row:
    return Row(
        name=str(entry["id"]),
        format=entry.get("format"),
        context=entry.get("max_model_len"),
        device=entry.get("device"),
        state=entry.get("state"),
    )
