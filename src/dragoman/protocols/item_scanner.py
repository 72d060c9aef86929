"""Reads a JSON object with one long array while it arrives, and returns the objects of the array one by one.

    body := {"requests": [item, item, ...], other fields}

Rules
1. Memory holds one item, and the rest of the body with each item replaced by `{}`. Both are bounded.
2. The scanner only finds where items begin and end. The rest of the body is parsed like any other body at the end.
3. An item is an object directly in the array. Any other element is an error.
"""

import re
from typing import Any

from dragoman.core.errors import BadRequest, TooLarge
from dragoman.protocols import json_body

MAX_REST = 1024 * 1024
"""Bytes of the body without its items, and without the spaces between them."""
TAIL = 1024
"""Bytes in which the name of the array must be."""
_OUTSIDE = re.compile(rb'["{}\[\]]')
_IN_STRING = re.compile(rb'["\\]')
_SPACES = re.compile(rb"[ \t\r\n]+")
QUOTE, BACKSLASH = ord('"'), ord("\\")
OPENING, OBJECT, ARRAY = b"{[", ord("{"), ord("[")
ITEM_DEPTH = 2
"""The depth of the array's elements: in the body, in the array."""


class ItemScanner:
    """`field` is the name of the array. An item of more than `max_bytes` is refused."""

    def __init__(self, field: str, max_bytes: int) -> None:
        self._field = field
        self._opening = re.compile(rb'(?<!\\)"%b"[ \t\r\n]*:[ \t\r\n]*\[$' % field.encode())
        self._max_bytes = max_bytes
        self._rest = bytearray()
        self._item = bytearray()
        self._depth = 0
        self._in_array = False
        self._in_item = False
        self._in_string = False
        self._is_escaped = False
        self.count = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Read more of the body; return the items that are complete."""
        items: list[bytes] = []
        at, kept = 0, 0
        while (found := self._find(data, at)) is not None:
            at = found + 1
            byte = data[found]
            if self._in_string:
                self._in_string = byte != QUOTE
                self._is_escaped = byte == BACKSLASH
            elif byte == QUOTE:
                self._in_string = True
            elif byte in OPENING:
                if byte == OBJECT and self._in_array and self._depth == ITEM_DEPTH:
                    self._keep(data[kept:found])
                    kept, self._in_item = found, True
                self._depth += 1
                if byte == ARRAY and self._depth == ITEM_DEPTH:
                    self._keep(data[kept:at])
                    kept, self._in_array = at, self._opening.search(self._rest[-TAIL:]) is not None
            else:
                self._depth -= 1
                if self._in_item and self._depth == ITEM_DEPTH:
                    self._keep(data[kept:at])
                    kept = at
                    items.append(self._end_item())
                elif self._in_array and self._depth < ITEM_DEPTH:
                    self._keep(data[kept:at])
                    kept, self._in_array = at, False
        self._keep(data[kept:])
        return items

    def _find(self, data: bytes, at: int) -> int | None:
        """The next byte that matters."""
        if self._is_escaped and at < len(data):
            self._is_escaped = False
            at += 1
        found = (_IN_STRING if self._in_string else _OUTSIDE).search(data, at)
        return None if found is None else found.start()

    def _end_item(self) -> bytes:
        item, self._item, self._in_item = bytes(self._item), bytearray(), False
        self._rest += b"{}"
        self.count += 1
        return item

    def _keep(self, data: bytes) -> None:
        if self._in_item:
            self._item += data
            if len(self._item) > self._max_bytes:
                path = f"{self._field}[{self.count}]"
                limit = f"{self._max_bytes} bytes (`limits.body_bytes` of this server)"
                raise TooLarge(f"{path}: larger than {limit}", param=path)
            return
        # Between the items of the array there are only spaces and commas.
        self._rest += _SPACES.sub(b" ", data) if self._in_array else data
        if len(self._rest) > MAX_REST:
            raise TooLarge(f"the fields beside {self._field!r} are larger than {MAX_REST} bytes")

    def end(self) -> dict[str, Any]:
        """Check that the body is complete; return its other fields."""
        fields = json_body.parse(bytes(self._rest))
        if self._field not in fields:
            raise json_body.missing_field(self._field)
        array = fields.pop(self._field)
        if not isinstance(array, list):
            raise BadRequest(f"{self._field}: expected an array", param=self._field)
        if len(array) < self.count:
            raise BadRequest(f"{self._field}: sent more than once", param=self._field)
        for index, element in enumerate(array):
            if element != {}:
                path = f"{self._field}[{index}]"
                raise BadRequest(f"{path}: expected an object", param=path)
        if len(array) > self.count:
            raise BadRequest(f"{self._field}: write the name of this field without escapes", param=self._field)
        return fields
