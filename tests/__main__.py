"""All tests, in three processes side by side: those with a real model, those of servers, and all others.

    python -m tests [arguments of pytest]

Most tests wait more than they compute, so that together the three take little longer than the longest alone. The tests
of servers print as they run; what the others print follows.
"""

import subprocess
import sys
import tempfile
from contextlib import ExitStack
from typing import IO

SHOWN = "server and not model"
HIDDEN = ("model", "not server and not model")
NONE_SELECTED = 5
"""The exit code of pytest if its arguments select no test of a part."""


def start(part: str, output: IO[str] | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pytest", "-m", part, *sys.argv[1:]]
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
