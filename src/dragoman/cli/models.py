"""`dragoman models`: lists the models of a running server or a configuration; loads and unloads them."""

import argparse
import asyncio
import json
import urllib.parse
from collections.abc import Sequence
from typing import Any

import msgspec

from dragoman.cli import admin_client
from dragoman.cli.admin_client import AdminClient
from dragoman.cli.common import Commands, add_command, format_table, load_config, print_progress
from dragoman.config.model_spec import ModelSpec
from dragoman.config.quantities import format_size
from dragoman.config.settings import Settings
from dragoman.core.errors import ConfigError
from dragoman.core.urls import display_source
from dragoman.engines import engine_class
from dragoman.engines.llama.tuning_record import read_record
from dragoman.files import sources
from dragoman.models import Catalog, ServedModel, read_static_info

EXAMPLES = """\
examples:
  dragoman models                                the models that are served, or that `dragoman serve` would serve
  dragoman models --config team.yaml --json
  dragoman models --url http://127.0.0.1:8000    the models of this server
  dragoman models load mine                      load a model before the first request; `unload` frees its memory

Without --url the server is that of $DRAGOMAN_URL, or of the configuration file, which is found as for `dragoman serve`.
If no server runs at the address in the file, or with --configured, the models of the file are listed. If the server
requires a key, give --api-key or set $DRAGOMAN_API_KEY. Memory, slots, load and unload need a key with the scope
`admin`.
"""
ADMIN_FIELDS = ("memory", "slots", "tokens_per_second")


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


def add(commands: Commands) -> None:
    description = "List the models of a running server or of a configuration; load and unload them."
    parser = add_command(commands, "models", "list models", description, EXAMPLES)
    parser.add_argument("action", nargs="?", choices=("load", "unload"), help="load or unload a model of the server")
    parser.add_argument("name", nargs="?", metavar="NAME", help="the model to load or unload")
    admin_client.add_flags(parser)
    parser.add_argument("--configured", action="store_true", help="list the configured models, without a server")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.configured and (arguments.action is not None or arguments.url is not None):
        raise ConfigError("--configured cannot be combined with --url, load or unload")
    if arguments.action is not None:
        return _load_or_unload(arguments)
    rows = _list_rows(arguments)
    print(json.dumps(msgspec.to_builtins(rows), indent=2) if arguments.json else format_rows(rows))
    return 0


def _list_rows(arguments: argparse.Namespace) -> list[Row]:
    if not arguments.configured and admin_client.names_url(arguments):
        return _list_served(admin_client.from_arguments(arguments))
    settings = load_config(arguments.config).settings
    server = admin_client.from_settings(settings, arguments.api_key)
    if not arguments.configured and server.is_running():
        rows = _list_served(server)
        print_progress(f"models of {server.address}:")
        return rows
    if arguments.api_key is not None:
        raise ConfigError("--api-key is for a running server: give its --url too")
    if not arguments.configured:
        print_progress(f"{server.address} does not answer; models of the configuration:")
    models = find_models(settings)
    return [_configured_row(model.spec, model.name) for model in models if model.spec is not None]


def find_models(settings: Settings) -> list[ServedModel]:
    """Return the models that `dragoman serve` would serve."""
    catalog = Catalog(settings)
    asyncio.run(catalog.scan())
    return catalog.list_models()


def _load_or_unload(arguments: argparse.Namespace) -> int:
    if arguments.name is None:
        raise ConfigError(f"{arguments.action} needs the NAME of a model")
    server = admin_client.from_arguments(arguments)
    name = urllib.parse.quote(arguments.name, safe="")
    row = _served_row(server.post(f"/admin/models/{name}/{arguments.action}"))
    text = f"{row.name}: {row.state}" + (f", {row.memory}" if row.memory else "")
    print(json.dumps(msgspec.to_builtins(row), indent=2) if arguments.json else text)
    return 0


def format_rows(rows: Sequence[Row]) -> str:
    """Return a table of the columns that have a value."""
    columns = [name for name in Row.__struct_fields__ if any(getattr(row, name) is not None for row in rows)]
    values = ([getattr(row, name) for name in columns] for row in rows)
    cells = [["-" if value is None else str(value) for value in line] for line in values]
    return format_table([[name.upper() for name in columns], *cells])


def _configured_row(spec: ModelSpec, name: str) -> Row:
    info = read_static_info(spec)
    # Without a readable file, the format is detected when the model is loaded.
    fallback = "auto" if "format" in engine_class(spec.engine).Options.__struct_fields__ else None
    return Row(
        name=name,
        engine=spec.engine,
        format=info.format or (fallback if info.generates_text else None),
        context=info.context,
        source=None if spec.source is None else display_source(spec.source),
        layout=_find_layout(spec),
        state=info.file,
    )


def _find_layout(spec: ModelSpec) -> str | None:
    """Return the layout that `dragoman tune` recorded for a llama model, if any."""
    if not engine_class(spec.engine).loads_gguf or spec.source is None or spec.options.get("layout") == "as-is":
        return None
    try:
        path = sources.locate(spec.source)
    except ConfigError:
        return None
    record = None if path is None else read_record(path, check_hash=False)
    return None if record is None else record.chosen.layout


def _list_served(server: AdminClient) -> list[Row]:
    try:
        entries = server.get("/v1/models")["data"]
        admin_fields = _find_admin_fields(server)
        return [_served_row(entry | admin_fields.get(str(entry["id"]), {})) for entry in entries]
    except (KeyError, TypeError, AttributeError) as error:
        raise server.unexpected_answer() from error


def _find_admin_fields(server: AdminClient) -> dict[str, dict[str, Any]]:
    """Return memory, slots and speed of each model; nothing if the key lacks the scope `admin`."""
    try:
        entries = server.get("/admin/models")["data"]
        return {str(entry["id"]): {name: entry.get(name) for name in ADMIN_FIELDS} for entry in entries}
    except (ConfigError, KeyError, TypeError, AttributeError):
        return {}


def _served_row(entry: dict[str, Any]) -> Row:
    speed = entry.get("tokens_per_second")
    return Row(
        name=str(entry["id"]),
        format=entry.get("format"),
        context=entry.get("max_model_len"),
        device=entry.get("device"),
        state=_format_state(entry),
        memory=format_size(entry["memory"]) if entry.get("memory") else None,
        slots=entry.get("slots"),
        speed=None if speed is None else f"{speed:.1f}/s",
    )


def _format_state(entry: dict[str, Any]) -> str | None:
    """The state, with the progress of a model that is loading."""
    state, progress = entry.get("state"), entry.get("loading_progress")
    return f"{state} {progress:.0%}" if isinstance(progress, float) else state
