"""`dragoman tune`: finds the fastest layout and number of threads of a model on this machine."""

import argparse
import os
import sys
from pathlib import Path

from dragoman.cli.common import Commands, add_command, format_table, load_config, print_progress
from dragoman.cli.models import find_models
from dragoman.config.quantities import format_size
from dragoman.core.errors import ConfigError
from dragoman.engines import engine_class
from dragoman.engines.llama.tuning_record import Trial, record_path
from dragoman.files import sources

EXAMPLES = """\
examples:
  dragoman tune smollm2
  dragoman tune ./model.gguf
  dragoman tune --config team.yaml mine

Speeds are tokens per second: of a prompt of 64 tokens, of one stream and of eight streams. DIVERGENCE is the mean KL
divergence of the predictions from those of the original. Run it while the machine has nothing else to do. The choice is
stored in ~/.dragoman/tuning or $DRAGOMAN_HOME/tuning, and used when the model is loaded the next time.
"""
BAR_CELLS = 30


def add(commands: Commands) -> None:
    description = "Measure layouts of a GGUF model and numbers of threads on this machine, and record the fastest."
    parser = add_command(commands, "tune", "find the fastest settings of a model", description, EXAMPLES)
    parser.add_argument("model", metavar="MODEL", help="the name of a model that would be served, or its SOURCE")
    parser.add_argument("--config", metavar="FILE", help="the configuration file with the model")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    path = _find_file(arguments)
    # Imported late: gguf is slow to import.
    from dragoman.engines.llama.tuning import tune

    if os.getloadavg()[0] > (os.cpu_count() or 1) / 2:
        print_progress("other programs are computing: the figures will be too low and may mislead")
    try:
        record = tune(path, _draw_bar)
    finally:
        _erase_bar()
    head = ["LAYOUT", "THREADS", "PROMPT", "ONE", "EIGHT", "MEMORY", "DIVERGENCE", ""]
    notes = ("chosen" if trial == record.chosen else trial.error for trial in record.trials)
    print(format_table([head, *([*_cells(trial), note] for trial, note in zip(record.trials, notes, strict=True))]))
    print_progress(f"recorded in {record_path(path)}")
    return 0


def _cells(trial: Trial) -> list[str]:
    measured = trial.measured
    if measured is None:
        return [trial.layout, str(trial.threads), *"-----"]
    speeds = (f"{speed:.1f}" for speed in (measured.prompt, measured.one, measured.eight))
    return [trial.layout, str(trial.threads), *speeds, format_size(measured.memory), f"{measured.divergence:.4f}"]


def _find_file(arguments: argparse.Namespace) -> Path:
    """Return the file of a model by its name or its source. It is downloaded if necessary."""
    served = {model.name: model.spec for model in find_models(load_config(arguments.config).settings)}
    spec = served.get(arguments.model)
    if spec is not None and (not engine_class(spec.engine).loads_gguf or spec.file is None):
        raise ConfigError(f"model {spec.name} uses the engine {spec.engine}; only GGUF models of llama can be tuned")
    return sources.fetch(arguments.model if spec is None or spec.file is None else spec.file, print_progress)


def _draw_bar(label: str, done: float) -> None:
    if sys.stderr.isatty():
        full = round(done * BAR_CELLS)
        bar = f"[{'#' * full}{'.' * (BAR_CELLS - full)}]"
        print(f"\r\x1b[K{bar} {done:4.0%} {label}", end="", file=sys.stderr, flush=True)


def _erase_bar() -> None:
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
