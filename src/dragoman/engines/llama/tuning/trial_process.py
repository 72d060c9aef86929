"""Converts a model to another weight layout and measures the copy.

    python -m dragoman.engines.llama.tuning.trial_process ORIGINAL FOLDER [again]

`again` recreates the copy without measuring it.

Rules
1. The trial is a process of its own because llama.cpp may crash.
2. The process exits and removes FOLDER on EOF of standard input: its parent died or cancelled the trial.
"""

import contextlib
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Never

import msgspec

from dragoman.engines.llama import hardware
from dragoman.engines.llama.binding import LlamaModel
from dragoman.engines.llama.tuning.quality import compare
from dragoman.engines.llama.tuning.requantize import requantize
from dragoman.engines.llama.tuning.speed import measure
from dragoman.engines.llama.tuning.trial_messages import CopyMade, Message, TrialFailed, TrialProgress, TrialResult
from dragoman.engines.llama.tuning.weight_layout import COPY_NAME, SLOW_TYPES


class _Reporter:
    def __init__(self, output: BinaryIO) -> None:
        self._output = output
        self._last: TrialProgress | None = None

    def send(self, message: Message) -> None:
        self._output.write(msgspec.json.encode(message) + b"\n")
        self._output.flush()

    def progress_of(self, doing: str, begin: float, end: float) -> Callable[[float], None]:
        """Return a callback for a step that covers the interval from `begin` to `end` of the whole trial."""

        def report(done: float) -> None:
            progress = TrialProgress(doing, round(begin + done * (end - begin), 2))
            if progress != self._last:
                self._last = progress
                self.send(progress)

        return report


def _run_trial(original: Path, folder: Path, reporter: _Reporter) -> TrialResult:
    copy = folder / COPY_NAME
    sha256 = requantize(original, copy, SLOW_TYPES, reporter.progress_of("converting", 0.0, 0.4))
    threads = hardware.threads()
    with contextlib.ExitStack() as stack:
        old, new = LlamaModel(original), LlamaModel(copy)
        stack.callback(old.close)
        stack.callback(new.close)
        (before, after), share = measure([old, new], threads, reporter.progress_of("measuring", 0.4, 0.8))
        quality = compare(old, new, threads, reporter.progress_of("comparing", 0.8, 1.0))
    return TrialResult(sha256, share, before, after, quality)


def _outcome(original: Path, folder: Path, again: bool, reporter: _Reporter) -> Message:
    try:
        if not again:
            return _run_trial(original, folder, reporter)
        progress = reporter.progress_of("converting", 0.0, 1.0)
        return CopyMade(requantize(original, folder / COPY_NAME, SLOW_TYPES, progress))
    except BrokenPipeError:
        raise
    except OSError as error:
        return TrialFailed(error.strerror or str(error), lasting=False)
    except Exception as error:  # noqa: BLE001 (sent to the parent)
        return TrialFailed(str(error) or type(error).__name__)


def _exit_on_eof(source: BinaryIO, folder: Path) -> None:
    source.read()
    _remove_and_exit(folder)


def _remove_and_exit(folder: Path) -> Never:
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def main() -> None:
    original, folder = map(Path, sys.argv[1:3])
    again = sys.argv[3:] == ["again"]
    # Keep the messages free of anything that a library prints.
    reporter = _Reporter(os.fdopen(os.dup(1), "wb"))
    os.dup2(2, 1)
    threading.Thread(target=_exit_on_eof, args=(sys.stdin.buffer, folder), daemon=True).start()
    try:
        reporter.send(_outcome(original, folder, again, reporter))
    except BrokenPipeError:
        # Without this, the process could exit before the EOF thread has removed the folder.
        _remove_and_exit(folder)
    # A library's threads may never end.
    os._exit(0)


if __name__ == "__main__":
    main()
