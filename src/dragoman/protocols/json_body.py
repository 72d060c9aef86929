"""Parses JSON request bodies strictly and reports errors with the path of the field.

Rules
1. The root is an object, at most 64 levels deep, without duplicate keys.
2. Text is valid UTF-8 without unpaired surrogates. Numbers are finite; 1.0 is an integer, 1.5 and true are not.
3. An unknown field is accepted; unless it is null, `unknown_fields` returns it so that it can be reported.

Before a text is decoded, its elements are counted, because a decoded element takes about 70 bytes, even if it is a
single character of the text. The garbage collector visits every array and object, so those count more.

    elements := one for each comma and colon, five for each array and object; strings are skipped

4. The cost of counting depends only on the size of the text. Other threads can run after every megabyte.
5. The count of an invalid text is meaningless; the decoder rejects such text later.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from dragoman.core.choices import describe_choices
from dragoman.core.errors import DECODE_ERRORS, MAX_VALUE, REQUIRED, BadRequest, parse_validation_error, quote, truncate
from dragoman.core.features import Feature
from dragoman.core.request import Asked

MAX_DEPTH = 64
LARGE_BODY = 256 * 1024
"""Bytes. A larger body is decoded in a thread, and no step may hold the GIL for long."""
MAX_UNKNOWN = 16_384
"""Maximum number of unknown fields in one object."""
CONTAINERS = (dict, list)
INVALID_ENUM = "invalid enum value "
MAX_PREFIX = 20
"""Characters that msgspec writes before a value, as in 'Invalid enum value …'."""
CONTAINER_WEIGHT = 5
"""Number of elements that an array or object counts as."""
MAX_ELEMENTS = 1_250_000
"""Enough for 2,048 inputs of 512 token ids, which take less than 100 MB when decoded."""
CHUNK_BYTES = 1024 * 1024
COLON, QUOTE = ord(":"), ord('"')
T = TypeVar("T")
_SURROGATE = re.compile("[\ud800-\udfff]")


def parse(body: bytes) -> dict[str, Any]:
    """Decode a body with msgspec, then check for duplicate keys, which msgspec accepts.

    The strict decoder is many times slower. It runs only to explain what is wrong with a small body.
    """
    try:
        parsed = _fast_decoder.decode(body)
        has_duplicates = _has_duplicate_keys(body, parsed)
    except (ValueError, RecursionError, OverflowError) as error:
        raise _explain(body, error) from None
    if has_duplicates:
        raise _explain(body, None)
    if not isinstance(parsed, dict):
        raise BadRequest("the body must be a JSON object")
    if len(body) <= LARGE_BODY and body.count(b"{") + body.count(b"[") > MAX_DEPTH:
        _count_keys(parsed)
    return parsed


def _has_duplicate_keys(body: bytes, parsed: object) -> bool:
    if len(body) > LARGE_BODY:
        return _count_keys(parsed) != count_keys(body)
    # Without duplicates, encoding the value again gives as many colons as the body has, including escaped ones.
    colons = body.count(b":")
    if b"\\u003" in body:
        escapes = body.replace(rb"\\", b"")
        colons += escapes.count(rb"\u003a") + escapes.count(rb"\u003A")
    return colons != msgspec.json.encode(parsed).count(b":")


def _explain(body: bytes, error: Exception | None) -> BadRequest:
    """Build the error for an invalid body; `error` is None for a duplicate key."""
    if len(body) <= LARGE_BODY:
        try:
            _parse_strictly(body)
        except BadRequest as explained:
            return explained
    if isinstance(error, UnicodeDecodeError):
        return BadRequest(_NOT_UTF8)
    if isinstance(error, RecursionError):
        return BadRequest(_TOO_DEEP)
    reason = "duplicate key in an object" if error is None else parse_validation_error(error)[1]
    return BadRequest(f"the body is not valid JSON: {reason}")


def _parse_strictly(body: bytes) -> Any:
    """Decode with the standard library; raise `BadRequest` with the position of the error."""
    try:
        text = body.decode()
        parsed = _strict_decoder.decode(text)
        has_surrogates = "\\u" in text and _SURROGATE.search(json.dumps(parsed, ensure_ascii=False)) is not None
    except UnicodeDecodeError:
        raise BadRequest(_NOT_UTF8) from None
    except RecursionError:
        raise BadRequest(_TOO_DEEP) from None
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at line {error.lineno}, column {error.colno}"
        raise BadRequest(f"the body is not valid JSON: {reason}") from None
    except ValueError as error:
        reason = "a number has too many digits" if "digits" in str(error) else str(error)
        raise BadRequest(f"the body is not valid JSON: {reason}") from None
    if has_surrogates:
        raise BadRequest("the body contains an unpaired surrogate")
    return parsed


def parse_text(text: str, path: str) -> dict[str, Any]:
    """Parse JSON that a field contains as text, by the same rules."""
    encoded = text.encode()
    if has_more_elements(encoded, MAX_ELEMENTS):
        raise BadRequest(f"{path}: more than {MAX_ELEMENTS} JSON elements", param=path)
    try:
        return parse(encoded)
    except BadRequest as error:
        raise BadRequest(f"{path}: {error.message.replace('the body', 'the text', 1)}", param=path) from None


def is_object(text: str) -> bool:
    """Whether a text is a JSON object. Its values are not decoded."""
    if not text.rstrip().endswith("}"):
        return False
    try:
        msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except DECODE_ERRORS:
        return False
    return True


_NOT_UTF8 = "the body is not valid UTF-8"
_TOO_DEEP = f"the body is nested deeper than {MAX_DEPTH} levels"


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    built = dict(pairs)
    if len(built) != len(pairs):
        seen: set[str] = set()
        duplicate = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"duplicate key {quote(duplicate)} in an object")
    return built


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _parse_number(digits: str) -> int | float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError("a number is too large")
    # A larger number such as 1e300 stays a float; as an integer it would have hundreds of digits.
    return int(value) if value.is_integer() and abs(value) < 2**63 else value


_strict_decoder = json.JSONDecoder(
    object_pairs_hook=_build_object, parse_constant=_reject_constant, parse_float=_parse_number
)
_fast_decoder = msgspec.json.Decoder(float_hook=_parse_number)


def _count_keys(root: object) -> int:
    """Count the keys of all objects. Raises `BadRequest` if the value is nested too deeply."""
    keys = 0
    level: list[Any] = [[root]]
    for _ in range(MAX_DEPTH + 1):
        below: list[Any] = []
        for node in level:
            keys += len(node) if isinstance(node, dict) else 0
            children = node.values() if isinstance(node, dict) else node
            below += [child for child in children if isinstance(child, CONTAINERS)]
        if not below:
            return keys
        level = below
    raise BadRequest(_TOO_DEEP)


def convert(parsed: Any, kind: type[T], path: str = "", *, strict: bool = True) -> T:
    """Convert a value to a type, usually a struct; `path` is the path of the value within the body. Without `strict`,
    text may be a number."""
    try:
        return msgspec.convert(parsed, kind, strict=strict)
    except msgspec.ValidationError as error:
        inner, message = parse_validation_error(error)
        message = truncate(message, MAX_VALUE + MAX_PREFIX)
        if message.startswith(INVALID_ENUM):
            message += describe_choices(kind, inner)
        param = (path + inner).removeprefix(".")
        raise BadRequest(f"{param}: {message}" if param else message, param=param or None) from None


def missing_field(path: str) -> BadRequest:
    return BadRequest(f"{path}: {REQUIRED}", param=path)


def get_path(parsed: dict[str, Any], path: str) -> Any:
    """Return the value of a field or of a nested field such as `thinking.type`; None if it is absent."""
    outer, dot, inner = path.partition(".")
    value = parsed.get(outer)
    return value.get(inner) if dot and value is not None else value


def without_nulls(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def unknown_fields(parsed: dict[str, Any], struct: type[msgspec.Struct]) -> list[str]:
    known = _field_names(struct)
    if parsed.keys() <= known:
        return []
    unknown = [name for name, value in parsed.items() if name not in known and value is not None]
    if len(unknown) > MAX_UNKNOWN:
        raise BadRequest(f"the request has {len(unknown)} unknown fields; at most {MAX_UNKNOWN} are accepted")
    return unknown


def extra_fields(parsed: dict[str, Any], asked: Sequence[Asked]) -> dict[str, Any]:
    """Return the fields of the body that the protocol does not have, for engines that read them."""
    return {one.param: parsed[one.param] for one in asked if one.feature is Feature.UNKNOWN and one.param in parsed}


@cache
def _field_names(struct: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(struct.__struct_encode_fields__)


_NONCHARACTER = "\uffff"
"""JSON does not escape it, and text should not contain it."""


def encode_texts(texts: Sequence[str], separator: bytes) -> bytes:
    """Encode all texts as JSON string contents in one call, joined by `separator`."""
    if len(texts) == 1:
        return msgspec.json.encode(texts[0])[1:-1]
    joined = _NONCHARACTER.join(texts)
    if joined.count(_NONCHARACTER) >= len(texts):
        # A text contains the noncharacter, so encode each text separately.
        return separator.join([msgspec.json.encode(text)[1:-1] for text in texts])
    return msgspec.json.encode(joined)[1:-1].replace(_NONCHARACTER.encode(), separator)


# numpy's operations let other threads run; those of bytes do not.
_weights = np.zeros(256, dtype=np.uint8)
_weights[list(b",:")] = 1
_weights[list(b"[{")] = CONTAINER_WEIGHT


def has_more_elements(text: bytes, limit: int) -> bool:
    if len(text) * CONTAINER_WEIGHT <= limit:
        return False
    # An upper bound that includes the characters inside strings.
    if sum(int(_weights[np.frombuffer(chunk, dtype=np.uint8)].sum()) for chunk in _chunks(text)) <= limit:
        return False
    total = 0
    for chunk in _outside_strings(text):
        total += int(_weights[chunk].sum())
        if total > limit:
            return True
    return False


def count_keys(text: bytes) -> int:
    """Count the keys of all objects of a valid JSON text, including duplicates."""
    return sum(int((chunk == COLON).sum()) for chunk in _outside_strings(text))


def _outside_strings(text: bytes) -> Iterator[NDArray[np.uint8]]:
    """Yield the bytes outside strings, and the closing quotes."""
    in_string = False
    for chunk in _chunks(text):
        # Once escaped backslashes and quotes are removed, every quote begins or ends a string.
        plain = np.frombuffer(chunk.replace(rb"\\", b"").replace(rb"\"", b""), dtype=np.uint8)
        inside = np.logical_xor.accumulate(plain == QUOTE) ^ in_string
        in_string = bool(inside[-1]) if len(inside) else in_string
        yield plain[~inside]


def _chunks(text: bytes) -> Iterator[bytes]:
    """Split the text into chunks without splitting an escape sequence."""
    start = 0
    while start < len(text):
        end = start + CHUNK_BYTES
        chunk = text[start:end]
        if (len(chunk) - len(chunk.rstrip(b"\\"))) % 2:
            chunk += text[end : end + 1]
        yield chunk
        start += len(chunk)
