"""Why vLLM's processes did not start: they print it, and what is raised here only says that they did not start.

Rules
1. While vLLM is being loaded, what its processes print comes by here; every byte is passed on as it came. What they
   print later comes by too: they have no other way. So it is read for as long as they live, even where nobody takes it
   any more: whoever prints into a pipe that is not read stands still.
2. The reason is the last line that begins with the name of an error, behind what vLLM puts before lines of its log.
   Errors that only refer to another one are none.
"""

import os
import re
import select
import threading
from collections.abc import Iterator
from contextlib import contextmanager

LINE = re.compile(
    rb"(?:\([^()]* pid=\d+\) )?(?:(?:ERROR|CRITICAL) [^\[\]]*\[[^\[\]]*\] )?"
    rb"((?:\w+\.)*\w*(?:Error|Exception): .+)"
)
REFERRING = ("root cause", "stack trace")
MOST_BYTES = 16_384
"""Of a line."""
PATIENCE = 1.0
"""Seconds for what processes that have failed still have to say."""
TAKING = 1.0
"""Seconds for whoever takes it to take more."""


class Overheard:
    """What comes out of a pipe, passed on to where it would have gone."""

    def __init__(self, source: int, target: int) -> None:
        self.reason: str | None = None
        self._begun = b""
        self._thread = threading.Thread(target=self._listen, args=(source, target), name="dragoman-hear", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        self._thread.join(PATIENCE)

    def _listen(self, source: int, target: int) -> None:
        try:
            while data := os.read(source, 65_536):
                _pass_on(data, target)
                self.hear(data)
        finally:
            os.close(source)
            os.close(target)

    def hear(self, data: bytes) -> None:
        *lines, begun = (self._begun + data).split(b"\n")
        self._begun = begun[:MOST_BYTES]
        for line in lines:
            found = LINE.match(line)
            words = "" if found is None else found[1].decode(errors="replace").strip()
            if words and not refers(words):
                self.reason = words


def _pass_on(data: bytes, target: int) -> None:
    """Gives up what is not taken. A pipe with any room has it for `PIPE_BUF` bytes: no write stands still."""
    room = select.poll()
    room.register(target, select.POLLOUT)
    while data:
        if not room.poll(TAKING * 1000):
            return
        try:
            data = data[os.write(target, data[: select.PIPE_BUF]) :]
        except BlockingIOError:
            # Somebody else who prints there has taken the room.
            continue
        except OSError:
            return


def refers(words: str) -> bool:
    """Whether an error only says that there is another."""
    return any(phrase in words for phrase in REFERRING)


@contextmanager
def overhearing() -> Iterator[Overheard]:
    """Of this process and of those that it starts meanwhile."""
    kept = os.dup(1), os.dup(2)
    source, sink = os.pipe()
    overheard = Overheard(source, os.dup(2))
    for stream in (1, 2):
        os.dup2(sink, stream)
    os.close(sink)
    try:
        yield overheard
    finally:
        for stream, before in zip((1, 2), kept, strict=True):
            os.dup2(before, stream)
            os.close(before)
