"""JSON on its way in: parsed once, strictly, and refused with the path of what is wrong.

Rules
1. The root is an object; nesting is at most 64 deep; no key comes twice in an object.
2. Text is valid UTF-8 without lone surrogates. Numbers are finite; 1.0 is an integer, 1.5 and true are not.
3. A field we do not know is not an error; `unknown_fields` names it so that it can be reported.
"""

import json
import math
import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, TypeVar

import msgspec

from dragoman.core.errors import MAX_VALUE, BadRequest, cut, quote
from dragoman.protocols.json_elements import DEFAULT_LIMIT, count_keys, has_more_elements

MAX_DEPTH = 64
LARGE_BODY = 256 * 1024
"""Bytes. A larger body is decoded in a thread, and every step must let other threads run."""
MAX_UNKNOWN = 16_384
"""Unknown fields of one object."""
CONTAINERS = (dict, list)
MAX_WORDS = 20
"""Characters that msgspec writes before a value."""
T = TypeVar("T", bound=msgspec.Struct)
_SURROGATE = re.compile("[\ud800-\udfff]")
_LOCATION = re.compile(r" - at `[^`]*`$")
_ERROR = re.compile(r"^(?P<what>.*?)(?: - at `(?P<path>[^`]*)`)?$", re.DOTALL)


def parse(body: bytes) -> dict[str, Any]:
    """The decoded body. msgspec decodes it: it accepts what the strict decoder accepts, and also repeated keys.

    The strict decoder is many times slower. It only explains what is wrong with a body that is not large.
    """
    try:
        parsed = _reader.decode(body)
        is_whole = _is_whole(body, parsed)
    except (ValueError, RecursionError, OverflowError) as error:
        raise _refusal(body, error) from None
    if not is_whole:
        raise _refusal(body, None)
    if not isinstance(parsed, dict):
        raise BadRequest("the body must be a JSON object")
    if len(body) <= LARGE_BODY and body.count(b"{") + body.count(b"[") > MAX_DEPTH:
        _measure(parsed)
    return parsed


def _is_whole(body: bytes, parsed: object) -> bool:
    """Whether the body has no repeated key."""
    if len(body) > LARGE_BODY:
        return _measure(parsed) == count_keys(body)
    # The decoded value, encoded again, has as many colons as the body, including escaped ones.
    colons = body.count(b":")
    if b"\\u003" in body:
        escapes = body.replace(rb"\\", b"")
        colons += escapes.count(rb"\u003a") + escapes.count(rb"\u003A")
    return colons == msgspec.json.encode(parsed).count(b":")


def _refusal(body: bytes, error: Exception | None) -> BadRequest:
    """The error for a body; `error` is None if a key is repeated."""
    if len(body) <= LARGE_BODY:
        try:
            _parse_strictly(body)
        except BadRequest as explained:
            return explained
    if isinstance(error, UnicodeDecodeError):
        return BadRequest(_NOT_UTF8)
    if isinstance(error, RecursionError):
        return BadRequest(_TOO_DEEP)
    reason = "a key comes twice in one object" if error is None else _LOCATION.sub("", str(error))
    return BadRequest(f"the body is not valid JSON: {reason}")


def _parse_strictly(body: bytes) -> Any:
    """Tells what is wrong, and where."""
    try:
        text = body.decode()
        parsed = _decoder.decode(text)
    except UnicodeDecodeError:
        raise BadRequest(_NOT_UTF8) from None
    except RecursionError:
        raise BadRequest(_TOO_DEEP) from None
    except ValueError as error:
        raise BadRequest(f"the body is not valid JSON: {_reason(error)}") from None
    if "\\u" in text:
        _check_surrogates(parsed)
    return parsed


def parse_text(text: str, path: str) -> dict[str, Any]:
    """The JSON in the text of a field, by the same rules."""
    encoded = text.encode()
    if has_more_elements(encoded, DEFAULT_LIMIT):
        raise BadRequest(f"{path}: it has more than {DEFAULT_LIMIT} JSON elements", param=path)
    try:
        return parse(encoded)
    except BadRequest as error:
        raise BadRequest(f"{path}: {error.message.replace('the body', 'the text', 1)}", param=path) from None


_NOT_UTF8 = "the body is not valid UTF-8"
_TOO_DEEP = f"the body is nested deeper than {MAX_DEPTH} levels"


def _reason(error: ValueError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at line {error.lineno}, column {error.colno}"
    return "a number has too many digits" if "digits" in str(error) else str(error)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {quote(twice)} comes twice in one object")
    return made


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _number(digits: str) -> int | float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError("a number is too large")
    # A larger one, such as 1e300, stays a float: as an integer it would have hundreds of digits.
    return int(value) if value.is_integer() and abs(value) < 2**63 else value


_decoder = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant, parse_float=_number)
_reader = msgspec.json.Decoder(float_hook=_number)


def _measure(root: object) -> int:
    """The number of keys in all objects. Raises BadRequest if the value is nested too deeply."""
    keys, level = 0, [root]
    for _ in range(MAX_DEPTH):
        below: list[object] = []
        for node in level:
            keys += len(node) if isinstance(node, dict) else 0
            below += [child for child in _children(node) if isinstance(child, CONTAINERS)]
        if not below:
            return keys
        level = below
    raise BadRequest(_TOO_DEEP)


def _children(node: object) -> Iterable[object]:
    if isinstance(node, dict):
        return node.values()
    return node if isinstance(node, list) else ()


def _check_surrogates(root: object) -> None:
    pending = [root]
    while pending:
        node = pending.pop()
        if isinstance(node, str) and _SURROGATE.search(node):
            raise BadRequest("the body contains half of a surrogate pair")
        if isinstance(node, dict):
            pending += node
        pending += _children(node)


def convert(parsed: dict[str, Any], shape: type[T], at: str = "") -> T:
    """The object as a value; `at` is the path of what is not the body itself."""
    try:
        return msgspec.convert(parsed, shape)
    except msgspec.ValidationError as error:
        raise bad_field(error, at) from None


def missing(path: str) -> BadRequest:
    return BadRequest(f"{path}: required, but missing", param=path)


def bad_field(error: msgspec.ValidationError, at: str) -> BadRequest:
    """What msgspec found inside the field `at`, with the path of it."""
    words = str(error)
    found = _ERROR.match(words)
    what, path = (found["what"], found["path"]) if found else (words, None)
    # msgspec quotes the value after a few words: 'Invalid enum value …'.
    what = cut(what, MAX_VALUE + MAX_WORDS)
    missing = re.search(r"missing required field `(.*)`", what)
    param = (at + (path or "$").removeprefix("$")).removeprefix(".")
    if missing:
        param = f"{param}.{missing[1]}".lstrip(".")
        what = "required, but missing"
    return BadRequest(f"{param}: {what[0].lower()}{what[1:]}" if param else what, param=param or None)


def at(parsed: dict[str, Any], path: str) -> Any:
    """What a field has, or a field of a field (`thinking.type`); None where there is nothing."""
    outer, dot, inner = path.partition(".")
    value = parsed.get(outer)
    return value.get(inner) if dot and value is not None else value


def unknown_fields(parsed: dict[str, Any], shape: type[msgspec.Struct]) -> list[str]:
    known = _fields(shape)
    unknown = [name for name in parsed if name not in known]
    if len(unknown) > MAX_UNKNOWN:
        raise BadRequest(f"the request has {len(unknown)} unknown fields; at most {MAX_UNKNOWN} are accepted")
    return unknown


@cache
def _fields(shape: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(shape.__struct_encode_fields__)


SEPARATOR = "\uffff"
"""No character, and what JSON does not escape."""


def between_texts(texts: Sequence[str], between: bytes) -> bytes:
    """The insides of the JSON strings of all texts, encoded at once, with the same bytes between each two."""
    if len(texts) == 1:
        return msgspec.json.encode(texts[0])[1:-1]
    joined = SEPARATOR.join(texts)
    if joined.count(SEPARATOR) >= len(texts):
        # Somebody sent one; then each text has to be encoded by itself.
        return between.join([msgspec.json.encode(text)[1:-1] for text in texts])
    return msgspec.json.encode(joined)[1:-1].replace(SEPARATOR.encode(), between)
