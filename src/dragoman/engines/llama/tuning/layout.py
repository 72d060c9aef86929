"""The layout of a model's weights that is fast on this machine, found out once and kept.

    home()/layouts/NAME-HASH/  := choice.json  [Q8_0.gguf]  [busy]  lock

Rules
1. Tried is what llama.cpp has no fast kernels for (`SLOW`), where it is a good part of the model and the new file would
   be at most `MOST_GROWTH` times as large, fit on the disk and into half of the memory. The original stays.
2. It is taken where it is faster by a clear margin, in nothing much slower, and says nearly the same (`why_not`).
3. What was found is kept and believed for the same file, processor and llama.cpp. What a busy machine finds is not;
   that it was busy is kept for a while, so that not every load pays for finding nothing.
4. Only one process tries at a time, others wait for what it finds. The new file appears under its name when it is
   whole, and is used only if every byte is what it was; otherwise it is made again, without another trial.
5. Whatever goes wrong, there is the original.
"""

import contextlib
import fcntl
import hashlib
import logging
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from dragoman.core.errors import DECODE_ERRORS, ConfigError
from dragoman.engines.llama import hardware
from dragoman.engines.llama.library import SUPPORTED
from dragoman.engines.llama.tuning.messages import Failed, Made, Message, Progress, Tried
from dragoman.files.gguf import BLOCKS, Outline, read_outline
from dragoman.files.sources import home

log = logging.getLogger("dragoman.layout")

Layout = Literal["auto", "as-is"]
Say = Callable[[str], object]
Bar = Callable[[str, float], object]

MADE = "Q8_0.gguf"
SLOW = {number: name for number, (name, _, _) in BLOCKS.items() if name in ("Q4_1", "Q5_0", "Q5_1")}
"""Kinds without fast matrix kernels. Those of the K family have some, and are slower as Q8_0: measured."""
TARGET_BITS = 8.5
LEAST_SHARE = 0.25
MOST_GROWTH = 2.0
MOST_MEMORY = 0.5
SPARE_DISK = 256 * 1024 * 1024

LEAST_GAIN, LEAST_SPEED = 1.15, 0.9
MOST_DIVERGENCE, LEAST_AGREEMENT = 0.02, 0.9
LEAST_CORES = 0.5
"""Of their time: on a busier machine nothing can be found out."""
BUSY_SECONDS = 1800.0
"""For which nothing is tried after that."""
SILENCE_SECONDS = 300.0
"""After which a trial is given up."""
KILLED = (-signal.SIGKILL, -signal.SIGTERM)
VERSION = 1
"""Of what is kept: another one is not believed."""


class Stamp(msgspec.Struct, frozen=True):
    """By which a file is known again without reading it."""

    path: str
    size: int
    changed: int


class Circumstances(msgspec.Struct, frozen=True):
    """What a choice was made for."""

    original: Stamp
    processor: hardware.Processor
    threads: int
    llama: str = SUPPORTED
    version: int = VERSION


class Choice(msgspec.Struct, frozen=True):
    circumstances: Circumstances
    kinds: str
    """Those of the original that were replaced."""
    why_not: str | None = None
    """Why the original is used; None: the new file is."""
    tried: Tried | None = None
    size: int = 0
    """Of the new file."""


def _quiet(doing: str, done: float) -> None:
    """For those who have no terminal to draw on."""


def prepared(original: Path, say: Say = log.info, bar: Bar = _quiet) -> Path:
    """The file to load. It takes a while where nothing is known yet: `say` is told lines, `bar` how far it is."""
    try:
        outline = read_outline(original)
    except ConfigError:
        # Whoever loads it finds out, and says so better.
        return original
    if not _is_slow(outline):
        return original
    shelf = _Shelf(original)
    try:
        return shelf.known() or shelf.decide(outline, say, bar)
    except OSError as error:
        say(f"{original.name} stays as it is: nothing can be kept under {shelf.folder}: {error.strerror or error}")
        return original


def is_settled(original: Path) -> bool:
    """Whether loading it will take neither a trial nor a copy made again, as far as one can see without reading all."""
    try:
        outline = read_outline(original)
    except ConfigError:
        return True
    return not _is_slow(outline) or _Shelf(original).choice() is not None


def in_use(original: Path) -> str | None:
    """The layout that was chosen for a file; None: none was, or none is needed."""
    choice = _Shelf(original).choice()
    if choice is None:
        return None
    return "as-is" if choice.why_not else f"Q8_0 for {choice.kinds}"


class _Shelf:
    """Where the choice for a file is kept, and what was made of the file."""

    def __init__(self, original: Path) -> None:
        self.original = original
        self.place = original.resolve()
        name = hashlib.sha256(str(self.place).encode()).hexdigest()[:8]
        self.folder = home() / "layouts" / f"{self.place.stem}-{name}"
        self.record = self.folder / "choice.json"
        self.made = self.folder / MADE
        self.busy = self.folder / "busy"

    def choice(self) -> Choice | None:
        """What was chosen, if the file is there in its length."""
        choice = self._verdict()
        if choice is None or choice.why_not:
            return choice
        try:
            return choice if self.made.stat().st_size == choice.size else None
        except OSError:
            return None

    def _verdict(self) -> Choice | None:
        """What was chosen under the same circumstances, whatever has become of the file."""
        try:
            choice = msgspec.json.decode(self.record.read_bytes(), type=Choice)
            return choice if choice.circumstances == self._circumstances() else None
        except (OSError, *DECODE_ERRORS):
            # Nothing, or nothing that can be read.
            return None

    def known(self) -> Path | None:
        choice = self.choice()
        if choice is None:
            return None
        if choice.why_not or choice.tried is None:
            return self.original
        with self.made.open("rb") as file:
            return self.made if hashlib.file_digest(file, "sha256").hexdigest() == choice.tried.sha256 else None

    def decide(self, outline: Outline, say: Say, bar: Bar) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        with _locked(self.folder / "lock", say):
            if (found := self.known()) is not None:
                return found
            if self._was_busy():
                words = f"the machine was too busy to try it; remove {self.busy} to try again at once"
                return self._left(words, outline, say)
            self._sweep()
            if (again := self._made_again(outline, say, bar)) is not None:
                return again
            self._clear()
            if reason := self._no_room(outline):
                return self._left(reason, outline, say)
            with self._scratch() as folder:
                say(f"{self.original.name} is {_kinds(outline)}, which may be slow here: trying it as Q8_0, once ...")
                outcome = _try(self.place, Path(folder), bar)
                assert not isinstance(outcome, Made)
                return self._keep(outcome, Path(folder) / MADE, outline, say)

    def _keep(self, outcome: Tried | Failed, new: Path, outline: Outline, say: Say) -> Path:
        if isinstance(outcome, Tried) and outcome.share < LEAST_CORES:
            self.busy.touch()
            later = f"a load in {BUSY_SECONDS / 60:.0f} minutes or later tries again"
            outcome = Failed(f"the machine is too busy to measure anything; {later}", lasting=False)
        if isinstance(outcome, Failed) and not outcome.lasting:
            return self._left(outcome.reason, outline, say)
        tried = None if isinstance(outcome, Failed) else outcome
        reason = outcome.reason if isinstance(outcome, Failed) else why_not(outcome)
        size = new.stat().st_size if reason is None else 0
        choice = Choice(self._circumstances(), _kinds(outline), reason, tried, size)
        if reason is None:
            new.replace(self.made)
        record = new.with_name(self.record.name)
        record.write_bytes(msgspec.json.format(msgspec.json.encode(choice), indent=2))
        record.replace(self.record)
        say(report(choice, self.original.name, self.folder))
        return self.original if reason else self.made

    def _made_again(self, outline: Outline, say: Say, bar: Bar) -> Path | None:
        """A copy that is damaged or gone, where it is known that it pays. One that comes out otherwise is tried; where
        it cannot be made just now, what is known stays known, and the original serves."""
        choice = self._verdict()
        if choice is None or choice.tried is None:
            return None
        self.made.unlink(missing_ok=True)
        if reason := self._no_room(outline):
            return self._left(reason, outline, say)
        say(f"the copy of {self.original.name} as Q8_0 is damaged or gone: making it again ...")
        with self._scratch() as folder:
            outcome = _try(self.place, Path(folder), bar, "again")
            if isinstance(outcome, Failed) and not outcome.lasting:
                return self._left(outcome.reason, outline, say)
            if not isinstance(outcome, Made) or outcome.sha256 != choice.tried.sha256:
                return None
            (Path(folder) / MADE).replace(self.made)
        return self.made

    def _left(self, reason: str, outline: Outline, say: Say) -> Path:
        say(f"{self.original.name} stays {_kinds(outline)}: {reason}")
        return self.original

    def _scratch(self) -> "tempfile.TemporaryDirectory[str]":
        return tempfile.TemporaryDirectory(dir=self.folder, prefix=".trying-", ignore_cleanup_errors=True)

    def _was_busy(self) -> bool:
        try:
            return 0 <= time.time() - self.busy.stat().st_mtime < BUSY_SECONDS
        except FileNotFoundError:
            return False

    def _clear(self) -> None:
        """What is not believed any more."""
        self.record.unlink(missing_ok=True)
        self.made.unlink(missing_ok=True)
        self.busy.unlink(missing_ok=True)

    def _sweep(self) -> None:
        """What a trial that was killed has left."""
        for left in self.folder.glob(".trying-*"):
            shutil.rmtree(left, ignore_errors=True)

    def _no_room(self, outline: Outline) -> str | None:
        before = self.place.stat().st_size
        after = before + _growth(outline)
        if after > MOST_GROWTH * before:
            return f"as Q8_0 it would be {after / before:.1f} times as large"
        if after > MOST_MEMORY * hardware.memory():
            return f"as Q8_0 it would take {after / 1e9:.1f} GB, more than half of the memory"
        if after + SPARE_DISK > shutil.disk_usage(self.folder).free:
            return f"as Q8_0 it would take {after / 1e9:.1f} GB, and the disk of {self.folder} is nearly full"
        return None

    def _circumstances(self) -> Circumstances:
        told = self.place.stat()
        stamp = Stamp(str(self.place), told.st_size, told.st_mtime_ns)
        return Circumstances(stamp, hardware.processor(), hardware.threads())


def why_not(tried: Tried) -> str | None:
    """What speaks against it, if anything does."""
    gain, quality = tried.after.times(tried.before), tried.quality
    if gain.mean < LEAST_GAIN or gain.least < LEAST_SPEED:
        return "as Q8_0 it is not clearly faster"
    if quality.divergence > MOST_DIVERGENCE or quality.agreement < LEAST_AGREEMENT:
        return "as Q8_0 it would say other things"
    return None


def report(choice: Choice, name: str, folder: Path) -> str:
    """What was found, in one line."""
    found = "" if choice.tried is None else f" ({_figures(choice.tried)})"
    if choice.why_not:
        return f"{name} stays {choice.kinds}: {choice.why_not}{found}; remove {folder} to try again"
    return f"{name} is used as Q8_0{found}; {choice.size / 1e6:.0f} MB in {folder}"


def _figures(tried: Tried) -> str:
    gain, quality = tried.after.times(tried.before), tried.quality
    return (
        f"prompts {gain.prompt:.2f} times, one reply {gain.one:.2f}, eight {gain.eight:.2f} times as fast; against the "
        f"original on {quality.tokens} tokens: KL divergence {quality.divergence:.5f}, "
        f"same first choice {quality.agreement:.1%}"
    )


def _is_slow(outline: Outline) -> bool:
    """Whether there is enough in it that could be faster. What makes vectors, or comes in several files, is left."""
    architecture = outline.metadata.get("general.architecture")
    if outline.metadata.get(f"{architecture}.attention.causal") is False or "split.count" in outline.metadata:
        return False
    slow = sum(tensor.elements for tensor in outline.tensors if tensor.kind in SLOW)
    return slow > 0 and slow >= LEAST_SHARE * sum(tensor.elements for tensor in outline.tensors)


def _kinds(outline: Outline) -> str:
    return "/".join(sorted({SLOW[tensor.kind] for tensor in outline.tensors if tensor.kind in SLOW}))


def _growth(outline: Outline) -> int:
    """Bytes by which the new file is larger."""
    larger = 0.0
    for tensor in outline.tensors:
        if tensor.kind in SLOW:
            _, weights, size = BLOCKS[tensor.kind]
            larger += tensor.elements * (TARGET_BITS / 8 - size / weights)
    return int(larger)


@contextlib.contextmanager
def _locked(path: Path, say: Say) -> Generator[None, None, None]:
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is trying the layout of this model; waiting for it ...")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _try(original: Path, folder: Path, bar: Bar, *further: str) -> Tried | Made | Failed:
    command = [sys.executable, "-m", "dragoman.engines.llama.tuning.trial", str(original), str(folder), *further]
    with subprocess.Popen(  # noqa: S603
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        # Who ends this process with its whole group leaves it alive for as long as it takes to remove its folder.
        start_new_session=True,
    ) as process:
        try:
            for message in _messages(process):
                if not isinstance(message, Progress):
                    return message
                bar(message.doing, message.done)
        finally:
            process.kill()
    # What a trial dies of, another may die of. A copy could be made before: that somebody killed it now proves nothing.
    lasting = not further or process.returncode not in KILLED
    return Failed(f"it could not be tried as Q8_0: the process ended with code {process.returncode}", lasting)


def _messages(process: "subprocess.Popen[bytes]") -> Iterator[Message]:
    assert process.stdout is not None
    while True:
        # A kill ends the pipe, and with it the wait for a line.
        too_long = threading.Timer(SILENCE_SECONDS, process.kill)
        # A Ctrl-C that comes while it starts leaves it running; nobody waits for it then.
        too_long.daemon = True
        too_long.start()
        try:
            line = process.stdout.readline()
        finally:
            too_long.cancel()
        if not line:
            return
        yield msgspec.json.decode(line, type=Message)
