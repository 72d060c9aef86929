"""Chooses the weight layout of a model that is fastest on this machine, and remembers the choice.

    home()/layouts/NAME-HASH/  := choice.json  [Q8_0.gguf]  [busy]  lock

Rules
1. A trial runs if enough of the model has a type without fast kernels (`SLOW_TYPES`), and if the Q8_0 copy would be at
   most `MAX_GROWTH` times as large, fit on the disk and fit into half of the memory. The original is never changed.
2. The copy is used if it is clearly faster, in no case much slower, and predicts nearly the same (`rejection_reason`).
3. The choice is valid for the same file, processor and llama.cpp version. A busy machine produces no choice; a marker
   file then suppresses further trials for a while.
4. One process runs a trial at a time and others wait for its result. The copy appears under its name when it is
   complete, and is used only if its hash matches. Otherwise it is recreated without another trial.
5. The original is used if anything fails.
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
from dragoman.engines.llama.tuning.trial_messages import CopyMade, Message, TrialFailed, TrialProgress, TrialResult
from dragoman.files.gguf import TENSOR_KINDS, Outline, read_outline
from dragoman.files.sources import home_directory

log = logging.getLogger("dragoman.layout")

Layout = Literal["auto", "as-is"]
PrintLine = Callable[[str], object]
ShowProgress = Callable[[str, float], object]

COPY_NAME = "Q8_0.gguf"
SLOW_TYPES = {number: name for number, (name, _, _) in TENSOR_KINDS.items() if name in ("Q4_1", "Q5_0", "Q5_1")}
"""Types without fast matrix kernels. The K types have fast kernels and measured slower as Q8_0."""
COPY_BITS = 8.5
MIN_SLOW_SHARE = 0.25
MAX_GROWTH = 2.0
MAX_MEMORY_SHARE = 0.5
MIN_FREE_DISK = 256 * 1024 * 1024

MIN_SPEEDUP, MIN_RELATIVE_SPEED = 1.15, 0.9
MAX_DIVERGENCE, MIN_AGREEMENT = 0.02, 0.9
MIN_CPU_SHARE = 0.5
"""Measurements with a smaller share of the cores' time are discarded."""
BUSY_SECONDS = 1800.0
"""Delay before the next trial after a discarded one."""
TRIAL_TIMEOUT_SECONDS = 300.0
"""Longest wait for a message from the trial."""
KILL_CODES = (-signal.SIGKILL, -signal.SIGTERM)
RECORD_VERSION = 1


class Stamp(msgspec.Struct, frozen=True):
    """Identifies a file without reading it."""

    path: str
    size: int
    changed: int


class Circumstances(msgspec.Struct, frozen=True):
    """The conditions under which a choice is valid."""

    original: Stamp
    processor: hardware.Processor
    threads: int
    llama: str = SUPPORTED
    version: int = RECORD_VERSION


class LayoutChoice(msgspec.Struct, frozen=True):
    circumstances: Circumstances
    kinds: str
    """Types of the original that the copy replaces."""
    why_not: str | None = None
    """Why the original is used. None if the copy is used."""
    tried: TrialResult | None = None
    size: int = 0
    """Size of the copy in bytes."""


def prepare_model_file(
    original: Path, say: PrintLine = log.info, bar: ShowProgress = lambda _doing, _done: None
) -> Path:
    """Return the file to load. Runs a trial if no choice is known: `say` gets lines of text, `bar` the progress."""
    try:
        outline = read_outline(original)
    except ConfigError:
        # The loader reports this error with more detail.
        return original
    if not _is_slow(outline):
        return original
    store = _LayoutStore(original)
    try:
        return store.known_file() or store.choose(outline, say, bar)
    except OSError as error:
        say(f"{original.name} is used as it is: cannot write to {store.folder}: {error.strerror or error}")
        return original


def is_layout_known(original: Path) -> bool:
    """Whether loading needs neither a trial nor a new copy. The copy's hash is not checked."""
    try:
        outline = read_outline(original)
    except ConfigError:
        return True
    return not _is_slow(outline) or _LayoutStore(original).choice() is not None


def chosen_layout(original: Path) -> str | None:
    """Return the layout that was chosen for a file, or None if there is no choice."""
    choice = _LayoutStore(original).choice()
    if choice is None:
        return None
    return "as-is" if choice.why_not else f"Q8_0 for {choice.kinds}"


class _LayoutStore:
    """The folder with the choice for a model file and its copy."""

    def __init__(self, original: Path) -> None:
        self.original = original
        self.resolved = original.resolve()
        name = hashlib.sha256(str(self.resolved).encode()).hexdigest()[:8]
        self.folder = home_directory() / "layouts" / f"{self.resolved.stem}-{name}"
        self.record = self.folder / "choice.json"
        self.copy = self.folder / COPY_NAME
        self.busy_marker = self.folder / "busy"

    def choice(self) -> LayoutChoice | None:
        """Return the valid choice if its copy exists with the right size."""
        choice = self._recorded_choice()
        if choice is None or choice.why_not:
            return choice
        try:
            return choice if self.copy.stat().st_size == choice.size else None
        except OSError:
            return None

    def _recorded_choice(self) -> LayoutChoice | None:
        """Return the valid choice, whatever the state of the copy."""
        try:
            choice = msgspec.json.decode(self.record.read_bytes(), type=LayoutChoice)
            return choice if choice.circumstances == self._circumstances() else None
        except (OSError, *DECODE_ERRORS):
            return None

    def known_file(self) -> Path | None:
        """Return the file of the known choice, or None if the choice is unknown or the copy is damaged."""
        choice = self.choice()
        if choice is None:
            return None
        if choice.why_not or choice.tried is None:
            return self.original
        with self.copy.open("rb") as file:
            return self.copy if hashlib.file_digest(file, "sha256").hexdigest() == choice.tried.sha256 else None

    def choose(self, outline: Outline, say: PrintLine, bar: ShowProgress) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        with _locked(self.folder / "lock", say):
            if (known := self.known_file()) is not None:
                return known
            if self._was_busy():
                busy = f"the machine was too busy for a trial; remove {self.busy_marker} to try again now"
                return self._use_original(busy, outline, say)
            self._remove_leftovers()
            if (recreated := self._recreate_copy(outline, say, bar)) is not None:
                return recreated
            for stale in (self.record, self.copy, self.busy_marker):
                stale.unlink(missing_ok=True)
            if reason := self._size_problem(outline):
                return self._use_original(reason, outline, say)
            with self._trial_folder() as folder:
                say(f"{self.original.name} is {_kinds(outline)}, which may be slow here: trying Q8_0 once ...")
                outcome = _run_trial(self.resolved, Path(folder), bar)
                assert not isinstance(outcome, CopyMade)
                return self._save(outcome, Path(folder) / COPY_NAME, outline, say)

    def _save(self, outcome: TrialResult | TrialFailed, new: Path, outline: Outline, say: PrintLine) -> Path:
        if isinstance(outcome, TrialResult) and outcome.share < MIN_CPU_SHARE:
            self.busy_marker.touch()
            later = f"loading the model in {BUSY_SECONDS / 60:.0f} minutes or later tries again"
            outcome = TrialFailed(f"the machine is too busy to measure its speed; {later}", lasting=False)
        if isinstance(outcome, TrialFailed) and not outcome.lasting:
            return self._use_original(outcome.reason, outline, say)
        result = None if isinstance(outcome, TrialFailed) else outcome
        reason = outcome.reason if isinstance(outcome, TrialFailed) else rejection_reason(outcome)
        size = new.stat().st_size if reason is None else 0
        choice = LayoutChoice(self._circumstances(), _kinds(outline), reason, result, size)
        if reason is None:
            new.replace(self.copy)
        record = new.with_name(self.record.name)
        record.write_bytes(msgspec.json.format(msgspec.json.encode(choice), indent=2))
        record.replace(self.record)
        say(_report(choice, self.original.name, self.folder))
        return self.original if reason else self.copy

    def _recreate_copy(self, outline: Outline, say: PrintLine, bar: ShowProgress) -> Path | None:
        """Recreate a copy that is damaged or missing.

        Returns None if there was no copy or the new one differs, so that a trial is needed. Returns the original, and
        keeps the recorded choice, if the copy cannot be made at the moment.
        """
        choice = self._recorded_choice()
        if choice is None or choice.tried is None:
            return None
        self.copy.unlink(missing_ok=True)
        if reason := self._size_problem(outline):
            return self._use_original(reason, outline, say)
        say(f"the Q8_0 copy of {self.original.name} is damaged or missing: making it again ...")
        with self._trial_folder() as folder:
            outcome = _run_trial(self.resolved, Path(folder), bar, "again")
            if isinstance(outcome, TrialFailed) and not outcome.lasting:
                return self._use_original(outcome.reason, outline, say)
            if not isinstance(outcome, CopyMade) or outcome.sha256 != choice.tried.sha256:
                return None
            (Path(folder) / COPY_NAME).replace(self.copy)
        return self.copy

    def _use_original(self, reason: str, outline: Outline, say: PrintLine) -> Path:
        say(f"{self.original.name} stays {_kinds(outline)}: {reason}")
        return self.original

    def _trial_folder(self) -> "tempfile.TemporaryDirectory[str]":
        return tempfile.TemporaryDirectory(dir=self.folder, prefix=".trying-", ignore_cleanup_errors=True)

    def _was_busy(self) -> bool:
        try:
            return 0 <= time.time() - self.busy_marker.stat().st_mtime < BUSY_SECONDS
        except FileNotFoundError:
            return False

    def _remove_leftovers(self) -> None:
        """Remove the folders of trials that were killed."""
        for folder in self.folder.glob(".trying-*"):
            shutil.rmtree(folder, ignore_errors=True)

    def _size_problem(self, outline: Outline) -> str | None:
        before = self.resolved.stat().st_size
        after = before + _growth(outline)
        if after > MAX_GROWTH * before:
            return f"as Q8_0 it would be {after / before:.1f} times as large"
        if after > MAX_MEMORY_SHARE * hardware.memory():
            return f"as Q8_0 it would take {after / 1e9:.1f} GB, more than half of the memory"
        if after + MIN_FREE_DISK > shutil.disk_usage(self.folder).free:
            return f"as Q8_0 it would take {after / 1e9:.1f} GB, and the disk of {self.folder} is nearly full"
        return None

    def _circumstances(self) -> Circumstances:
        stat = self.resolved.stat()
        stamp = Stamp(str(self.resolved), stat.st_size, stat.st_mtime_ns)
        return Circumstances(stamp, hardware.processor(), hardware.threads())


def rejection_reason(result: TrialResult) -> str | None:
    """Return why the copy is not used, or None if it is."""
    speedup, quality = result.after.ratio(result.before), result.quality
    if speedup.mean < MIN_SPEEDUP or speedup.minimum < MIN_RELATIVE_SPEED:
        return "as Q8_0 it is not clearly faster"
    if quality.divergence > MAX_DIVERGENCE or quality.agreement < MIN_AGREEMENT:
        return "as Q8_0 it predicts different tokens"
    return None


def _report(choice: LayoutChoice, name: str, folder: Path) -> str:
    figures = "" if choice.tried is None else f" ({_figures(choice.tried)})"
    if choice.why_not:
        return f"{name} stays {choice.kinds}: {choice.why_not}{figures}; remove {folder} to try again"
    return f"{name} is used as Q8_0{figures}; {choice.size / 1e6:.0f} MB in {folder}"


def _figures(result: TrialResult) -> str:
    speedup, quality = result.after.ratio(result.before), result.quality
    return (
        f"speed of prompts {speedup.prompt:.2f}x, of one reply {speedup.one:.2f}x, of eight {speedup.eight:.2f}x; "
        f"compared with the original on {quality.tokens} tokens: KL divergence {quality.divergence:.5f}, "
        f"same most likely token {quality.agreement:.1%}"
    )


def _is_slow(outline: Outline) -> bool:
    """Whether enough weights have slow types. Embedding models and split files are excluded."""
    architecture = outline.metadata.get("general.architecture")
    if outline.metadata.get(f"{architecture}.attention.causal") is False or "split.count" in outline.metadata:
        return False
    slow = sum(tensor.elements for tensor in outline.tensors if tensor.kind in SLOW_TYPES)
    return slow > 0 and slow >= MIN_SLOW_SHARE * sum(tensor.elements for tensor in outline.tensors)


def _kinds(outline: Outline) -> str:
    return "/".join(sorted({SLOW_TYPES[tensor.kind] for tensor in outline.tensors if tensor.kind in SLOW_TYPES}))


def _growth(outline: Outline) -> int:
    """Return how many bytes the copy is larger than the original."""
    growth = 0.0
    for tensor in outline.tensors:
        if tensor.kind in SLOW_TYPES:
            _, weights, size = TENSOR_KINDS[tensor.kind]
            growth += tensor.elements * (COPY_BITS / 8 - size / weights)
    return int(growth)


@contextlib.contextmanager
def _locked(path: Path, say: PrintLine) -> Generator[None, None, None]:
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is trying the layout of this model; waiting for it ...")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _run_trial(original: Path, folder: Path, bar: ShowProgress, *mode: str) -> TrialResult | CopyMade | TrialFailed:
    command = [sys.executable, "-m", "dragoman.engines.llama.tuning.trial_process", str(original), str(folder), *mode]
    with subprocess.Popen(  # noqa: S603
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        # A signal to this process group must not kill the trial before it has removed its folder.
        start_new_session=True,
    ) as process:
        try:
            for message in _messages(process):
                if not isinstance(message, TrialProgress):
                    return message
                bar(message.doing, message.done)
        finally:
            process.kill()
    # A crash is likely to repeat, so it is recorded. A kill while recreating a copy that worked before is not.
    lasting = not mode or process.returncode not in KILL_CODES
    return TrialFailed(f"it could not be tried as Q8_0: the process ended with code {process.returncode}", lasting)


def _messages(process: "subprocess.Popen[bytes]") -> Iterator[Message]:
    assert process.stdout is not None
    while True:
        # The kill closes the pipe and so ends readline.
        timeout = threading.Timer(TRIAL_TIMEOUT_SECONDS, process.kill)
        # A Ctrl-C before the try block leaves the timer running. It must not delay the exit.
        timeout.daemon = True
        timeout.start()
        try:
            line = process.stdout.readline()
        finally:
            timeout.cancel()
        if not line:
            return
        yield msgspec.json.decode(line, type=Message)
