"""Progress, findings and the corpus, as files.

.fuzz/state.json               the seed, how far each target is, how many findings there are
.fuzz/findings/NAME.json       a finding: the case, the answer, the log, the command that repeats it
corpus/regressions/NAME.json   a finding that was fixed; it runs first in every run
"""

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import msgspec

from tools.fuzz.cases import Case, HttpCase, Input, RawCase, SocketCase
from tools.fuzz.oracle import Judgement

ROOT = Path(__file__).parents[2]
REGRESSIONS = Path(__file__).parent / "corpus" / "regressions"
FOLDER = ROOT / ".fuzz"
NO_COMMIT = "dragoman"
"""The seed where there is no commit to take it from."""
VARYING = re.compile(r"0x[0-9a-f]+|[0-9a-f]{6,}|\d+|'[^']*'|\"[^\"]*\"|`[^`]*`")
"""What differs between findings of one defect."""
CASE_TYPES: dict[str, type[Case]] = {
    "requests": HttpCase,
    "http": RawCase,
    "websocket": SocketCase,
    "sse": HttpCase,
}


def commit_seed() -> str:
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip()[:12] or NO_COMMIT


class Finding(msgspec.Struct, frozen=True, omit_defaults=True):
    target: str
    kind: str
    text: str
    case: msgspec.Raw
    seed: str = ""
    number: int = -1
    engine: str = "scripted"
    repeats: bool | None = None
    """Whether it happened again when the case ran alone."""
    answer: str = ""
    log: str = ""

    @property
    def command(self) -> str:
        return f"python -m tools.fuzz {self.target} --engine {self.engine} --seed {self.seed} --only {self.number}"

    @property
    def signature(self) -> str:
        """The same for findings that are probably one defect."""
        return f"{self.target} {self.kind} {VARYING.sub('#', self.text)[:90]}"


class Regression(NamedTuple):
    name: str
    target: str
    case: Case


def regressions(target: str) -> list[Regression]:
    found = []
    for file in sorted(REGRESSIONS.glob("*.json")):
        finding = msgspec.json.decode(file.read_bytes(), type=Finding)
        if finding.target == target:
            case = msgspec.json.decode(finding.case, type=CASE_TYPES.get(target, Input))
            found.append(Regression(file.stem, target, case))
    return found


class State(msgspec.Struct):
    seed: str
    progress: dict[str, int] = {}
    """The next number of each target, as `engine/target`."""
    findings: int = 0


class Book:
    """Where progress and findings are kept."""

    def __init__(self, seed: str | None = None, folder: Path = FOLDER, *, resume: bool = False) -> None:
        """`resume` goes on with the run that stopped; with a seed only if that run had the same."""
        self._folder = folder
        self._file = folder / "state.json"
        self.state = State(seed or commit_seed())
        self.findings: dict[str, Finding] = {}
        self.counts: dict[str, int] = {}
        if resume and self._file.exists():
            stopped = msgspec.json.decode(self._file.read_bytes(), type=State)
            if seed in (None, stopped.seed):
                self.state = stopped

    def next_number(self, engine: str, target: str) -> int:
        return self.state.progress.get(f"{engine}/{target}", 0)

    def note_progress(self, engine: str, target: str, number: int) -> None:
        self.state.progress[f"{engine}/{target}"] = number
        self._folder.mkdir(parents=True, exist_ok=True)
        temporary = self._file.with_suffix(".new")
        temporary.write_bytes(msgspec.json.encode(self.state))
        temporary.replace(self._file)

    def finish(self) -> None:
        """The run is complete: the next one begins anew."""
        self._file.unlink(missing_ok=True)

    def is_known(self, finding: Finding) -> bool:
        """Whether there is one like it already; it is counted."""
        self.counts[finding.signature] = self.counts.get(finding.signature, 0) + 1
        return finding.signature in self.findings

    def add(self, finding: Finding) -> Path:
        self.findings[finding.signature] = finding
        self.state.findings += 1
        folder = self._folder / "findings"
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{finding.target}-{finding.seed}-{finding.number}.json"
        file.write_bytes(msgspec.json.format(msgspec.json.encode(finding)))
        return file


def make_finding(
    target: str, engine: str, seed: str, number: int, case: Case, judgement: Judgement, answer: str = ""
) -> Finding:
    raw = msgspec.Raw(msgspec.json.encode(case))
    return Finding(target, judgement.kind, judgement.text, raw, seed, number, engine, answer=answer)
