"""Reads a form with one file while it arrives. The file's content goes to the caller; the fields are kept.

    content type := "multipart/form-data; boundary=" 1 to 70 printable ASCII characters
    form         := (field | file)*          in any order

Rules
1. `feed` returns what has arrived of the file's content. Nothing of it is kept.
2. The number of parts, their headers and the fields are bounded. Each part may be sent once.
3. Of a file's name only the last component of a path is kept. Without one, the name is made from the media type.
"""

import mimetypes
import re
import unicodedata
from typing import Any

from multipart import MultipartError, PushMultipartParser, parse_options_header

from dragoman.core.errors import BadRequest, TooLarge, UnsupportedMedia, quote
from dragoman.protocols.files import BINARY
from dragoman.protocols.json_body import missing_field

FORM_DATA = "multipart/form-data"
MAX_PARTS = 16
MAX_FIELD = 1024
"""Bytes."""
MAX_NAME = 500
"""Characters of a file's name."""
FORM_BYTES = 128 * 1024
"""Room for everything of a form but its file: as many parts as are allowed, with their headers and values."""
_BOUNDARY = re.compile("[ -~]{1,70}")
_MEDIA_TYPE = re.compile(r"[a-z0-9!#$&^_.+-]{1,127}/[a-z0-9!#$&^_.+-]{1,127}")
_NESTED = re.compile(r"(\w+)\[(\w+)\]", re.ASCII)


class FormReader:
    """`field` is the name of the part with the file; `limit_name` is the setting that limits its size."""

    def __init__(self, content_type: bytes, field: str, max_bytes: int, limit_name: str) -> None:
        media, options = parse_options_header(content_type.decode("latin-1"))
        boundary = options.get("boundary", "")
        if media != FORM_DATA:
            raise UnsupportedMedia(f"send the file as a form, with the header 'content-type: {FORM_DATA}'")
        if not _BOUNDARY.fullmatch(boundary):
            raise BadRequest("the content-type header must have a boundary of 1 to 70 ASCII characters")
        self._field = field
        self._max_bytes = max_bytes
        self._limit_name = limit_name
        self._parser = PushMultipartParser(boundary, max_segment_count=MAX_PARTS)
        self._names: set[str] = set()
        self._is_file = False
        self._value = bytearray()
        self._size = 0
        self.fields: dict[str, Any] = {}
        """Values as text. `outer[inner]` is nested: `{outer: {inner: value}}`."""
        self.file_name = ""
        self.media_type = BINARY

    def feed(self, data: bytes) -> bytes:
        """Read more of the form; return what it contains of the file."""
        content: list[bytes] = []
        try:
            for event in self._parser.parse(data) if data else ():
                if event is None:
                    self._end_part()
                elif not isinstance(event, bytes):
                    self._begin_part(event)
                elif self._is_file:
                    content.append(event)
                else:
                    self._extend_field(event)
        except MultipartError as error:
            raise _malformed(error) from error
        joined = content[0] if len(content) == 1 else b"".join(content)
        self._size += len(joined)
        if self._size > self._max_bytes:
            raise self.too_large()
        return joined

    def end(self) -> None:
        """Check that the form is complete."""
        try:
            self._parser.close()
        except MultipartError as error:
            raise _malformed(error) from error
        if self._field not in self._names:
            raise missing_field(self._field)

    def too_large(self) -> TooLarge:
        limit = f"{self._max_bytes} bytes (`{self._limit_name}` of this server)"
        return TooLarge(f"{self._field}: larger than {limit}", param=self._field)

    def _begin_part(self, part: Any) -> None:
        self._name = name = part.name
        if not name:
            raise BadRequest("a part of the form has no name")
        if name in self._names:
            raise BadRequest(f"{quote(name)}: sent more than once", param=name)
        self._names.add(name)
        self._is_file = name == self._field
        self._value = bytearray()
        if self._is_file:
            self.file_name, self.media_type = self._describe(part.filename or "", part.content_type or "")

    def _describe(self, sent_name: str, sent_type: str) -> tuple[str, str]:
        """The name and the media type of the file."""
        name = sent_name.replace("\\", "/").rpartition("/")[2].strip()
        if any(unicodedata.category(character) == "Cc" for character in name):
            raise BadRequest(f"{self._field}: the file name contains control characters", param=self._field)
        if len(name) > MAX_NAME:
            raise BadRequest(f"{self._field}: the file name is longer than {MAX_NAME} characters", param=self._field)
        media_type = sent_type if _MEDIA_TYPE.fullmatch(sent_type) else BINARY
        if name in ("", ".", ".."):
            name = f"unnamed{mimetypes.guess_extension(media_type) or ''}"
        elif media_type == BINARY:
            media_type = mimetypes.guess_type(name)[0] or BINARY
        return name, media_type

    def _extend_field(self, data: bytes) -> None:
        self._value += data
        if len(self._value) > MAX_FIELD:
            raise BadRequest(f"{quote(self._name)}: longer than {MAX_FIELD} bytes", param=self._name)

    def _end_part(self) -> None:
        if self._is_file:
            return
        try:
            value = self._value.decode()
        except UnicodeDecodeError as error:
            raise BadRequest(f"{quote(self._name)}: not valid UTF-8", param=self._name) from error
        nested = _NESTED.fullmatch(self._name)
        inner = None if nested is None else self.fields.setdefault(nested[1], {})
        if nested is not None and isinstance(inner, dict):
            inner[nested[2]] = value
        else:
            self.fields[self._name] = value


def _malformed(error: MultipartError) -> BadRequest:
    reason = str(error.args[0])
    return BadRequest(f"the form is malformed: {reason[:1].lower()}{reason[1:]}")
