"""Maps errors of an upstream server to client errors and decides about retries.

    client error         400, 413, 422, 501                     passed on with its message; not retried
    overload             429, 503, 529                          retried elsewhere; else passed on with Retry-After
    configuration error  401, 403, 402, 404, 3xx                retried; else 502, because the client's key is valid
    server error         5xx, no answer, malformed, cut off     retried; else 502 or 504

Details go to the log: the client sees neither addresses nor messages of failing servers.
"""

import logging

from dragoman.core.errors import (
    AnswerTimeout,
    BadAnswer,
    BadRequest,
    DragomanError,
    LoopDetected,
    ModelNotFound,
    NotSupported,
    QuotaExhausted,
    RateLimited,
    ServerFailed,
    StreamCutOff,
    TooLarge,
    Unavailable,
    Unreachable,
)

log = logging.getLogger("dragoman.upstream")

CLIENT_ERRORS = (BadRequest, TooLarge, NotSupported)
MIN_PAUSE_SECONDS = 1.0
MAX_RETRY_AFTER = 3600.0
"""The longest `Retry-After` of a server that is applied and passed on."""
SERVER_ERRORS = (Unreachable, ServerFailed, BadAnswer)
LOOP = "the upstream server of this model leads back to the model itself; the operator must correct its address"


def is_client_error(error: DragomanError) -> bool:
    return isinstance(error, CLIENT_ERRORS)


def pause_seconds(error: DragomanError) -> float | None:
    """How long the server asks not to be used; None for errors other than overload."""
    if isinstance(error, Unavailable) or (isinstance(error, RateLimited) and not isinstance(error, QuotaExhausted)):
        return MIN_PAUSE_SECONDS if error.retry_after is None else min(error.retry_after, MAX_RETRY_AFTER)
    return None


def to_client_error(
    error: DragomanError, model: str, url: str, is_listed: bool = False, request_id: str = ""
) -> DragomanError:
    """Log a server's error and return the error for the client.

    `is_listed` means that the client chose one of the server's own models.
    """
    if is_client_error(error):
        # Retrying an invalid request does not help.
        error.retry_after = None
        return error
    prefix, extra = (f"request {request_id}: ", {"request_id": request_id}) if request_id else ("", {})
    log.warning("%smodel %s: %s: %s (%s)", prefix, model, url, error.message, type(error).__name__, extra=extra)
    if isinstance(error, ModelNotFound) and is_listed:
        return ModelNotFound(f"model '{model}' not found", param="model")
    seconds = pause_seconds(error)
    if seconds is not None:
        return _overloaded(error, seconds)
    if isinstance(error, LoopDetected):
        return LoopDetected(LOOP)
    if isinstance(error, AnswerTimeout):
        return AnswerTimeout("the upstream server of this model did not answer in time")
    if isinstance(error, StreamCutOff):
        return StreamCutOff("the upstream server of this model ended its reply early")
    kind = next((kind for kind in SERVER_ERRORS if isinstance(error, kind)), None)
    if kind is None:
        return ServerFailed("the upstream server of this model refused the request; see the server log")
    return kind("the upstream server of this model is unreachable or failed; see the server log")


def _overloaded(error: DragomanError, seconds: float) -> DragomanError:
    message = "the upstream server of this model is overloaded; try again later"
    if isinstance(error, Unavailable):
        return type(error)(message, retry_after=max(seconds, MIN_PAUSE_SECONDS))
    return RateLimited(message, retry_after=max(seconds, MIN_PAUSE_SECONDS))
