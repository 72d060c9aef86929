"""Readers of tool calls: one module per kind of call syntax.

A reader consumes one call from the buffer (or a list of them) and reports to the sink: `start` with the name,
`arguments` with JSON text as it arrives, `end`.

Rules
1. Unreadable text raises `MalformedCall` if nothing was reported yet. The caller turns it into text.
2. After `start` a call cannot be withdrawn. The rest goes into the arguments as the model wrote it, with a warning.
3. Arguments are reported as soon as they are read. Together they form one JSON object if the model wrote one. The
   arguments of a truncated reply stay truncated.
"""

from collections.abc import Callable
from typing import Any

from dragoman.formats.syntax import Braced, CallSection, JsonCall, NamedJson, Pythonic, Tagged
from dragoman.pipeline.call_readers import braced_calls, json_calls, named_calls, python_calls, tagged_calls
from dragoman.pipeline.call_readers.call_sink import CallSink, MalformedCall
from dragoman.pipeline.text_buffer import Parser, TextBuffer

READERS: dict[type, Callable[[TextBuffer, Any, CallSection, CallSink], Parser[None]]] = {
    JsonCall: json_calls.read,
    NamedJson: named_calls.read,
    Tagged: tagged_calls.read,
    Pythonic: python_calls.read,
    Braced: braced_calls.read,
}

DETECTORS: dict[type, Callable[[TextBuffer, Any, CallSection], Parser[bool]]] = {
    JsonCall: json_calls.begins,
    NamedJson: named_calls.begins,
    Tagged: tagged_calls.begins,
    Pythonic: python_calls.begins,
    Braced: braced_calls.begins,
}
"""Return whether a call of this kind comes next, without consuming it."""

__all__ = ["DETECTORS", "READERS", "CallSink", "MalformedCall"]
