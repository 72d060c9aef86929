"""Temporary directories that are removed even after a crash.

Rules
1. A directory is removed when its context ends. The next user of the parent removes those of killed processes.
2. A directory in use is never removed: its owner holds a lock on it until the process ends. A lock on the parent covers
   the time between the creation of a directory and its own lock.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def scratch(parent: Path, prefix: str) -> Generator[Path, None, None]:
    """Create a temporary directory in an existing one."""
    with _locked(parent):
        _sweep(parent, prefix)
        folder = Path(tempfile.mkdtemp(dir=parent, prefix=prefix))
        descriptor = os.open(folder, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def sweep(parent: Path, prefix: str) -> None:
    """Remove the directories of dead processes. Errors are ignored."""
    with suppress(OSError), _locked(parent):
        _sweep(parent, prefix)


def _sweep(parent: Path, prefix: str) -> None:
    for folder in parent.glob(f"{prefix}*"):
        with suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


@contextmanager
def _locked(folder: Path) -> Generator[None, None, None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
