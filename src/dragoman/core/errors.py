"""The tree of all errors. Each class has the status, the type and the code for a protocol's error body.

    DragomanError
    ├── BadRequest 400 ── ContextTooLong ── NoRoomForReply
    │                     InvalidConfig, InvalidSchema, InvalidSeal, InvalidStreamId, PreviousResponseNotFound,
    │                     RequestRefused, ResponseCancelled, StreamLimitReached, ThreadUnsupported,
    │                     UnsupportedParameter
    ├── Unauthorized 401
    ├── PermissionDenied 403
    ├── NotFound 404 ── ModelNotFound
    ├── MethodNotAllowed 405
    ├── RequestTimeout 408
    ├── TooLarge 413
    ├── UnsupportedMedia 415
    ├── UpgradeRequired 426
    ├── RateLimited 429 ── TokensLimited, QuotaExhausted, ResourceUnavailable
    ├── HeadersTooLarge 431
    ├── EngineFailed 500 ── CompactionFailed, StepLimitReached
    ├── NotSupported 501
    ├── EngineDied 502
    ├── Unreachable 502
    ├── ServerFailed 502 ── LoopDetected
    ├── BadAnswer 502 ── StreamCutOff, MalformedToolCall, OutputMismatch
    ├── Unavailable 503 ── QueueFull, ModelLoading, ModelFailed, StorageUnavailable
    ├── EngineTimeout 504 ── DeadlineExceeded
    └── AnswerTimeout 504
    ConfigError            errors in a file, a flag or an engine's options, one line each

A message says what is wrong and how to fix it. It is shown to callers, so it contains no paths and no prompts.
`quote` quotes and truncates a caller's value. A message longer than `max_message` is truncated too.

Clients raise the same errors. `answered` is then the server's own answer. The status of the class is the one that
Dragoman would return to its caller.
"""

import re
from typing import TYPE_CHECKING, ClassVar, Self

import msgspec

if TYPE_CHECKING:
    from dragoman.core.request import Message, Part, ToolCall


class Answered(msgspec.Struct, frozen=True):
    """The error that a server returned. In a stream the status is 200."""

    status: int
    body: str = ""
    code: str | None = None
    type: str | None = None
    request_id: str | None = None


MAX_VALUE = 200
"""Characters of a caller's value, or of the path of a field, in an error."""
ENCODE_ERRORS = (OverflowError, TypeError, ValueError, RecursionError, msgspec.MsgspecError)
"""What encoding a value for another process may raise: integers above 64 bits, lone surrogates, deep nesting."""
DECODE_ERRORS = (msgspec.DecodeError, UnicodeError, RecursionError)
"""What decoding JSON or MessagePack may raise: a wrong format or type, invalid UTF-8, deep nesting."""

_VALIDATION_ERROR = re.compile(r"(?P<message>.*?)(?: - at `\$?(?P<path>[^`]*)`)?", re.DOTALL)
_MISSING_FIELD = re.compile(r"Object missing required field `(.*)`")
REQUIRED = "required, but missing"


def parse_validation_error(error: Exception) -> tuple[str, str]:
    """Return the path of the invalid value, such as `.tools[0]`, and what is wrong. msgspec gives both as one text."""
    parsed = _VALIDATION_ERROR.fullmatch(str(error))
    assert parsed is not None
    message, path = parsed["message"], parsed["path"] or ""
    if missing := _MISSING_FIELD.fullmatch(message):
        return f"{path}.{missing[1]}", REQUIRED
    is_word = message[1:2].islower()
    return path, message[:1].lower() + message[1:] if is_word else message


def truncate(text: str, length: int = MAX_VALUE) -> str:
    return text if len(text) <= length else text[:length] + "..."


def quote(value: object) -> str:
    """Quote a caller's value for a message, truncated to `MAX_VALUE`."""
    return repr(truncate(value)) if isinstance(value, str) else truncate(repr(value))


class DragomanError(Exception):
    status: ClassVar[int] = 500
    type: str = "server_error"
    code: ClassVar[str | None] = None
    max_message: ClassVar[int] = 2000
    """Characters."""

    def __init_subclass__(cls, **fields: int | str) -> None:
        """Set `status`, `type` and `code` from the keywords of the class statement. The others are inherited."""
        for name, value in fields.items():
            setattr(cls, name, value)

    def __init__(self, message: str, *, param: str | None = None, retry_after: float | None = None) -> None:
        message = truncate(message, self.max_message)
        super().__init__(message)
        self.message = message
        self.param = None if param is None else truncate(param)
        self.retry_after = retry_after
        self.answered: Answered | None = None
        self.arrived: tuple[Part, ...] = ()
        """The parts of the reply that a client received before the error."""


class BadRequest(DragomanError, status=400, type="invalid_request_error", code="invalid_value"):
    pass


class ContextTooLong(BadRequest, code="context_length_exceeded"):
    """`tokens` is the length of the prompt, `limit` the maximum, if they are known."""

    def __init__(
        self, message: str, *, param: str | None = None, tokens: int | None = None, limit: int | None = None
    ) -> None:
        super().__init__(message, param=param)
        self.tokens = tokens
        self.limit = limit

    @classmethod
    def of(cls, context: int, tokens: int, param: str, *, before: str = "", after: str = "") -> Self:
        """The error for a prompt that leaves no room for a reply in the context, or for an input to embed."""
        kind, limit = ("input", context) if param == "input" else ("prompt", context - 1)
        message = f"this model's maximum context length is {context} tokens, but the {kind} has {before}{tokens}{after}"
        return cls(message, param=param, tokens=tokens, limit=limit)


class NoRoomForReply(ContextTooLong):
    """The prompt fits, but leaves no room for a reply."""


class InvalidConfig(BadRequest, code="invalid_config"):
    """The message names files, so it is shown only to operators."""

    max_message = 100_000


class InvalidSchema(BadRequest, code="invalid_schema"):
    pass


class InvalidSeal(BadRequest, code="invalid_encrypted_content"):
    """Sealed content was changed, or comes from another server."""


class InvalidStreamId(BadRequest, code="invalid_stream_id"):
    pass


class PreviousResponseNotFound(BadRequest, code="previous_response_not_found"):
    pass


class RequestRefused(BadRequest, code="request_refused"):
    """The request has crashed the engine's process before."""


class ResponseCancelled(BadRequest, code="response_cancelled"):
    """The client has cancelled a response before its first event."""


class StreamLimitReached(BadRequest, code="websocket_stream_limit_reached"):
    """A WebSocket has too many streams."""


class ThreadUnsupported(BadRequest, code="thread_unsupported_request"):
    pass


class UnsupportedParameter(BadRequest, code="unsupported_parameter"):
    pass


class Unauthorized(DragomanError, status=401, type="authentication_error", code="invalid_api_key"):
    pass


class PermissionDenied(DragomanError, status=403, type="invalid_request_error", code="insufficient_permissions"):
    pass


class NotFound(DragomanError, status=404, type="invalid_request_error", code="not_found"):
    pass


class ModelNotFound(NotFound, code="model_not_found"):
    pass


class MethodNotAllowed(DragomanError, status=405, type="invalid_request_error", code="method_not_allowed"):
    pass


class RequestTimeout(DragomanError, status=408, type="invalid_request_error", code="request_timeout"):
    pass


class TooLarge(DragomanError, status=413, type="invalid_request_error", code="request_too_large"):
    pass


class UnsupportedMedia(DragomanError, status=415, type="invalid_request_error", code="unsupported_media_type"):
    pass


class UpgradeRequired(DragomanError, status=426, type="invalid_request_error", code="upgrade_required"):
    pass


class RateLimited(DragomanError, status=429, type="requests", code="rate_limit_exceeded"):
    """`type` names the exceeded limit, as OpenAI's clients expect."""


class TokensLimited(RateLimited, type="tokens"):
    pass


class QuotaExhausted(RateLimited, type="insufficient_quota", code="insufficient_quota"):
    """The budget is spent. Retrying does not help."""


class ResourceUnavailable(RateLimited, type="resource_unavailable", code="resource_unavailable"):
    """There was no room for a request with batch priority."""


class HeadersTooLarge(DragomanError, status=431, type="invalid_request_error", code="headers_too_large"):
    pass


class EngineFailed(DragomanError, type="inference_error", code="inference_error"):
    pass


class CompactionFailed(EngineFailed, code="compaction_failed"):
    """The model wrote no summary."""


class StepLimitReached(EngineFailed, code="step_limit_reached"):
    """The model was still calling tools at the step limit. `messages` is the conversation so far."""

    messages: "tuple[Message, ...]" = ()


class NotSupported(DragomanError, status=501, type="not_implemented", code="not_implemented"):
    pass


class EngineDied(DragomanError, status=502, type="inference_error", code="engine_died"):
    pass


class Unreachable(DragomanError, status=502, type="server_error", code="unreachable"):
    """The server did not accept the request, or closed the connection before the first byte of a response."""


class ServerFailed(DragomanError, status=502, type="server_error", code="server_failed"):
    """The server reported an internal error."""


class LoopDetected(ServerFailed, code="loop_detected"):
    """An upstream server forwarded the request back to this model."""


class BadAnswer(DragomanError, status=502, type="server_error", code="bad_answer"):
    """The server's response does not follow its API."""


class StreamCutOff(BadAnswer, code="stream_cut_off"):
    """A stream ended, broke or stalled before the reply was complete."""


class MalformedToolCall(BadAnswer, code="malformed_tool_call"):
    """The arguments of `call` are not a JSON object."""

    call: "ToolCall | None" = None


class OutputMismatch(BadAnswer, code="output_mismatch"):
    """The text of the reply, in `arrived`, does not match the requested output type."""


class Unavailable(DragomanError, status=503, type="server_error", code="unavailable"):
    def __init__(self, message: str, *, param: str | None = None, retry_after: float = 1) -> None:
        super().__init__(message, param=param, retry_after=retry_after)


class QueueFull(Unavailable, code="overloaded"):
    pass


class ModelLoading(Unavailable, code="model_loading"):
    pass


class ModelFailed(Unavailable, code="model_failed"):
    pass


class StorageUnavailable(Unavailable, code="storage_unavailable"):
    pass


class EngineTimeout(DragomanError, status=504, type="inference_error", code="engine_timeout"):
    pass


class DeadlineExceeded(EngineTimeout, code="deadline_exceeded"):
    pass


class AnswerTimeout(DragomanError, status=504, type="server_error", code="answer_timeout"):
    """The server accepted the request but did not respond in time."""


class ConfigError(Exception):
    """One or more errors in a configuration, one line each."""

    def __init__(self, *mistakes: str) -> None:
        super().__init__("\n".join(mistakes))
        self.messages = mistakes


def engine_failure(error: BaseException) -> EngineFailed:
    """Return the client-visible error for an engine's exception. It omits the exception text, which may be private."""
    return EngineFailed(f"the engine failed ({type(error).__name__}); see the server log")


def error_class(name: str) -> type[DragomanError]:
    """Return the error class with this name. Used for errors from other processes."""
    classes = {cls.__name__: cls for cls in _subclasses(DragomanError)}
    return classes.get(name, EngineFailed)


def _subclasses(cls: type[DragomanError]) -> list[type[DragomanError]]:
    return [cls, *(found for child in cls.__subclasses__() for found in _subclasses(child))]
