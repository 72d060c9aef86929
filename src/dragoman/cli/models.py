"""`dragoman models`: what a running server serves, or else what a configuration would; models loaded and unloaded."""

import argparse
import asyncio
import json
import urllib.parse
from collections.abc import Sequence
from typing import Any

import msgspec

from dragoman.cli import admin_client
from dragoman.cli.admin_client import Server
from dragoman.cli.settings import settings_of
from dragoman.config.model_spec import ModelSpec
from dragoman.config.quantities import shown_size
from dragoman.config.settings import Settings
from dragoman.core.errors import ConfigError
from dragoman.engines import engine_class
from dragoman.engines.llama.tuning.layout import in_use
from dragoman.files import sources
from dragoman.files.download import display_source
from dragoman.models import Catalog, Model, foreseen

EXAMPLES = """\
examples:
  dragoman models                                what is served, or what `dragoman serve` would serve
  dragoman models --config team.yaml --json
  dragoman models --url http://127.0.0.1:8000    what is served there
  dragoman models load mine                      have it loaded before somebody asks; `unload` gives its memory back

Without --config the file is found as for `dragoman serve`. If a server answers at the address in it, its models are
shown as they are there, else those of the file, and with --configured in any case. Where the server asks for keys,
--api-key or $DRAGOMAN_API_KEY has one; memory, slots, load and unload are for keys with the scope `admin`.
"""


class Row(msgspec.Struct, frozen=True):
    name: str
    engine: str | None = None
    format: str | None = None
    context: int | None = None
    source: str | None = None
    layout: str | None = None
    device: str | None = None
    state: str | None = None
    memory: str | None = None
    slots: int | None = None
    speed: str | None = None
    """Tokens per second of a reply."""


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "models",
        help="list models",
        description="List the models of a running server, or of a configuration; load and unload them.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("action", nargs="?", choices=("load", "unload"), help="what the server is to do")
    parser.add_argument("name", nargs="?", metavar="NAME", help="with which model")
    admin_client.add_flags(parser)
    parser.add_argument("--configured", action="store_true", help="what is configured, whether it is served or not")
    parser.add_argument("--json", action="store_true", help="print JSON for machines")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.configured and (arguments.action is not None or arguments.url is not None):
        raise ConfigError("--configured asks no server: leave out --url, load and unload")
    if arguments.action is not None:
        return _change(arguments)
    rows = _rows(arguments)
    print(json.dumps(msgspec.to_builtins(rows), indent=2) if arguments.json else table(rows))
    return 0


def _rows(arguments: argparse.Namespace) -> list[Row]:
    if arguments.url is not None:
        return _served(admin_client.named(arguments))
    settings = settings_of(arguments.config)
    server = admin_client.configured(settings, arguments.api_key)
    if not arguments.configured and server.is_there():
        return _served(server)
    if arguments.api_key is not None:
        raise ConfigError("--api-key is for a running server: give its --url too")
    return [_configured(model.spec, model.name) for model in asyncio.run(_known(settings)) if model.spec is not None]


async def _known(settings: Settings) -> list[Model]:
    """Those of the configuration, and those in its folders."""
    catalog = Catalog(settings)
    await catalog.look()
    return catalog.listed()


def _change(arguments: argparse.Namespace) -> int:
    if arguments.name is None:
        raise ConfigError(f"{arguments.action} what? give the NAME of a model")
    server = admin_client.named(arguments)
    name = urllib.parse.quote(arguments.name, safe="")
    row = _standing(server.post(f"/admin/models/{name}/{arguments.action}"))
    told = f"{row.name}: {row.state}" + (f", {row.memory}" if row.memory else "")
    print(json.dumps(msgspec.to_builtins(row), indent=2) if arguments.json else told)
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
        source=None if spec.source is None else display_source(spec.source),
        layout=_layout(spec),
        state=known.file,
    )


def _layout(spec: ModelSpec) -> str | None:
    """What was found out for a model that llama.cpp runs; None: nothing was, or there is nothing to find out."""
    if spec.engine != "llama" or spec.source is None or spec.options.get("layout") == "as-is":
        return None
    try:
        path = sources.locate(spec.source)
    except ConfigError:
        return None
    return None if path is None else in_use(path)


def _served(server: Server) -> list[Row]:
    try:
        rows = [_listed(entry) for entry in server.get("/v1/models")["data"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise server.strange() from error
    return _with_standing(rows, server)


def _with_standing(rows: list[Row], server: Server) -> list[Row]:
    """What only an operator may know, where the key is one's."""
    try:
        standing = {str(entry["id"]): _standing(entry) for entry in server.get("/admin/models")["data"]}
    except (ConfigError, KeyError, TypeError, AttributeError):
        return rows
    return [
        msgspec.structs.replace(row, memory=known.memory, slots=known.slots, speed=known.speed)
        if (known := standing.get(row.name))
        else row
        for row in rows
    ]


def _listed(entry: dict[str, Any]) -> Row:
    return Row(
        name=str(entry["id"]),
        format=entry.get("format"),
        context=entry.get("max_model_len"),
        device=entry.get("device"),
        state=_state(entry),
    )


def _state(entry: dict[str, Any]) -> str | None:
    """With the progress of a model that is loading."""
    state, progress = entry.get("state"), entry.get("loading_progress")
    return f"{state} {progress:.0%}" if isinstance(progress, float) else state


def _standing(entry: dict[str, Any]) -> Row:
    speed = entry.get("tokens_per_second")
    return Row(
        name=str(entry["id"]),
        state=_state(entry),
        memory=shown_size(entry["memory"]) if entry.get("memory") else None,
        slots=entry.get("slots"),
        speed=None if speed is None else f"{speed:.1f}/s",
    )
