"""All tests, in five processes side by side: those with a real model, those of servers in one process, those of servers
with two front ends, those of the tools (which wait for servers too), and all others.

    python -m tests [arguments of pytest]

Most tests wait more than they compute, so that together they take little longer than the longest alone. The tests of
servers in one process print as they run; what the others print follows.

A test that fails runs once more, when nothing else runs. If it passes then, it is listed as unstable, and the run does
not fail. Everything else fails the run: a test that fails twice, an interrupted part, an error outside of a test.
"""

import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import IO

SERVER = ("tests/server", "tests/security")
TOOLS = "tests/tools"
PARTS = (
    ("server and not model and not front_ends", *SERVER),
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
        given = sys.argv[1:]
        if not all(argument.startswith("-") for argument in given):
            places = ()
        self._command = [sys.executable, "-m", "pytest", "-o", f"cache_dir={cache}", "-m", marker, *places, *given]
        self.output = output
        self.process = subprocess.Popen(self._command, stdout=output, stderr=output, text=True)

    def repeat_failed(self) -> int:
        """Run the failed tests again, and return the exit code."""
        print("\nRunning the failed tests once more, alone:", flush=True)
        return subprocess.run([*self._command, "--last-failed", "--last-failed-no-failures", "none"]).returncode


def main() -> int:
    with ExitStack() as stack:
        caches = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        parts = []
        for number, (marker, *places) in enumerate(PARTS):
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
