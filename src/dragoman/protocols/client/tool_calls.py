"""Assembles the tool calls of a reply from the pieces that a server sends.

    piece := {index?, id?, function: {name?, arguments?}}           arguments: JSON text, a piece of it, or an object

Rules
1. A piece belongs to the call with its index; without an index, to the latest call. Two things start another call:
   a different id together with a name or without an index (some servers change the id within a call), and a name,
   unless the call has the same name and incomplete arguments.
2. Events describe one call after the other. The events of a call wait until the arguments of the previous call are
   complete.
3. A call without an id gets one. A call without arguments gets an empty object.
4. Arguments that are not a JSON object at the end raise `MalformedToolCall`, unless the reply was cut short.
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
    is_started = False
    """Whether `ToolCallStart` has been returned."""

    def __init__(self, index: object) -> None:
        self.index = index
        self.pieces: list[str] = []
        self.pending: list[str] = []

    @property
    def arguments(self) -> str:
        # Joined in place, so that the next access is cheap.
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


class ToolCallAssembler:
    def __init__(self, make_id: NewId = new_id) -> None:
        self._make_id = make_id
        self._calls: list[_Call] = []
        self._current = 0
        """The index of the call whose pieces are returned as they arrive."""

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def is_open(self) -> bool:
        """Whether a call may still receive arguments."""
        active = self._calls[self._current :]
        return bool(self._calls) and not all(call.is_started and call.is_complete for call in active)

    def add(self, piece: Mapping[str, Any]) -> Iterator[Event]:
        function = piece.get("function")
        if not isinstance(function, dict):
            function = piece
        name, arguments = _text(function.get("name")), arguments_text(function.get("arguments"))
        yield from self.add_piece(piece.get("index"), _text(piece.get("id")), name, arguments)

    def add_piece(self, index: object, call_id: str, name: str, arguments: str) -> Iterator[Event]:
        call = self._find(index, call_id, name)
        call.id = call.id or call_id
        call.name = call.name or name
        if arguments:
            call.pieces.append(arguments)
            call.pending.append(arguments)
        yield from self._flush()

    def end(self, cut_short: bool, check: bool = True) -> Iterator[Event]:
        """Return the remaining events after the last piece."""
        for call in self._calls[self._current :]:
            yield from self._flush_call(call)
            if not call.arguments.strip() and not cut_short:
                call.pieces.append("{}")
                yield ToolCallDelta("{}")
        self._current = len(self._calls)
        if check and not cut_short:
            for call in self._calls:
                self._check(call)

    def _find(self, index: object, call_id: str, name: str) -> _Call:
        call = self._find_existing(index)
        if call is None or self._starts_new(call, index, call_id, name):
            call = _Call(index)
            self._calls.append(call)
        return call

    def _find_existing(self, index: object) -> _Call | None:
        if index is None:
            return self._calls[-1] if self._calls else None
        return next((call for call in reversed(self._calls) if call.index == index), None)

    def _starts_new(self, call: _Call, index: object, call_id: str, name: str) -> bool:
        if call_id and call.id:
            return call_id != call.id and (bool(name) or index is None)
        return bool(name and call.name) and (name != call.name or call.is_complete)

    def _flush(self) -> Iterator[Event]:
        while self._current < len(self._calls):
            call = self._calls[self._current]
            yield from self._flush_call(call)
            if call is self._calls[-1] or not call.is_started or not call.is_complete:
                return
            self._current += 1

    def _flush_call(self, call: _Call) -> Iterator[Event]:
        if not call.is_started and call.name:
            call.is_started = True
            call.id = call.id or self._make_id()
            yield ToolCallStart(call.id, call.name)
        if call.is_started and call.pending:
            yield ToolCallDelta("".join(call.pending))
            call.pending.clear()

    def _check(self, call: _Call) -> None:
        arguments = call.arguments
        if call.name and is_object(arguments):
            return
        error = MalformedToolCall(
            f"the arguments of a call to {call.name!r:.100} are not a JSON object: {arguments[:500]!r}"
            if call.name
            else f"a tool call has no name; its arguments: {arguments[:500]!r}"
        )
        error.call = ToolCall(call.id, call.name, arguments)
        raise error


def arguments_text(arguments: object) -> str:
    if isinstance(arguments, str):
        return arguments
    return "" if arguments is None else msgspec.json.encode(arguments).decode()


def _text(value: object) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)
