"""`dragoman keys`: make keys, see which there are, take them back. A running server notices by itself."""

import argparse
import json
import sys
import time
from datetime import UTC, datetime
from typing import Any, get_args

import msgspec

from dragoman.cli.settings import settings_of
from dragoman.config.sections import KeyLimits, RouteScope
from dragoman.core.errors import ConfigError
from dragoman.storage.keys import Key, KeyStore, store_path

EXAMPLES = """\
examples:
  dragoman keys create anna                                  may ask every model, by every API
  dragoman keys create agent:coder/anna --model 'smol*' --route messages --tokens-per-minute 20000
  dragoman keys create ops --route stats --route admin       for the operator's own tools
  dragoman keys list
  dragoman keys revoke 3f9ab0c1d2e4

The key is printed once; what is kept is its digest, in ~/.dragoman/keys.db, in $DRAGOMAN_HOME/keys.db or where the
configuration says (keys.store). Once there is a key, the server asks everybody for one.
"""
DAY = 24 * 3600


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "keys",
        help="make, list and revoke API keys",
        description="Make, list and revoke the keys that a server lets in.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions", required=True)
    _add_create(actions)
    listing = actions.add_parser("list", help="show which keys there are", allow_abbrev=False)
    listing.add_argument("--json", action="store_true", help="print JSON for machines")
    listing.set_defaults(run=list_keys)
    revoking = actions.add_parser("revoke", help="take a key back", allow_abbrev=False)
    revoking.add_argument("id", metavar="ID", help="as `dragoman keys list` shows it")
    revoking.set_defaults(run=revoke)
    for action in actions.choices.values():
        action.add_argument("--config", metavar="FILE", help="the server's configuration file (YAML or JSON)")


def _add_create(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = actions.add_parser("create", help="make a key and show it, once", allow_abbrev=False)
    many = "may be given several times"
    parser.add_argument("principal", metavar="WHO", help="NAME, user:NAME or agent:NAME/USER")
    parser.add_argument(
        "--model", metavar="PATTERN", action="append", default=[], type=_pattern, help=f"only these models; {many}"
    )
    parser.add_argument(
        "--route",
        metavar="SCOPE",
        action="append",
        default=[],
        choices=get_args(RouteScope),
        help=f"only these routes ({', '.join(get_args(RouteScope))}); without it all but stats and admin; {many}",
    )
    parser.add_argument("--concurrency", metavar="N", type=_count, help="requests at a time")
    parser.add_argument("--requests-per-minute", metavar="N", type=_count)
    parser.add_argument("--tokens-per-minute", metavar="N", type=_count, help="of prompts and replies together")
    parser.add_argument("--days", metavar="N", type=_days, help="how long it is valid")
    parser.add_argument("--json", action="store_true", help="print JSON for machines")
    parser.set_defaults(run=create)


def _pattern(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("expected a name or a pattern such as 'smol*'; without --model all models")
    return text.strip()


def _count(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a number of 1 or more, not {text!r}")
    return int(text)


def _days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        days = 0.0
    if not 0 < days < 100_000:
        raise argparse.ArgumentTypeError(f"expected a number of days, not {text!r}")
    return days


def create(arguments: argparse.Namespace) -> int:
    limits = KeyLimits(arguments.concurrency, arguments.requests_per_minute, arguments.tokens_per_minute)
    store = _store(arguments)
    known = {key.principal for key in store.all()}
    secret, key = store.create(
        arguments.principal,
        models=arguments.model,
        routes=arguments.route,
        limits=limits,
        expires=None if arguments.days is None else time.time() + arguments.days * DAY,
    )
    if key.principal in known:
        words = "had a key before; the new key can read the responses stored for that principal"
        print(f"dragoman: {key.principal} {words}", file=sys.stderr)
    print(json.dumps({"key": secret, **_shown(key)}, indent=2) if arguments.json else secret)
    return 0


def list_keys(arguments: argparse.Namespace) -> int:
    shown = [_shown(key) for key in _store(arguments).all()]
    if arguments.json:
        print(json.dumps(shown, indent=2))
        return 0
    if not shown:
        print("no keys; `dragoman keys create WHO` makes one")
        return 0
    rows = [list(shown[0]), *([_cell(value) for value in entry.values()] for entry in shown)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    for at, row in enumerate(rows):
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        print(line if at else line.upper())
    return 0


def revoke(arguments: argparse.Namespace) -> int:
    store = _store(arguments)
    if not store.revoke(arguments.id):
        raise ConfigError(f"no key {arguments.id!r} that could be revoked; `dragoman keys list` shows which there are")
    return 0


def _store(arguments: argparse.Namespace) -> KeyStore:
    return KeyStore(store_path(settings_of(arguments.config).keys))


def _shown(key: Key) -> dict[str, Any]:
    return {
        "id": key.id,
        "principal": key.principal,
        "state": key.state(time.time()),
        "models": list(key.models),
        "routes": list(key.routes),
        "limits": msgspec.to_builtins(key.limits),
        "created": _day(key.created),
        "expires": None if key.expires is None else _day(key.expires),
    }


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {limit}" for name, limit in value.items()) or "-"
    return (", ".join(value) if isinstance(value, list) else value) or "-"


def _day(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M")
