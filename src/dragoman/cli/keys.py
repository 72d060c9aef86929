"""`dragoman keys`: creates, lists and revokes API keys. A running server picks up the changes."""

import argparse
import json
import re
import sys
import time
from datetime import UTC, datetime
from typing import Any, get_args

import msgspec

from dragoman.cli.common import Commands, add_command, add_repeatable, format_table, load_config
from dragoman.config.sections import BudgetLimit, KeyLimits
from dragoman.core.errors import ConfigError
from dragoman.core.types import Priority, RouteScope
from dragoman.storage.keys import ApiKey, KeyStore, store_path

EXAMPLES = """\
examples:
  dragoman keys create anna                                  a key for all models and all APIs
  dragoman keys create agent:coder/anna --model 'smol*' --route messages --tokens-per-minute 20000
  dragoman keys create berta --budget 'tokens 100000/day' --budget 'warn cost 20/month'
  dragoman keys create ops --route stats --route admin       a key for the operator
  dragoman keys list
  dragoman keys revoke 3f9ab0c1d2e4

The key is printed once. Only its digest is stored: in ~/.dragoman/keys.db, in $DRAGOMAN_HOME/keys.db, or in the file
that `keys.store` of the configuration names. Once a key exists, the server requires one from every caller.
"""
DAY = 24 * 3600
BUDGET = re.compile(r"(?:(?P<action>warn|refuse) +)?(?P<unit>tokens|cost) +(?P<amount>[0-9.]+) */ *(?P<per>\w+)")


def add(commands: Commands) -> None:
    description = "Create, list and revoke the API keys of a server."
    parser = add_command(commands, "keys", "create, list and revoke API keys", description, EXAMPLES)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions", required=True)
    _add_create(actions)
    list_parser = actions.add_parser("list", help="list the keys", allow_abbrev=False)
    list_parser.add_argument("--json", action="store_true", help="print JSON")
    list_parser.set_defaults(run=list_keys)
    revoke_parser = actions.add_parser("revoke", help="revoke a key", allow_abbrev=False)
    revoke_parser.add_argument("id", metavar="ID", help="as shown by `dragoman keys list`")
    revoke_parser.set_defaults(run=revoke)
    for action in actions.choices.values():
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
    parser.add_argument("--priority", choices=get_args(Priority), help="batch: requests use what others leave")
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


def create(arguments: argparse.Namespace) -> int:
    rates = arguments.concurrency, arguments.requests_per_minute, arguments.tokens_per_minute
    limits = KeyLimits(*rates, tuple(arguments.budget), arguments.priority)
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
        message = "had a key before; the new key can read the responses stored for that principal"
        print(f"dragoman: {key.principal} {message}", file=sys.stderr)
    print(json.dumps({"key": secret, **_key_fields(key)}, indent=2) if arguments.json else secret)
    return 0


def list_keys(arguments: argparse.Namespace) -> int:
    entries = [_key_fields(key) for key in _store(arguments).all()]
    if arguments.json:
        print(json.dumps(entries, indent=2))
    elif not entries:
        print("no keys; create one with `dragoman keys create WHO`")
    else:
        rows = [[_format_cell(value) for value in entry.values()] for entry in entries]
        print(format_table([[name.upper() for name in entries[0]], *rows]))
    return 0


def revoke(arguments: argparse.Namespace) -> int:
    if not _store(arguments).revoke(arguments.id):
        raise ConfigError(f"key {arguments.id!r} not found or already revoked; `dragoman keys list` shows the keys")
    return 0


def _store(arguments: argparse.Namespace) -> KeyStore:
    return KeyStore(store_path(load_config(arguments.config).settings.keys))


def _key_fields(key: ApiKey) -> dict[str, Any]:
    return {
        "id": key.id,
        "principal": key.principal,
        "state": key.state(time.time()),
        "models": list(key.models),
        "routes": list(key.routes),
        "limits": msgspec.to_builtins(key.limits),
        "created": _format_time(key.created),
        "expires": None if key.expires is None else _format_time(key.expires),
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
