"""The lines of batches: of their inputs, and of their results.

    input    openai     {"custom_id", "method": "POST", "url": the endpoint of the batch, "body": {...}}
             anthropic  {"custom_id", "params": {...}}
    result   openai     {"id", "custom_id", "response": {"status_code", "request_id", "body"} | null, "error" | null}
             anthropic  {"custom_id", "result": {"type": succeeded | errored | canceled | expired, ...}}

Rules
1. An input is read in pieces. Memory holds one line, and a digest of every `custom_id`.
2. Lines are counted from 1, as in an editor. Empty lines count, and are skipped.
3. A line that cannot run has an error. The others run.
4. `prefix` orders lines: those whose prompts begin alike are neighbours, so that they share a cached prefix. It is a
   sequence of digests of longer and longer beginnings of the prompt.
"""

from collections.abc import Iterator
from hashlib import blake2b
from typing import Annotated, Any, Literal

import msgspec

from dragoman.core.errors import DECODE_ERRORS, REQUIRED, BadRequest, parse_validation_error, quote, truncate
from dragoman.core.events import Usage
from dragoman.protocols.batches import MAX_LINES, Api, InputError
from dragoman.protocols.errors import encode_anthropic_error

OPENAI_NAME, ANTHROPIC_NAME = 512, 64
"""Characters of a `custom_id`."""
MAX_NUMBER = 2 * MAX_LINES
"""Lines of an input, with empty ones."""
PREFIX_SIZES = tuple(256 * 2**step for step in range(9))
"""Bytes of the beginnings of a prompt that are compared."""
DIGEST_BYTES = 4
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
ABSENT = msgspec.Raw(b"")
LineState = Literal["waiting", "succeeded", "errored"]


class InputLine(msgspec.Struct, frozen=True):
    """A line of an input, located by `begin` and `length`. `custom_id` is None if it is missing or not usable."""

    number: int
    begin: int
    length: int
    custom_id: str | None = None
    prefix: bytes = b""
    error: InputError | None = None


class LineResult(msgspec.Struct, frozen=True, array_like=True):
    """The final reply to a line. `status` is 0 if an error took its place."""

    status: int = 0
    request_id: str = ""
    body: bytes = b""
    code: str = ""
    message: str = ""
    custom_id: str | None = None
    """Of a line of the input that has an error."""

    @property
    def state(self) -> LineState:
        return "succeeded" if 200 <= self.status < 300 else "errored"


class _OpenAILine(msgspec.Struct):
    custom_id: Annotated[str, msgspec.Meta(min_length=1, max_length=OPENAI_NAME)]
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


class _AnthropicLine(msgspec.Struct):
    custom_id: Annotated[str, msgspec.Meta(pattern=rf"^[a-zA-Z0-9_-]{{1,{ANTHROPIC_NAME}}}$")]
    params: msgspec.Raw


class _Named(msgspec.Struct):
    custom_id: str | None = None


class _Body(msgspec.Struct):
    """The fields of a request that matter to a batch: those that begin the prompt, and those that cannot work."""

    model: str | None = None
    stream: bool | None = None
    background: bool | None = None
    tools: msgspec.Raw = ABSENT
    system: msgspec.Raw = ABSENT
    instructions: msgspec.Raw = ABSENT
    messages: msgspec.Raw = ABSENT
    input: msgspec.Raw = ABSENT
    prompt: msgspec.Raw = ABSENT

    def prefix(self) -> bytes:
        parts = (self.tools, self.system, self.instructions, self.messages, self.input, self.prompt)
        text = b"\0".join(bytes(part) for part in parts)
        hashed, begin = blake2b((self.model or "").encode(), digest_size=DIGEST_BYTES), 0
        digests = [hashed.digest()]
        for end in PREFIX_SIZES:
            hashed.update(text[begin:end])
            digests.append(hashed.digest())
            begin = end
        return b"".join(digests)


_decoders: dict[Api, msgspec.json.Decoder[Any]] = {
    "openai": msgspec.json.Decoder(_OpenAILine),
    "anthropic": msgspec.json.Decoder(_AnthropicLine),
}
_named, _body = msgspec.json.Decoder(_Named), msgspec.json.Decoder(_Body)


_EXPECTED: dict[Api, dict[str, str]] = {
    "openai": {
        ".custom_id": f"expected a string of 1 to {OPENAI_NAME} characters",
        ".method": "expected 'POST', the only method that is possible",
    },
    "anthropic": {".custom_id": f"expected 1 to {ANTHROPIC_NAME} letters, digits, '_' or '-'"},
}
NOT_UTF8 = "the line is not valid UTF-8"


def _parse_field_error(api: Api, error: Exception) -> tuple[str, str]:
    """Return the path of the invalid field of a line, and what is wrong."""
    path, message = parse_validation_error(error)
    return path, message if message == REQUIRED else _EXPECTED[api].get(path, message)


class TooManyLines(BadRequest):
    pass


class LineReader:
    """Reads an input. A line with more than `max_bytes` has an error, and is not kept."""

    def __init__(self, api: Api, endpoint: str, max_bytes: int) -> None:
        self._api = api
        self._endpoint = endpoint
        self._max_bytes = max_bytes
        self._names: set[bytes] = set()
        self._line = bytearray()
        self._length = 0
        self._begin = 0
        self._number = 1
        self.count = 0

    def feed(self, data: bytes) -> list[InputLine]:
        """Read more of the input; return the lines that are complete. Raises TooManyLines."""
        *complete, rest = data.split(b"\n")
        lines: list[InputLine] = []
        for part in complete:
            self._extend(part)
            lines += self._end_line()
            self._begin += self._length + 1
            self._number += 1
            self._line, self._length = bytearray(), 0
        self._extend(rest)
        return lines

    def end(self) -> list[InputLine]:
        """Return the last line, if it does not end in a line break."""
        return list(self._end_line())

    def _extend(self, part: bytes) -> None:
        if self._number > MAX_NUMBER:
            raise TooManyLines(f"the input has more than {MAX_NUMBER} lines, with empty ones")
        self._length += len(part)
        if self._length <= self._max_bytes:
            self._line += part
        else:
            self._line.clear()

    def _end_line(self) -> Iterator[InputLine]:
        is_too_long = self._length > self._max_bytes
        if not is_too_long and not self._line.strip():
            return
        self.count += 1
        if self.count > MAX_LINES:
            raise TooManyLines(f"the input has more than {MAX_LINES} lines")
        line = InputLine(self._number, self._begin, self._length)
        if is_too_long:
            message = f"longer than {self._max_bytes} bytes (`limits.body_bytes` of this server)"
            yield self._refuse(line, "line_too_long", message)
            return
        text = bytes(self._line)
        if self._number == 1 and text.startswith(BYTE_ORDER_MARK):
            skipped = len(BYTE_ORDER_MARK)
            line, text = InputLine(1, skipped, self._length - skipped), text[skipped:]
        yield self._check(line, text)

    def _check(self, line: InputLine, text: bytes) -> InputLine:
        try:
            parsed = _decoders[self._api].decode(text)
        except DECODE_ERRORS as error:
            named = msgspec.structs.replace(line, custom_id=_find_name(text))
            if isinstance(error, msgspec.ValidationError):
                path, message = _parse_field_error(self._api, error)
                return self._refuse(named, "invalid_request", message, path.removeprefix("."))
            reason = NOT_UTF8 if isinstance(error, UnicodeError) else f"not valid JSON: {truncate(str(error))}"
            return self._refuse(named, "invalid_json_line", reason)
        line = msgspec.structs.replace(line, custom_id=parsed.custom_id)
        if isinstance(parsed, _OpenAILine) and parsed.url != self._endpoint:
            message = f"{quote(parsed.url)} is not the endpoint of this batch, {self._endpoint}"
            return self._refuse(line, "mismatched_url", message, "url")
        name = _digest(parsed.custom_id)
        if name in self._names:
            return self._refuse(
                line,
                "duplicate_custom_id",
                f"{quote(parsed.custom_id)} is already used by an earlier line",
                "custom_id",
            )
        field = "body" if self._api == "openai" else "params"
        try:
            body = _body.decode(_raw_body(parsed))
        except DECODE_ERRORS as error:
            path, message = ("", NOT_UTF8) if isinstance(error, UnicodeError) else parse_validation_error(error)
            return self._refuse(line, "invalid_request", message, field + path)
        for name_of_field in ("stream", "background"):
            if getattr(body, name_of_field):
                message = "not supported in a batch; leave it out"
                return self._refuse(line, "invalid_request", message, f"{field}.{name_of_field}")
        self._names.add(name)
        return msgspec.structs.replace(line, prefix=body.prefix())

    def _refuse(self, line: InputLine, code: str, message: str, param: str | None = None) -> InputLine:
        text = f"line {line.number}: {f'{param}: ' if param else ''}{message}"
        return msgspec.structs.replace(line, error=InputError(code, text, line.number, param or None))


class AnthropicLines:
    """Makes the lines of an input from the elements of the array `field` in a body."""

    def __init__(self, field: str) -> None:
        self._field = field
        self._names: set[bytes] = set()
        self.count = 0

    def add(self, item: bytes) -> bytes:
        """Return the line of the next element. Raises a BadRequest if its `custom_id` is not usable."""
        path = f"{self._field}[{self.count}]"
        if self.count == MAX_LINES:
            raise BadRequest(f"{self._field}: more than {MAX_LINES} requests", param=self._field)
        try:
            name = _decoders["anthropic"].decode(item).custom_id
        except DECODE_ERRORS as error:
            inner, message = _parse_field_error("anthropic", error)
            raise BadRequest(f"{path}{inner}: {message}", param=f"{path}{inner}") from None
        digest = _digest(name)
        if digest in self._names:
            path = f"{path}.custom_id"
            raise BadRequest(f"{path}: {quote(name)} is already used by an earlier request", param=path)
        self._names.add(digest)
        self.count += 1
        return _one_line(item) + b"\n"


def _digest(name: str) -> bytes:
    return blake2b(name.encode(), digest_size=16).digest()


def _raw_body(parsed: Any) -> msgspec.Raw:
    body: msgspec.Raw = parsed.body if isinstance(parsed, _OpenAILine) else parsed.params
    return body


def _find_name(text: bytes) -> str | None:
    try:
        return _named.decode(text).custom_id
    except DECODE_ERRORS:
        return None


def request_body(api: Api, line: bytes) -> bytes:
    """The body of the request of a line that was read without an error."""
    return bytes(_raw_body(_decoders[api].decode(line)))


def refused_result(line: InputLine) -> LineResult:
    """The result of a line with an error."""
    assert line.error is not None
    return LineResult(code=line.error.code, message=line.error.message, custom_id=line.custom_id)


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: int = 0
    reasoning_tokens: int = 0


_NO_DETAILS = _Details()


class _Usage(msgspec.Struct, frozen=True):
    """The usage of any of the APIs."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class _Reply(msgspec.Struct, frozen=True):
    usage: _Usage | None = None


_reply = msgspec.json.Decoder(_Reply)


def read_usage(body: bytes) -> Usage:
    """The tokens of a reply of any of the endpoints."""
    try:
        usage = _reply.decode(body).usage or _Usage()
    except DECODE_ERRORS:
        return Usage()
    # Anthropic's count of input tokens does not contain those of the cache.
    read, written = usage.cache_read_input_tokens or 0, usage.cache_creation_input_tokens or 0
    given = usage.prompt_tokens_details or usage.input_tokens_details or _NO_DETAILS
    produced = usage.completion_tokens_details or usage.output_tokens_details or _NO_DETAILS
    return Usage(
        prompt=usage.prompt_tokens + usage.input_tokens + read + written,
        completion=usage.completion_tokens + usage.output_tokens,
        cached=given.cached_tokens + read,
        reasoning=produced.reasoning_tokens,
    )


class ResultLine(msgspec.Struct, frozen=True):
    """A line of the results. `result` is None if the line was cancelled or has expired."""

    number: int
    custom_id: str | None
    result: LineResult | None


UNANSWERED = {
    "cancelled": ("batch_cancelled", "This request was not executed before the batch was cancelled."),
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
}


def encode_openai_result(batch_id: str, line: ResultLine, outcome: str) -> bytes:
    """A line of the output file or of the error file. `outcome` is the last state of the batch."""
    result, response, error = line.result, None, None
    if result is None:
        code, message = UNANSWERED[outcome]
        error = {"code": code, "message": message}
    elif result.status:
        body = msgspec.Raw(_one_line(result.body))
        response = {"status_code": result.status, "request_id": result.request_id, "body": body}
    else:
        error = {"code": result.code, "message": result.message}
    request = f"batch_req_{batch_id.rpartition('_')[2]}_{line.number}"
    encoded = {"id": request, "custom_id": line.custom_id, "response": response, "error": error}
    return msgspec.json.encode(encoded) + b"\n"


def encode_anthropic_result(line: ResultLine, outcome: str) -> bytes:
    result, encoded = line.result, dict[str, Any]()
    if result is None:
        encoded["type"] = "canceled" if outcome == "cancelled" else "expired"
    elif result.state == "succeeded":
        encoded |= {"type": "succeeded", "message": msgspec.Raw(_one_line(result.body))}
    elif result.status:
        encoded |= {"type": "errored", "error": msgspec.Raw(_one_line(result.body))}
    else:
        request = f"req_{line.number}"
        encoded |= {"type": "errored", "error": encode_anthropic_error(BadRequest(result.message), request)}
    return msgspec.json.encode({"custom_id": line.custom_id, "result": encoded}) + b"\n"


def _one_line(body: bytes) -> bytes:
    """JSON without line breaks, which it has only between values."""
    return body.replace(b"\r", b" ").replace(b"\n", b" ") if b"\n" in body or b"\r" in body else body
