"""All tests, in four processes side by side: those with a real model, those of servers in one process, those of servers
with two front ends, and all others.

    python -m tests [arguments of pytest]

Most tests wait more than they compute, so that together they take little longer than the longest alone. The tests of
servers in one process print as they run; what the others print follows.
"""

import subprocess
import sys
import tempfile
from contextlib import ExitStack
from typing import IO

SERVER = ("tests/server", "tests/security")
SHOWN = ("server and not model and not front_ends", *SERVER)
HIDDEN = (
    ("front_ends", *SERVER),
    ("model",),
    ("not server and not model", *(f"--ignore={folder}" for folder in SERVER)),
)
"""The marker of each part, and where its tests are: collecting all tests takes ten seconds."""
NONE_SELECTED = 5
"""The exit code of pytest if its arguments select no test of a part."""


def start(part: tuple[str, ...], output: IO[str] | None = None) -> subprocess.Popen[str]:
    marker, *places = part
    given = sys.argv[1:]
    if not all(argument.startswith("-") for argument in given):
        places = []
    command = [sys.executable, "-m", "pytest", "-m", marker, *places, *given]
    return subprocess.Popen(command, stdout=output, stderr=output, text=True)


def main() -> int:
    with ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8")) for _ in HIDDEN]
        parts = [start(SHOWN), *map(start, HIDDEN, outputs)]
        try:
            codes = [part.wait() for part in parts]
        except KeyboardInterrupt:
            # They get it too, and end what they have begun.
            codes = [part.wait() for part in parts]
        for output in outputs:
            output.seek(0)
            sys.stdout.writelines(output)
    if any(code not in (0, NONE_SELECTED) for code in codes):
        return 1
    return min(codes)


if __name__ == "__main__":
    sys.exit(main())
