"""Records when each stored key was used last, in a JSON file beside the key store.

Rules
1. A request only notes its key in memory. `write` is a periodic job.
2. Servers may share a key store. The latest time of each key is kept.
3. Only `dragoman keys` reads the file. If it is missing or damaged, keys count as never used.
"""

import logging
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from dragoman.core.ids import new_id

log = logging.getLogger("dragoman.storage")

WRITE_SECONDS = 60.0
"""The pause between two runs of the job."""


class KeyUses:
    def __init__(self) -> None:
        self._noted: dict[str, float] = {}
        self._is_failing = False

    def note(self, key_id: str, time: float) -> None:
        self._noted[key_id] = time

    def write(self, store: Path) -> None:
        """Write what was noted since the last call. If that fails, the next call tries again."""
        noted, self._noted = self._noted, {}
        if not noted:
            return
        path = uses_path(store)
        temporary = path.with_name(f"{path.name}-{new_id('')}")
        try:
            try:
                with os.fdopen(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
                    file.write(msgspec.json.encode(_latest(read_uses(store), noted)))
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
            self._is_failing = False
        except OSError as error:
            self._noted = _latest(noted, self._noted)
            if not self._is_failing:
                self._is_failing = True
                log.warning("cannot write the times of the last use of keys: %s", error)


def uses_path(store: Path) -> Path:
    return store.with_name(f"{store.name}-used")


def read_uses(store: Path) -> dict[str, float]:
    """The times of the last use, by the id of the key."""
    try:
        return msgspec.json.decode(uses_path(store).read_bytes(), type=dict[str, float])
    except (OSError, msgspec.DecodeError):
        return {}


def _latest(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    return {key: max(first.get(key, 0.0), second.get(key, 0.0)) for key in (*first, *second)}
