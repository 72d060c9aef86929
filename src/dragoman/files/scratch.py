"""Folders in which something is made that then gets another name.

Rules
1. A folder is gone when its work is done, however that ends. What somebody who was killed has left is removed by the
   next one who works there.
2. Nobody removes a folder in which somebody works: its owner holds a lock on it, which ends with the process. The lock
   of the folder around it makes sure that no new one is seen before its owner has that.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def scratch(around: Path, prefix: str) -> Generator[Path, None, None]:
    """A new folder inside of one that there is."""
    with _locked(around):
        _sweep(around, prefix)
        folder = Path(tempfile.mkdtemp(dir=around, prefix=prefix))
        held = os.open(folder, os.O_RDONLY)
        fcntl.flock(held, fcntl.LOCK_EX)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def sweep(around: Path, prefix: str) -> None:
    """Remove what nobody works in any more. That it cannot be is no mistake of who asks."""
    with suppress(OSError), _locked(around):
        _sweep(around, prefix)


def _sweep(around: Path, prefix: str) -> None:
    for folder in around.glob(f"{prefix}*"):
        with suppress(OSError):
            held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(held)


@contextmanager
def _locked(folder: Path) -> Generator[None, None, None]:
    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)
