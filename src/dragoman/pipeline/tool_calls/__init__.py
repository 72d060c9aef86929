"""Readers of tool calls: one file per kind of call that `syntax` knows, in one table.

A reader takes one call from the source (a list of them where the syntax has one) and tells the sink: `start` with the
name, `arguments` with JSON text as it comes, `end`.

Rules
1. What cannot be read raises `Malformed` as long as nothing of it has been told; the caller makes text of it.
2. After `start` a call cannot be taken back. What follows goes into the arguments as the model wrote it, and the sink
   is warned.
3. Arguments are told as soon as they are read; together they are one JSON object if the model wrote one. Those of a
   reply that was cut short are cut short: nothing pretends to be complete.
"""

from collections.abc import Callable
from typing import Any

from dragoman.formats.syntax import Braced, Calls, JsonCall, NamedJson, Pythonic, Tagged
from dragoman.pipeline.text_buffer import Reading, Source
from dragoman.pipeline.tool_calls import braced, json, named, pythonic, tagged
from dragoman.pipeline.tool_calls.sink import Malformed, Sink

READERS: dict[type, Callable[[Source, Any, Calls, Sink], Reading[None]]] = {
    JsonCall: json.read,
    NamedJson: named.read,
    Tagged: tagged.read,
    Pythonic: pythonic.read,
    Braced: braced.read,
}

BEGINS: dict[type, Callable[[Source, Any, Calls], Reading[bool]]] = {
    JsonCall: json.begins,
    NamedJson: named.begins,
    Tagged: tagged.begins,
    Pythonic: pythonic.begins,
    Braced: braced.begins,
}
"""Whether what comes next looks like a call of that kind; nothing is taken."""

__all__ = ["BEGINS", "READERS", "Malformed", "Sink"]
