"""Everything that can go wrong, as one tree. Each error knows the status and the words a protocol needs.

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
    ConfigError            mistakes in a file, a flag or an engine's options: a line each for the person who made them

A message says what is wrong and, where there is one, the way out. It is shown to callers: no paths, no prompts.
`quote` quotes and cuts a caller's value. A message longer than `max_message` is cut too.

The same tree is what a client raises. `answered` is then what the server really said; the status of the class is what
we would answer to somebody who asked us.
"""

from typing import TYPE_CHECKING, ClassVar

import msgspec

if TYPE_CHECKING:
    from dragoman.core.request import Message, Part, ToolCall


class Answered(msgspec.Struct, frozen=True):
    """An error as a server told it. In the middle of a stream the status is that of the stream, 200."""

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


def cut(text: str, length: int = MAX_VALUE) -> str:
    return text if len(text) <= length else text[:length] + "..."


def quote(value: object) -> str:
    """A caller's value for a message: quoted, and cut to `MAX_VALUE`."""
    return repr(cut(value)) if isinstance(value, str) else cut(repr(value))


class DragomanError(Exception):
    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None
    max_message: ClassVar[int] = 2000
    """Characters."""

    def __init__(self, message: str, *, param: str | None = None, retry_after: float | None = None) -> None:
        message = cut(message, self.max_message)
        super().__init__(message)
        self.message = message
        self.param = None if param is None else cut(param)
        self.retry_after = retry_after
        self.answered: Answered | None = None
        self.arrived: tuple[Part, ...] = ()
        """What a client had read of a reply before this happened."""


class BadRequest(DragomanError):
    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class ContextTooLong(BadRequest):
    """`tokens` is what the prompt has, `limit` the most that it may have, where they are known."""

    code = "context_length_exceeded"

    def __init__(
        self, message: str, *, param: str | None = None, tokens: int | None = None, limit: int | None = None
    ) -> None:
        super().__init__(message, param=param)
        self.tokens = tokens
        self.limit = limit


class NoRoomForReply(ContextTooLong):
    """The prompt fits, and fills all there is."""


class InvalidConfig(BadRequest):
    """Told to an operator only: it names the file."""

    code = "invalid_config"
    max_message = 100_000


class InvalidSchema(BadRequest):
    code = "invalid_schema"


class RequestRefused(BadRequest):
    """This request has ended the engine's process before."""

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
    """`type` says of what there were too many, as OpenAI's clients expect it."""

    status = 429
    type = "requests"
    code = "rate_limit_exceeded"


class TokensLimited(RateLimited):
    type = "tokens"


class QuotaExhausted(RateLimited):
    """There is nothing left to spend: to wait does not help."""

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
    """A model went on calling tools. `messages` is the conversation up to there."""

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
    """Nobody took the request, or the connection broke before anything came back."""

    status = 502
    type = "server_error"
    code = "unreachable"


class ServerFailed(DragomanError):
    """A server says that something went wrong there, and no more."""

    status = 502
    type = "server_error"
    code = "server_failed"


class LoopDetected(ServerFailed):
    """The server behind a model asks, in the end, for that very model."""

    code = "loop_detected"


class BadAnswer(DragomanError):
    """What a server sent is not what its API says."""

    status = 502
    type = "server_error"
    code = "bad_answer"


class StreamCutOff(BadAnswer):
    """A stream ended, broke or fell silent before the reply was complete."""

    code = "stream_cut_off"


class MalformedToolCall(BadAnswer):
    """`call` has the arguments as they came, which are not a JSON object."""

    code = "malformed_tool_call"
    call: "ToolCall | None" = None


class OutputMismatch(BadAnswer):
    """The text of a reply, which is among what `arrived`, is not of the shape that was asked for."""

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
    """A server took the request and said nothing for too long."""

    status = 504
    type = "server_error"
    code = "answer_timeout"


class ConfigError(Exception):
    """A configuration may have several mistakes; each is a line of its own."""

    def __init__(self, *mistakes: str) -> None:
        super().__init__("\n".join(mistakes))
        self.mistakes = mistakes


def by_name(name: str) -> type[DragomanError]:
    """The class of an error that crossed a process boundary by name."""
    classes = {cls.__name__: cls for cls in _tree(DragomanError)}
    return classes.get(name, EngineFailed)


def _tree(cls: type[DragomanError]) -> list[type[DragomanError]]:
    return [cls, *(found for child in cls.__subclasses__() for found in _tree(child))]
