"""The tool calls of a reply, put together from whatever pieces a server sends.

    piece := {index?, id?, function: {name?, arguments?}}           arguments: JSON text, a piece of it, or an object

Rules
1. A piece belongs to the call with its index, or without one to the call that was told of last; but an id that differs
   begins another call (only a name or a missing index shows that it is not merely changing), and so does a name, unless
   the call has that very name and its arguments are not complete.
2. Events tell one call after the other. Of a call that begins before the arguments of the one before it are complete,
   nothing is told until those are.
3. A call without an id gets one; a call without arguments has an empty object.
4. Arguments that are no JSON object in the end are a `MalformedToolCall`, unless the reply was cut short.
"""

import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from dragoman.core.errors import DECODE_ERRORS, MalformedToolCall
from dragoman.core.events import Event, ToolCallDelta, ToolCallStart
from dragoman.core.request import ToolCall

NewId = Callable[[], str]


def new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class _Call:
    id: str = ""
    name: str = ""
    told = False

    def __init__(self, index: object) -> None:
        self.index = index
        self.pieces: list[str] = []
        self.untold: list[str] = []

    @property
    def arguments(self) -> str:
        # Joined once: whoever asks again finds one piece.
        self.pieces = ["".join(self.pieces)]
        return self.pieces[0]

    @property
    def is_complete(self) -> bool:
        return is_object(self.arguments)


def is_object(text: str) -> bool:
    if not text.rstrip().endswith("}"):
        return False
    try:
        msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except DECODE_ERRORS:
        return False
    return True


class Calls:
    def __init__(self, make_id: NewId = new_id) -> None:
        self._make_id = make_id
        self._calls: list[_Call] = []
        self._at = 0
        """The first call that is not closed: its pieces are told as they come."""

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def is_open(self) -> bool:
        """Whether there is a call to which more may come."""
        return bool(self._calls) and not all(call.told and call.is_complete for call in self._calls[self._at :])

    def add(self, piece: Mapping[str, Any]) -> Iterator[Event]:
        function = piece.get("function")
        if not isinstance(function, dict):
            function = piece
        name, arguments = _text(function.get("name")), arguments_text(function.get("arguments"))
        yield from self.take(piece.get("index"), _text(piece.get("id")), name, arguments)

    def take(self, index: object, call_id: str, name: str, arguments: str) -> Iterator[Event]:
        call = self._find(index, call_id, name)
        call.id = call.id or call_id
        call.name = call.name or name
        if arguments:
            call.pieces.append(arguments)
            call.untold.append(arguments)
        yield from self._tell()

    def end(self, cut_short: bool, check: bool = True) -> Iterator[Event]:
        """What has not been told yet, when nothing more comes."""
        for call in self._calls[self._at :]:
            yield from self._told(call)
            if not call.arguments.strip() and not cut_short:
                call.pieces.append("{}")
                yield ToolCallDelta("{}")
        self._at = len(self._calls)
        if check and not cut_short:
            for call in self._calls:
                self._check(call)

    def _find(self, index: object, call_id: str, name: str) -> _Call:
        call = self._known(index)
        if call is None or self._is_another(call, index, call_id, name):
            call = _Call(index)
            self._calls.append(call)
        return call

    def _known(self, index: object) -> _Call | None:
        if index is None:
            return self._calls[-1] if self._calls else None
        return next((call for call in reversed(self._calls) if call.index == index), None)

    def _is_another(self, call: _Call, index: object, call_id: str, name: str) -> bool:
        if call_id and call.id:
            return call_id != call.id and (bool(name) or index is None)
        return bool(name and call.name) and (name != call.name or call.is_complete)

    def _tell(self) -> Iterator[Event]:
        while self._at < len(self._calls):
            call = self._calls[self._at]
            yield from self._told(call)
            if call is self._calls[-1] or not call.told or not call.is_complete:
                return
            self._at += 1

    def _told(self, call: _Call) -> Iterator[Event]:
        if not call.told and call.name:
            call.told = True
            call.id = call.id or self._make_id()
            yield ToolCallStart(call.id, call.name)
        if call.told and call.untold:
            yield ToolCallDelta("".join(call.untold))
            call.untold.clear()

    def _check(self, call: _Call) -> None:
        arguments = call.arguments
        if call.name and is_object(arguments):
            return
        error = MalformedToolCall(
            f"a call of the tool {call.name!r:.100} has arguments that are no JSON object: {arguments[:500]!r}"
            if call.name
            else f"a tool call has no name; its arguments: {arguments[:500]!r}"
        )
        error.call = ToolCall(call.id, call.name, arguments)
        raise error


def arguments_text(given: object) -> str:
    if isinstance(given, str):
        return given
    return "" if given is None else msgspec.json.encode(given).decode()


def _text(value: object) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)
