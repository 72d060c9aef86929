"""`dragoman check`: what is wrong with a configuration, without starting anything."""

import argparse
import sys

from dragoman.cli.diagnostics import in_the_way, unservable
from dragoman.cli.settings import loaded_of
from dragoman.config.warnings import doubts
from dragoman.core.errors import ConfigError

EXAMPLES = """\
examples:
  dragoman check
  dragoman check --config team.yaml && kill -HUP "$(pidof -s dragoman)"

Without --config the file is found as for `dragoman serve`. Every mistake is told with its line and its key;
the exit code is 0 or 2.
"""


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "check",
        help="check a configuration",
        description="Tell the mistakes of a configuration without starting a server.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="a configuration file (YAML or JSON)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    loaded = loaded_of(arguments.config)
    settings = loaded.settings
    # Imported late: a mistake in the file is told without it.
    from dragoman.server.preflight_checks import remarks

    wrong = [*in_the_way(settings), *unservable(settings)]
    if wrong:
        raise ConfigError(*loaded.places.told(wrong))
    for doubt in (*loaded.places.told(doubts(settings)), *remarks(settings)):
        print(f"dragoman: warning: {doubt}", file=sys.stderr)
    names = ", ".join(name for model in settings.models for name in model.names) or "those of the models folder"
    print(f"the configuration is sound; models: {names}")
    return 0
