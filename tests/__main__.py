"""All tests, in six processes side by side: those with a real model, those of servers in one process (in two halves),
those of servers with two front ends, those of the tools (which wait for servers too), and all others.

    python -m tests [arguments of pytest]

Most tests wait more than they compute, so that together they take little longer than the longest alone. The first
half of the tests of servers in one process prints as it runs; what the others print follows.

A test that fails runs once more, when nothing else runs. If it passes then, it is listed as unstable, and the run does
not fail. Everything else fails the run: a test that fails twice, an interrupted part, an error outside of a test.
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO


def _server_files(letters: str) -> list[str]:
    """The tests of servers whose names begin with one of these letters."""
    return sorted(map(str, Path("tests/server").glob(f"test_[{letters}]*.py")))


SERVER = ("tests/server", "tests/security")
ONE_PROCESS = "server and not model and not front_ends"
TOOLS = "tests/tools"
PARTS = (
    (ONE_PROCESS, *_server_files("a-l")),
    (ONE_PROCESS, *_server_files("m-z"), "tests/security"),
    ("front_ends", *SERVER),
    ("model",),
    ("tools and not model", TOOLS),
    ("not server and not tools and not model", *(f"--ignore={folder}" for folder in (*SERVER, TOOLS))),
)
"""The marker of each part, and where its tests are: collecting all tests takes ten seconds. The first part prints."""
TESTS_FAILED = 1
NONE_SELECTED = 5
"""Exit codes of pytest."""


class Part:
    def __init__(self, marker: str, places: tuple[str, ...], cache: Path, output: IO[str] | None) -> None:
        self._command = [
            sys.executable,
            "-m",
            "pytest",
            "-o",
            f"cache_dir={cache}",
            "-m",
            marker,
            *places,
            *sys.argv[1:],
        ]
        self.output = output
        self.process = subprocess.Popen(self._command, stdout=output, stderr=output, text=True)

    def repeat_failed(self) -> int:
        """Run the failed tests again, and return the exit code."""
        print("\nRunning the failed tests once more, alone:", flush=True)
        return subprocess.run([*self._command, "--last-failed", "--last-failed-no-failures", "none"]).returncode


def _parts() -> Sequence[tuple[str, ...]]:
    """The parts, or one for each marker if the arguments name the tests."""
    if all(argument.startswith("-") for argument in sys.argv[1:]):
        return PARTS
    return [(marker,) for marker in dict.fromkeys(marker for marker, *_ in PARTS)]


def main() -> int:
    with ExitStack() as stack:
        caches = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        parts = []
        for number, (marker, *places) in enumerate(_parts()):
            output = stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8")) if number else None
            parts.append(Part(marker, tuple(places), caches / str(number), output))
        try:
            codes = [part.process.wait() for part in parts]
        except KeyboardInterrupt:
            # They get it too, and end what they have begun.
            codes = [part.process.wait() for part in parts]
        for part in parts:
            if part.output is not None:
                part.output.seek(0)
                sys.stdout.writelines(part.output)
        for number, part in enumerate(parts):
            if codes[number] == TESTS_FAILED:
                codes[number] = part.repeat_failed()
                if codes[number] == 0:
                    print("Unstable: the tests above failed beside other tests and passed alone.", flush=True)
                elif codes[number] == NONE_SELECTED:
                    codes[number] = TESTS_FAILED
    failures = [code for code in codes if code not in (0, NONE_SELECTED)]
    return 1 if failures else min(codes)


if __name__ == "__main__":
    sys.exit(main())
