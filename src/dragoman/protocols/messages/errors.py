"""Errors in Anthropic's words.

    {"type": "error", "error": {"type", "message" [, "details"]}, "request_id"}

The status is the error's own, but for what is overloaded, which is 529 here. A field's path has no place of its
own, so the message begins with it.
"""

from typing import Any

from dragoman.core.errors import ContextTooLong, DragomanError, NoRoomForReply, ThreadUnsupported

OVERLOADED = 529
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    501: "invalid_request_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def status(error: DragomanError) -> int:
    return OVERLOADED if error.status == 503 else error.status


def encode_error(error: DragomanError, request_id: str) -> dict[str, Any]:
    otherwise = "invalid_request_error" if error.status < 500 else "api_error"
    told: dict[str, Any] = {"type": TYPES.get(error.status, otherwise), "message": _words(error)}
    if isinstance(error, ThreadUnsupported):
        told["details"] = {"error_code": error.code}
    return {"type": "error", "error": told, "request_id": request_id}


def _words(error: DragomanError) -> str:
    if not isinstance(error, ContextTooLong):
        return error.message if error.message.startswith(error.param or "") else f"{error.param}: {error.message}"
    # Agents make room in their context when they read these very words.
    if error.tokens is None or error.limit is None:
        return f"prompt is too long: {error.message}"
    reply = f": one of {error.limit + 1} is needed for the reply" if isinstance(error, NoRoomForReply) else ""
    return f"prompt is too long: {error.tokens} tokens > {error.limit} maximum{reply}"
