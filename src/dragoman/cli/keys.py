"""`dragoman keys`: creates, lists, rotates and revokes API keys. A running server picks up the changes."""

import argparse
import json
import re
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, get_args

import msgspec

from dragoman.cli import usage
from dragoman.cli.common import Commands, add_command, add_repeatable, format_table, load_config
from dragoman.config.quantities import parse_finite_duration
from dragoman.config.sections import BudgetLimit, KeyLimits
from dragoman.core.errors import ConfigError
from dragoman.core.types import Priority, RouteScope
from dragoman.storage.key_uses import read_uses
from dragoman.storage.keys import KEY_ID, ApiKey, KeyStore, parse_principal, store_path

EXAMPLES = """\
examples:
  dragoman keys create anna                                  a key for all models and all APIs
  dragoman keys create agent:coder/anna --model 'smol*' --route messages --tokens-per-minute 20000
  dragoman keys create berta --budget 'tokens 100000/day' --budget 'warn cost 20/month'
  dragoman keys create ops --route stats --route admin       a key for the operator
  dragoman keys list
  dragoman keys usage --since 7d                             requests, tokens and cost of each key
  dragoman keys rotate anna --grace 2h                       a new secret; the old one works for two more hours
  dragoman keys revoke 3f9ab0c1d2e4                          one key
  dragoman keys revoke anna                                  all keys of user:anna

The key is printed once. Only its digest is stored: in ~/.dragoman/keys.db, in $DRAGOMAN_HOME/keys.db, or in the file
that `keys.store` of the configuration names. Once a key exists, the server requires one from every caller, also after
the last one is revoked. To serve callers without a key again, set `keys.anonymous`, or delete the file and restart.
"""
DAY = 24 * 3600
DEFAULT_GRACE = "1d"
ANONYMOUS_HINT = (
    "To serve callers without a key again, set `keys.anonymous: true` and reload, "
    "or stop the server and delete the file."
)
BUDGET = re.compile(r"(?:(?P<action>warn|refuse) +)?(?P<unit>tokens|cost) +(?P<amount>[0-9.]+) */ *(?P<per>\w+)")


def add(commands: Commands) -> None:
    description = "Create, list, rotate and revoke the API keys of a server."
    parser = add_command(commands, "keys", "create, list, rotate and revoke API keys", description, EXAMPLES)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions", required=True)
    _add_create(actions)
    list_parser = actions.add_parser("list", help="list the keys", allow_abbrev=False)
    list_parser.add_argument("--json", action="store_true", help="print JSON")
    list_parser.set_defaults(run=list_keys)
    usage_parser = actions.add_parser("usage", help="show what each key has used", allow_abbrev=False)
    usage.add_report_flags(usage_parser)
    usage_parser.set_defaults(run=show_usage)
    rotate_parser = actions.add_parser("rotate", help="print a new secret for a key, once", allow_abbrev=False)
    rotate_parser.add_argument("key", metavar="ID|WHO", help="the id of a key, or the principal of only one valid key")
    grace_help = f"how long the old secret works, such as 0 or 2h ({DEFAULT_GRACE})"
    rotate_parser.add_argument("--grace", metavar="TIME", type=_parse_grace, default=DEFAULT_GRACE, help=grace_help)
    rotate_parser.add_argument("--json", action="store_true", help="print JSON")
    rotate_parser.set_defaults(run=rotate)
    revoke_parser = actions.add_parser("revoke", help="revoke a key, or all keys of a principal", allow_abbrev=False)
    revoke_parser.add_argument("key", metavar="ID|WHO", help="as shown by `dragoman keys list`")
    revoke_parser.set_defaults(run=revoke)
    for name, action in actions.choices.items():
        if name != "usage":
            # It has the flag already.
            action.add_argument("--config", metavar="FILE", help="the server's configuration file (YAML or JSON)")


def _add_create(actions: Commands) -> None:
    parser = actions.add_parser("create", help="create a key and print it once", allow_abbrev=False)
    parser.add_argument("principal", metavar="WHO", help="NAME, user:NAME or agent:NAME/USER")
    scopes = get_args(RouteScope)
    routes_help = f"allow only these routes ({', '.join(scopes)}); the default is all except stats and admin"
    add_repeatable(parser, "--model", "PATTERN", "allow only these models", type=_parse_pattern)
    add_repeatable(parser, "--route", "SCOPE", routes_help, choices=scopes)
    parser.add_argument("--concurrency", metavar="N", type=_parse_count, help="concurrent requests")
    parser.add_argument("--requests-per-minute", metavar="N", type=_parse_count)
    parser.add_argument("--tokens-per-minute", metavar="N", type=_parse_count, help="prompt and reply tokens together")
    budget_help = (
        "refuse requests above 'tokens N/day' or 'cost X/month' (day, week, month); 'warn tokens N/day' only warns"
    )
    add_repeatable(parser, "--budget", "BUDGET", budget_help, type=_parse_budget)
    parser.add_argument(
        "--priority", choices=get_args(Priority), help="batch: requests run when interactive ones leave slots free"
    )
    parser.add_argument("--days", metavar="N", type=_parse_days, help="days until the key expires")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=create)


def _parse_pattern(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("expected a name or a pattern such as 'smol*'; omit --model for all models")
    return text.strip()


def _parse_count(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a number of 1 or more, not {text!r}")
    return int(text)


def _parse_budget(text: str) -> BudgetLimit:
    parsed = BUDGET.fullmatch(text.strip())
    try:
        if parsed is None:
            raise ValueError
        limit = {"tokens": int(parsed["amount"])} if parsed["unit"] == "tokens" else {"cost": float(parsed["amount"])}
        return msgspec.convert({**limit, "per": parsed["per"], "action": parsed["action"] or "refuse"}, BudgetLimit)
    except (ValueError, msgspec.ValidationError) as error:
        message = (
            f"expected a budget such as 'tokens 100000/day', 'cost 2.50/month' or 'warn tokens 5000/week', not {text!r}"
        )
        raise argparse.ArgumentTypeError(message) from error


def _parse_days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        days = 0.0
    if not 0 < days < 100_000:
        raise argparse.ArgumentTypeError(f"expected a number of days, not {text!r}")
    return days


def _parse_grace(text: str) -> float:
    try:
        return parse_finite_duration(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def create(arguments: argparse.Namespace) -> int:
    rates = arguments.concurrency, arguments.requests_per_minute, arguments.tokens_per_minute
    limits = KeyLimits(*rates, tuple(arguments.budget), arguments.priority)
    settings = load_config(arguments.config).settings
    # Imported here: the other commands start faster without it.
    from dragoman.server.preflight_checks import find_unknown_models

    store = KeyStore(store_path(settings.keys))
    before = store.all()
    secret, key = store.create(
        arguments.principal,
        models=arguments.model,
        routes=arguments.route,
        limits=limits,
        expires=None if arguments.days is None else time.time() + arguments.days * DAY,
    )
    if any(other.principal == key.principal for other in before):
        _note(f"{key.principal} had a key before; the new key can read the responses and files of that principal")
    if not (before or settings.api_keys or settings.keys.jwt or settings.keys.anonymous):
        _note(f"this is the first key: from now on, a server with this configuration requires a key. {ANONYMOUS_HINT}")
    for pattern in find_unknown_models(settings, arguments.model):
        _note(f"warning: --model {pattern!r} matches no configured model; names of aliases do not count")
    print(json.dumps({"key": secret, **_key_fields(key, {})}, indent=2) if arguments.json else secret)
    return 0


def list_keys(arguments: argparse.Namespace) -> int:
    store = _store(arguments)
    uses = read_uses(store.path)
    entries = [_key_fields(key, uses) for key in store.all()]
    if arguments.json:
        print(json.dumps(entries, indent=2))
    elif not entries:
        print("no keys; create one with `dragoman keys create WHO`")
    else:
        rows = [[_format_cell(value) for value in entry.values()] for entry in entries]
        print(format_table([[name.upper().replace("_", " ") for name in entries[0]], *rows]))
    return 0


def show_usage(arguments: argparse.Namespace) -> int:
    """The ledger's sums by key, for all keys of the store and for others that were used."""
    report = usage.find_report(arguments, "key,principal")
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(report.data), indent=2).decode())
        return 0
    states = {key.id: (key.principal, key.state(time.time())) for key in _store(arguments).all()}
    used = {(str(entry.key), str(entry.principal)) for entry in report.data}
    rows = [
        [str(entry.key) or "-", str(entry.principal), states.get(str(entry.key), ("", "-"))[1], *usage.counts(entry)]
        for entry in report.data
    ]
    idle = [[key, *about, "0", "0", "0", "0", "0", "0"] for key, about in states.items() if (key, about[0]) not in used]
    print(format_table([["KEY", "PRINCIPAL", "STATE", *map(str.upper, usage.COUNT_HEADS)], *rows, *idle]))
    return 0


def rotate(arguments: argparse.Namespace) -> int:
    store = _store(arguments)
    found = _find_valid(store, arguments.key)
    if len(found) > 1:
        raise ConfigError(f"{arguments.key} has several keys; give an id: {', '.join(key.id for key in found)}")
    until = time.time() + arguments.grace
    secret = store.rotate(found[0].id, until)
    if arguments.grace:
        _note(f"the old secret of {found[0].principal} works until {_format_time(until)} UTC")
    print(json.dumps({"key": secret, "id": found[0].id}, indent=2) if arguments.json else secret)
    return 0


def revoke(arguments: argparse.Namespace) -> int:
    store = _store(arguments)
    for key in _find_valid(store, arguments.key):
        store.revoke(key.id)
        _note(f"revoked key {key.id} of {key.principal}")
    if not any(key.is_valid(time.time()) for key in store.all()):
        _note(f"no key is left in {store.path}, but the server still requires one. {ANONYMOUS_HINT}")
    return 0


def _find_valid(store: KeyStore, name: str) -> list[ApiKey]:
    """The keys that are not revoked with this id, or else with this principal."""
    present = [key for key in store.all() if key.revoked is None]
    found = [key for key in present if key.id == name]
    if not found and not KEY_ID.fullmatch(name):
        principal = parse_principal(name)
        found = [key for key in present if key.principal == principal]
    if not found:
        raise ConfigError(f"key {name!r} not found or already revoked; `dragoman keys list` shows the keys")
    return found


def _note(message: str) -> None:
    print(f"dragoman: {message}", file=sys.stderr)


def _store(arguments: argparse.Namespace) -> KeyStore:
    return KeyStore(store_path(load_config(arguments.config).settings.keys))


def _key_fields(key: ApiKey, uses: Mapping[str, float]) -> dict[str, Any]:
    return {
        "id": key.id,
        "principal": key.principal,
        "state": key.state(time.time()),
        "models": list(key.models),
        "routes": list(key.routes),
        "limits": msgspec.to_builtins(key.limits),
        "created": _format_time(key.created),
        "expires": None if key.expires is None else _format_time(key.expires),
        "last_used": _format_time(uses[key.id]) if key.id in uses else None,
    }


def _format_cell(value: Any) -> str:
    if isinstance(value, dict):
        limits = [f"{name} {limit}" for name, limit in value.items() if name != "budgets"]
        return ", ".join([*limits, *map(_format_budget, value.get("budgets", ()))]) or "-"
    return (", ".join(value) if isinstance(value, list) else value) or "-"


def _format_budget(budget: dict[str, Any]) -> str:
    """In the form of `--budget`."""
    unit = "tokens" if "tokens" in budget else "cost"
    action = f"{budget['action']} " if "action" in budget else ""
    return f"{action}{unit} {budget[unit]}/{budget['per']}"


def _format_time(timestamp: float) -> str:
    return datetime.fromtimestamp(timestamp, UTC).strftime("%Y-%m-%d %H:%M")
