"""In-process targets: cases run in a child process, so that one which crashes or hangs ends the child and nothing else.

    parent -> child   arguments: target, seed, first number, end
    child -> parent   lines: "N" before case N | "! N JSON" for a problem | "M BYTES" for its memory | "end"

Numbers below zero are those of the corpus: -1 is the last regression of the target.
"""

import faulthandler
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

import msgspec

from tools.fuzz import gguf, ipc, schemas, templates
from tools.fuzz.cases import Input
from tools.fuzz.monitor import memory_growth
from tools.fuzz.oracle import Judgement
from tools.fuzz.runner import MOST_FINDINGS, Problem, Summary
from tools.fuzz.shapes import Wrong
from tools.fuzz.state import ROOT, Book, make_finding, regressions
from tools.server import usage_of

SILENT_SECONDS = 90.0
"""The longest that one case may take, on a busy machine too."""
CPU_SECONDS = 6.0
"""The longest that one case may compute."""
MEMORY_EVERY = 200


class LocalTarget(msgspec.Struct, frozen=True):
    """`case` makes a JSON value of the seed and the number. `check` returns a word for the outcome, or raises Wrong."""

    case: Callable[[str, int], Any]
    check: Callable[[Any], str]


LOCAL_TARGETS: Mapping[str, LocalTarget] = {
    "schemas": LocalTarget(schemas.case, schemas.check),
    "templates": LocalTarget(templates.case, templates.check),
    "gguf": LocalTarget(gguf.case, gguf.check),
    "ipc": LocalTarget(ipc.case, ipc.check),
}


def value_of(target: str, seed: str, number: int) -> Any:
    if number >= 0:
        return LOCAL_TARGETS[target].case(seed, number)
    kept = regressions(target)[number].case
    assert isinstance(kept, Input)
    return msgspec.json.decode(kept.value)


class LocalRun:
    def __init__(self, target: str, seed: str, book: Book, log: Callable[[str], None] = print) -> None:
        self.summary = Summary(target, "scripted")
        self._target, self._seed, self._book, self._log = target, seed, book, log
        self._memory: list[int] = []
        self._current: int | None = None

    def run(self, numbers: Sequence[int]) -> Summary:
        begun = time.monotonic()
        kept = len(regressions(self._target))
        for first, end in ((-kept, 0), (numbers[0], numbers[-1] + 1)):
            self._run_range(first, end)
        if growth := memory_growth(self._memory):
            self._report(Problem(-1, Judgement("memory", growth)))
        if self._memory:
            self.summary.memory = (self._memory[0], self._memory[-1])
        self.summary.seconds = time.monotonic() - begun
        return self.summary

    def _run_range(self, first: int, end: int) -> None:
        while first < end and self.summary.findings < MOST_FINDINGS:
            self._current = None
            problem = self._run_child(first, end)
            if problem is None:
                break
            self._report(problem)
            self._memory.clear()
            first = problem.number + 1
        if end > 0:
            self._book.note_progress("scripted", self._target, end)

    def _run_child(self, first: int, end: int) -> Problem | None:
        """The case that the child died of, or None."""
        command = [sys.executable, "-m", "tools.fuzz.isolation", self._target, self._seed, str(first), str(end)]
        # A pipe would fill up, because nothing reads it before the child has ended.
        with tempfile.TemporaryFile() as errors:
            child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, cwd=ROOT)
            assert child.stdout is not None
            try:
                is_complete = self._read(child.stdout)
            finally:
                child.kill()
                code = child.wait()
                child.stdout.close()
            errors.seek(max(0, errors.seek(0, os.SEEK_END) - 2000))
            last_words = errors.read().decode("utf-8", "replace")
        if is_complete:
            return None
        number = first if self._current is None else self._current
        if is_complete is None:
            return Problem(number, Judgement("hang", f"no end within {SILENT_SECONDS:g} s"), last_words)
        return Problem(number, Judgement("crash", f"exit code {code}: {_reason(last_words)}"), last_words)

    def _read(self, output: IO[bytes]) -> bool | None:
        """Until the child's end. False: it died; None: it says nothing any more."""
        partial = b""
        while True:
            if not select.select([output], [], [], SILENT_SECONDS)[0]:
                return None
            data = os.read(output.fileno(), 65536)
            if not data:
                return False
            *lines, partial = (partial + data).split(b"\n")
            for line in lines:
                if line == b"end":
                    return True
                self._take(line.decode())

    def _take(self, line: str) -> None:
        kind, _, rest = line.partition(" ")
        if kind == "!":
            number, _, text = rest.partition(" ")
            name, words = msgspec.json.decode(text)
            self._report(Problem(int(number), Judgement(name, words)))
        elif kind == "M":
            self._memory.append(int(rest))
        elif kind == "=":
            self.summary.outcomes[rest] += 1
        else:
            self._current = int(kind)
            self.summary.cases += 1

    def _report(self, problem: Problem) -> None:
        value = None if problem.judgement.kind == "memory" else value_of(self._target, self._seed, problem.number)
        case = Input(msgspec.Raw(msgspec.json.encode(value)))
        finding = make_finding(
            self._target, "scripted", self._seed, problem.number, case, problem.judgement, problem.answer
        )
        if self._book.is_known(finding):
            return
        self._book.add(finding)
        self.summary.findings += 1
        self._log(f"{self._target}: {problem.number}: {finding.kind}: {finding.text[:300]}")
        self._log(f"    {finding.command}")


def _reason(text: str) -> str:
    """The line of a native crash that says most."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next(
        (line for line in lines if "panicked" in line or "Fatal" in line or "ASSERT" in line),
        lines[-1] if lines else "",
    )


def main() -> None:
    faulthandler.enable()
    target, seed, first, end = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    # Whatever a library prints must not get among the lines.
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for number in range(first, end):
        output.write(f"{number}\n")
        begun = time.process_time()
        try:
            outcome = LOCAL_TARGETS[target].check(value_of(target, seed, number))
        except Wrong as error:
            _tell(output, number, "wrong", str(error))
            outcome = "wrong"
        except BaseException as error:  # noqa: BLE001 (a Rust panic is no Exception)
            _tell(output, number, "raised", f"{type(error).__name__}: {error}")
            outcome = "raised"
        if time.process_time() - begun > CPU_SECONDS:
            _tell(output, number, "slow", f"more than {CPU_SECONDS:g} s of computing")
        output.write(f"= {outcome}\n")
        usage = usage_of(os.getpid()) if number % MEMORY_EVERY == 0 else None
        if usage is not None:
            output.write(f"M {usage.memory}\n")
    output.write("end\n")
    output.flush()
    # Threads of a library may not end by themselves.
    os.kill(os.getpid(), signal.SIGKILL)


def _tell(output: IO[str], number: int, name: str, words: str) -> None:
    output.write(f"! {number} {msgspec.json.encode((name, words[:500])).decode()}\n")


if __name__ == "__main__":
    main()
