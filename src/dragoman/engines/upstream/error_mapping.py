"""Errors of a place as those of ours: what a caller is told, what is tried elsewhere, what counts against the place.

    our caller's fault     400, 413, 422, 501                   told in the words of the place; nobody else is asked
    too much at once       429, 503, 529                        another is asked; else told, with the time to wait
    the operator's fault   401, 403, 402, 404, 3xx              another is asked; else 502: our caller's key is in order
    the place's fault      5xx, no answer, garbage, cut off     another is asked; else 502 or 504

Words about what is behind us go to the log: a caller hears neither addresses nor what a failing server let out.
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

OF_THE_CALLER = (BadRequest, TooLarge, NotSupported)
REST_SECONDS = 1.0
LONGEST_REST_SECONDS = 3600.0
"""The longest `Retry-After` of a server that is respected and passed on."""
BROKEN = (Unreachable, ServerFailed, BadAnswer)
LOOP = "the server behind this model leads back to the model itself; whoever runs this server can mend its address"


def is_callers(error: DragomanError) -> bool:
    return isinstance(error, OF_THE_CALLER)


def rest(error: DragomanError) -> float | None:
    """How long the place wants to be left alone; None where that is not what it says."""
    if isinstance(error, Unavailable) or (isinstance(error, RateLimited) and not isinstance(error, QuotaExhausted)):
        return REST_SECONDS if error.retry_after is None else min(error.retry_after, LONGEST_REST_SECONDS)
    return None


def told(error: DragomanError, model: str, url: str, is_listed: bool = False, request: str = "") -> DragomanError:
    """`is_listed`: the caller chose one of the models that the server has, or so the caller thought. By the id of the
    `request` its caller finds the line of the log."""
    if is_callers(error):
        # Waiting does not help: the request itself is wrong.
        error.retry_after = None
        return error
    words = f"model {model}: {url}: {error.message} ({type(error).__name__})"
    log.warning(
        "%s%s", f"request {request}: " if request else "", words, extra={"request_id": request} if request else {}
    )
    if isinstance(error, ModelNotFound) and is_listed:
        return ModelNotFound(f"model '{model}' is not served here", param="model")
    seconds = rest(error)
    if seconds is not None:
        return _busy(error, seconds)
    if isinstance(error, LoopDetected):
        return LoopDetected(LOOP)
    if isinstance(error, AnswerTimeout):
        return AnswerTimeout("the server behind this model does not answer in time")
    if isinstance(error, StreamCutOff):
        return StreamCutOff("the server behind this model broke off its reply")
    kind = next((kind for kind in BROKEN if isinstance(error, kind)), None)
    if kind is None:
        return ServerFailed("the server behind this model refuses to work for us; our log says why")
    return kind("the server behind this model cannot be reached, or fails; our log says more")


def _busy(error: DragomanError, seconds: float) -> DragomanError:
    words = "the server behind this model has too much to do; try again later"
    if isinstance(error, Unavailable):
        return type(error)(words, retry_after=max(seconds, REST_SECONDS))
    return RateLimited(words, retry_after=max(seconds, REST_SECONDS))
