"""All tests, in two processes side by side: those that compute with a real model, and all others.

    python -m tests [arguments of pytest]

Most of the others wait more than they compute, so that together the two take little longer than the longer one alone.
What the tests with a model print comes when the others have ended.
"""

import subprocess
import sys
import tempfile
from typing import IO

NONE_SELECTED = 5
"""What pytest exits with where its arguments select tests of the other half only."""


def started(which: str, output: IO[str] | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pytest", "-m", which, *sys.argv[1:]]
    return subprocess.Popen(command, stdout=output, stderr=output, text=True)


def main() -> int:
    with tempfile.TemporaryFile("w+", encoding="utf-8") as printed:
        halves = [started("model", printed), started("not model")]
        try:
            codes = [half.wait() for half in reversed(halves)]
        except KeyboardInterrupt:
            # They hear it too, and end what they have begun.
            codes = [half.wait() for half in halves]
        printed.seek(0)
        sys.stdout.writelines(printed)
    if any(code not in (0, NONE_SELECTED) for code in codes):
        return 1
    return min(codes)


if __name__ == "__main__":
    sys.exit(main())
