"""The tree of all errors. Each class has the status, the type and the code for a protocol's error body.

    DragomanError
    ├── BadRequest 400 ── ContextTooLong ── NoRoomForReply
    │                     InvalidConfig, InvalidSchema, RequestRefused, ThreadUnsupported, UnsupportedParameter
    ├── Unauthorized 401
    ├── PermissionDenied 403
    ├── NotFound 404 ── ModelNotFound, PreviousResponseNotFound
    ├── MethodNotAllowed 405
    ├── RequestTimeout 408
    ├── TooLarge 413
    ├── UnsupportedMedia 415
    ├── UpgradeRequired 426
    ├── RateLimited 429 ── TokensLimited, QuotaExhausted
    ├── HeadersTooLarge 431
    ├── EngineFailed 500 ── StepLimitReached
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

from typing import TYPE_CHECKING, ClassVar

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


def truncate(text: str, length: int = MAX_VALUE) -> str:
    return text if len(text) <= length else text[:length] + "..."


def quote(value: object) -> str:
    """Quote a caller's value for a message, truncated to `MAX_VALUE`."""
    return repr(truncate(value)) if isinstance(value, str) else truncate(repr(value))


class DragomanError(Exception):
    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None
    max_message: ClassVar[int] = 2000
    """Characters."""

    def __init__(self, message: str, *, param: str | None = None, retry_after: float | None = None) -> None:
        message = truncate(message, self.max_message)
        super().__init__(message)
        self.message = message
        self.param = None if param is None else truncate(param)
        self.retry_after = retry_after
        self.answered: Answered | None = None
        self.arrived: tuple[Part, ...] = ()
        """The parts of the reply that a client received before the error."""


class BadRequest(DragomanError):
    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class ContextTooLong(BadRequest):
    """`tokens` is the length of the prompt, `limit` the maximum, if they are known."""

    code = "context_length_exceeded"

    def __init__(
        self, message: str, *, param: str | None = None, tokens: int | None = None, limit: int | None = None
    ) -> None:
        super().__init__(message, param=param)
        self.tokens = tokens
        self.limit = limit


class NoRoomForReply(ContextTooLong):
    """The prompt fits, but leaves no room for a reply."""


class InvalidConfig(BadRequest):
    """The message names files, so it is shown only to operators."""

    code = "invalid_config"
    max_message = 100_000


class InvalidSchema(BadRequest):
    code = "invalid_schema"


class RequestRefused(BadRequest):
    """The request has crashed the engine's process before."""

    code = "request_refused"


class ThreadUnsupported(BadRequest):
    code = "thread_unsupported_request"


class UnsupportedParameter(BadRequest):
    code = "unsupported_parameter"


class Unauthorized(DragomanError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class PermissionDenied(DragomanError):
    status = 403
    type = "invalid_request_error"
    code = "insufficient_permissions"


class NotFound(DragomanError):
    status = 404
    type = "invalid_request_error"
    code = "not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class PreviousResponseNotFound(NotFound):
    code = "previous_response_not_found"


class MethodNotAllowed(DragomanError):
    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class RequestTimeout(DragomanError):
    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class TooLarge(DragomanError):
    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class UnsupportedMedia(DragomanError):
    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


class UpgradeRequired(DragomanError):
    status = 426
    type = "invalid_request_error"
    code = "upgrade_required"


class RateLimited(DragomanError):
    """`type` names the exceeded limit, as OpenAI's clients expect."""

    status = 429
    type = "requests"
    code = "rate_limit_exceeded"


class TokensLimited(RateLimited):
    type = "tokens"


class QuotaExhausted(RateLimited):
    """The budget is spent. Retrying does not help."""

    type = "insufficient_quota"
    code = "insufficient_quota"


class HeadersTooLarge(DragomanError):
    status = 431
    type = "invalid_request_error"
    code = "headers_too_large"


class EngineFailed(DragomanError):
    type = "inference_error"
    code = "inference_error"


class StepLimitReached(EngineFailed):
    """The model was still calling tools at the step limit. `messages` is the conversation so far."""

    code = "step_limit_reached"
    messages: "tuple[Message, ...]" = ()


class NotSupported(DragomanError):
    status = 501
    type = "not_implemented"
    code = "not_implemented"


class EngineDied(DragomanError):
    status = 502
    type = "inference_error"
    code = "engine_died"


class Unreachable(DragomanError):
    """The server did not accept the request, or closed the connection before the first byte of a response."""

    status = 502
    type = "server_error"
    code = "unreachable"


class ServerFailed(DragomanError):
    """The server reported an internal error."""

    status = 502
    type = "server_error"
    code = "server_failed"


class LoopDetected(ServerFailed):
    """An upstream server forwarded the request back to this model."""

    code = "loop_detected"


class BadAnswer(DragomanError):
    """The server's response does not follow its API."""

    status = 502
    type = "server_error"
    code = "bad_answer"


class StreamCutOff(BadAnswer):
    """A stream ended, broke or stalled before the reply was complete."""

    code = "stream_cut_off"


class MalformedToolCall(BadAnswer):
    """The arguments of `call` are not a JSON object."""

    code = "malformed_tool_call"
    call: "ToolCall | None" = None


class OutputMismatch(BadAnswer):
    """The text of the reply, in `arrived`, does not match the requested output type."""

    code = "output_mismatch"


class Unavailable(DragomanError):
    status = 503
    type = "server_error"
    code = "unavailable"

    def __init__(self, message: str, *, param: str | None = None, retry_after: float = 1) -> None:
        super().__init__(message, param=param, retry_after=retry_after)


class QueueFull(Unavailable):
    code = "overloaded"


class ModelLoading(Unavailable):
    code = "model_loading"


class ModelFailed(Unavailable):
    code = "model_failed"


class StorageUnavailable(Unavailable):
    code = "storage_unavailable"


class EngineTimeout(DragomanError):
    status = 504
    type = "inference_error"
    code = "engine_timeout"


class DeadlineExceeded(EngineTimeout):
    code = "deadline_exceeded"


class AnswerTimeout(DragomanError):
    """The server accepted the request but did not respond in time."""

    status = 504
    type = "server_error"
    code = "answer_timeout"


class ConfigError(Exception):
    """One or more errors in a configuration, one line each."""

    def __init__(self, *mistakes: str) -> None:
        super().__init__("\n".join(mistakes))
        self.messages = mistakes


def error_class(name: str) -> type[DragomanError]:
    """Return the error class with this name. Used for errors from other processes."""
    classes = {cls.__name__: cls for cls in _subclasses(DragomanError)}
    return classes.get(name, EngineFailed)


def _subclasses(cls: type[DragomanError]) -> list[type[DragomanError]]:
    return [cls, *(found for child in cls.__subclasses__() for found in _subclasses(child))]
