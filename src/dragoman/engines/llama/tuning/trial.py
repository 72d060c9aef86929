"""Makes another layout of a model and tries it: `python -m dragoman.engines.llama.tuning.trial ORIGINAL FOLDER`.

With `again` as a third argument it only makes it.

Rules
1. llama.cpp may crash here, and nobody else is hurt.
2. The end of standard input is the end of the process and of the folder, whatever it is doing: who wanted the file has
   died or does not want it any more.
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
from dragoman.engines.llama.binding import Model
from dragoman.engines.llama.tuning.layout import MADE, SLOW
from dragoman.engines.llama.tuning.messages import Failed, Made, Message, Progress, Tried
from dragoman.engines.llama.tuning.quality import compare
from dragoman.engines.llama.tuning.requantize import requantise
from dragoman.engines.llama.tuning.speed import measure


class _Reporter:
    def __init__(self, output: BinaryIO) -> None:
        self._output = output
        self._last: Progress | None = None

    def send(self, message: Message) -> None:
        self._output.write(msgspec.json.encode(message) + b"\n")
        self._output.flush()

    def step(self, doing: str, begin: float, end: float) -> Callable[[float], None]:
        """For a step that is this part of the whole."""

        def told(done: float) -> None:
            progress = Progress(doing, round(begin + done * (end - begin), 2))
            if progress != self._last:
                self._last = progress
                self.send(progress)

        return told


def attempt(original: Path, folder: Path, reporter: _Reporter) -> Tried:
    made = folder / MADE
    sha256 = requantise(original, made, SLOW, reporter.step("converting", 0.0, 0.4))
    threads = hardware.threads()
    with contextlib.ExitStack() as undo:
        old, new = Model(original), Model(made)
        undo.callback(old.close)
        undo.callback(new.close)
        (before, after), share = measure([old, new], threads, reporter.step("measuring", 0.4, 0.8))
        quality = compare(old, new, threads, reporter.step("comparing", 0.8, 1.0))
    return Tried(sha256, share, before, after, quality)


def _outcome(original: Path, folder: Path, again: bool, reporter: _Reporter) -> Tried | Made | Failed:
    try:
        if again:
            return Made(requantise(original, folder / MADE, SLOW, reporter.step("converting", 0.0, 1.0)))
        return attempt(original, folder, reporter)
    except BrokenPipeError:
        raise
    except OSError as error:
        return Failed(error.strerror or str(error), lasting=False)
    except Exception as error:  # noqa: BLE001 (told to whoever asked)
        return Failed(str(error) or type(error).__name__)


def _follow(source: BinaryIO, folder: Path) -> None:
    source.read()
    _abandon(folder)


def _abandon(folder: Path) -> Never:
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def main() -> None:
    original, folder = map(Path, sys.argv[1:3])
    again = sys.argv[3:] == ["again"]
    # What a library prints must not get among the messages.
    reporter = _Reporter(os.fdopen(os.dup(1), "wb"))
    os.dup2(2, 1)
    threading.Thread(target=_follow, args=(sys.stdin.buffer, folder), daemon=True).start()
    try:
        reporter.send(_outcome(original, folder, again, reporter))
    except BrokenPipeError:
        # The thread that follows would notice too, but this one would end the process before it is done.
        _abandon(folder)
    # Threads of a library may never end by themselves.
    os._exit(0)


if __name__ == "__main__":
    main()
