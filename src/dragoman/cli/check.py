"""`dragoman check`: reports the errors and warnings of a configuration without starting a server."""

import argparse
import sys

from dragoman.cli.common import Commands, add_command, load_config
from dragoman.config.loading import FILE_NAME
from dragoman.core.errors import ConfigError

EXAMPLES = """\
examples:
  dragoman check
  dragoman check --config team.yaml && kill -HUP "$(pgrep -of "dragoman serve")"

Without --config the file is found as for `dragoman serve`. Every error is printed with its line and its key.
The exit code is 0 or 2.
"""


def add(commands: Commands) -> None:
    description = "Report the errors of a configuration without starting a server."
    parser = add_command(commands, "check", "check a configuration", description, EXAMPLES)
    parser.add_argument("--config", metavar="FILE", help="a configuration file (YAML or JSON)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.config)
    # Imported late: errors in the configuration file itself need no server modules.
    from dragoman.server.preflight_checks import find_damaged_files, find_diagnostics, find_exposure

    checks = (find_diagnostics, find_exposure, find_damaged_files)
    found = [diagnostic for check in checks for diagnostic in check(config.settings)]
    errors = [diagnostic for diagnostic in found if diagnostic.level != "warning"]
    if errors:
        raise ConfigError(*config.locations.format(errors))
    for warning in config.locations.format(found):
        print(f"dragoman: warning: {warning}", file=sys.stderr)
    names = ", ".join(name for model in config.settings.models for name in model.names)
    missing = (
        f"there is no configuration file (--config FILE, $DRAGOMAN_CONFIG or ./{FILE_NAME}); the defaults are valid"
    )
    result = "the configuration is valid" if config.locations.file else missing
    print(f"{result}; models: {names or 'those of the models directory'}")
    return 0
