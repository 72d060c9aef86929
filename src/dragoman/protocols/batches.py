"""Requests and replies about batches, in OpenAI's and in Anthropic's API.

    openai     {id, object: "batch", endpoint, status, request_counts, errors, output_file_id, error_file_id, ...}
    anthropic  {id, type: "message_batch", processing_status, request_counts, results_url, created_at, expires_at, ...}

`batch_lines` has the lines of their inputs and results.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec

from dragoman.core.errors import BadRequest
from dragoman.protocols.files import ExpiresAfter, PageQuery
from dragoman.protocols.openai import decode_limit

Api = Literal["openai", "anthropic"]
BatchState = Literal[
    "validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"
]
FINAL_STATES: frozenset[BatchState] = frozenset({"completed", "failed", "expired", "cancelled"})
Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
MESSAGES = "/v1/messages"
PATHS: dict[Api, str] = {"openai": "/v1/batches", "anthropic": f"{MESSAGES}/batches"}
PREFIXES: dict[Api, str] = {"openai": "batch_", "anthropic": "msgbatch_"}
HOUR, DAY = 3600, 86400
DEFAULT_WINDOW = "24h"
MAX_WINDOW = 30 * DAY
MAX_LINES = 100_000
MAX_ERRORS = 100
"""Errors of the input that the batch itself shows. The error file has all of them."""
DEFAULT_PAGE, MAX_PAGE, ANTHROPIC_MAX_PAGE = 20, 100, 1000
_WINDOW = re.compile(r"([1-9][0-9]{0,3})([hd])")
MetadataKey = Annotated[str, msgspec.Meta(max_length=64)]
MetadataValue = Annotated[str, msgspec.Meta(max_length=512)]


class InputError(msgspec.Struct, frozen=True):
    """What is wrong with the input of a batch. `line` is counted from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A batch as clients see it. Times are in seconds since 1970."""

    id: str
    api: Api
    created: float
    expires: float
    """When the lines without an answer expire."""
    state: BatchState
    endpoint: str
    window: str = DEFAULT_WINDOW
    input_file: str = ""
    metadata: dict[str, str] | None = None
    errors: tuple[InputError, ...] = ()
    output_file: str | None = None
    """The answered lines; of a batch in Anthropic's API all lines."""
    error_file: str | None = None
    started: float | None = None
    """When the input was validated."""
    finalizing: float | None = None
    cancelling: float | None = None
    ended: float | None = None
    total: int = 0
    succeeded: int = 0
    errored: int = 0
    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0
    """Tokens."""

    @property
    def has_ended(self) -> bool:
        return self.state in FINAL_STATES

    @property
    def waiting(self) -> int:
        """Lines without a result. Once the batch has ended, they are cancelled or expired."""
        return self.total - self.succeeded - self.errored


class CreateFields(msgspec.Struct, frozen=True):
    """The body of OpenAI's create request."""

    input_file_id: str
    endpoint: Endpoint
    completion_window: str
    metadata: Annotated[dict[MetadataKey, MetadataValue], msgspec.Meta(max_length=16)] | None = None
    output_expires_after: ExpiresAfter | None = None

    @property
    def output_seconds(self) -> int | None:
        return None if self.output_expires_after is None else self.output_expires_after.seconds


def window_seconds(window: str) -> int:
    """The length of a completion window such as 24h or 7d."""
    parsed = _WINDOW.fullmatch(window)
    seconds = int(parsed[1]) * (HOUR if parsed[2] == "h" else DAY) if parsed else 0
    if not 0 < seconds <= MAX_WINDOW:
        message = f"completion_window: expected a time such as 24h or 7d, at most {MAX_WINDOW // DAY}d"
        raise BadRequest(message, param="completion_window")
    return seconds


def decode_query(query: Mapping[str, str]) -> PageQuery:
    return PageQuery(decode_limit(query, DEFAULT_PAGE, MAX_PAGE), after=query.get("after"))


def decode_anthropic_query(query: Mapping[str, str]) -> PageQuery:
    limit = decode_limit(query, DEFAULT_PAGE, ANTHROPIC_MAX_PAGE)
    if "before_id" in query:
        return PageQuery(limit, before=query["before_id"], cursor="before_id")
    return PageQuery(limit, after=query.get("after_id"), cursor="after_id")


def encode_batch(batch: BatchEntry) -> dict[str, Any]:
    ended = {f"{state}_at": _whole(batch.ended) if batch.state == state else None for state in sorted(FINAL_STATES)}
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": _encode_errors(batch.errors) if batch.errors else None,
        "input_file_id": batch.input_file,
        "completion_window": batch.window,
        "status": batch.state,
        "output_file_id": batch.output_file,
        "error_file_id": batch.error_file,
        "created_at": int(batch.created),
        "in_progress_at": _whole(batch.started),
        "expires_at": int(batch.expires),
        "finalizing_at": _whole(batch.finalizing),
        "cancelling_at": _whole(batch.cancelling),
        **ended,
        "request_counts": {
            "total": batch.total,
            "completed": batch.succeeded,
            "failed": batch.errored + (batch.waiting if batch.has_ended else 0),
        },
        "usage": {
            "input_tokens": batch.prompt,
            "input_tokens_details": {"cached_tokens": batch.cached},
            "output_tokens": batch.completion,
            "output_tokens_details": {"reasoning_tokens": batch.reasoning},
            "total_tokens": batch.prompt + batch.completion,
        },
        "metadata": batch.metadata,
    }


def _encode_errors(errors: Sequence[InputError]) -> dict[str, Any]:
    return {"object": "list", "data": [msgspec.structs.asdict(error) for error in errors]}


def encode_anthropic_batch(batch: BatchEntry) -> dict[str, Any]:
    counts = {"processing": 0, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 0}
    if batch.has_ended:
        rest = "canceled" if batch.state == "cancelled" else "expired"
        counts |= {"succeeded": batch.succeeded, "errored": batch.errored, rest: batch.waiting}
    else:
        counts["processing"] = batch.total
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": processing_status(batch),
        "request_counts": counts,
        "created_at": _timestamp(batch.created),
        "expires_at": _timestamp(batch.expires),
        "ended_at": _timestamp(batch.ended),
        "cancel_initiated_at": _timestamp(batch.cancelling),
        "archived_at": None,
        # Relative: a proxy may have changed the address, and the SDKs send it to their own.
        "results_url": f"{PATHS['anthropic']}/{batch.id}/results" if batch.has_ended else None,
    }


def processing_status(batch: BatchEntry) -> str:
    if batch.has_ended:
        return "ended"
    return "in_progress" if batch.cancelling is None else "canceling"


def encode_batches(batches: Sequence[BatchEntry], has_more: bool) -> dict[str, Any]:
    return {"object": "list", **_page(batches, has_more, encode_batch)}


def encode_anthropic_batches(batches: Sequence[BatchEntry], has_more: bool) -> dict[str, Any]:
    return _page(batches, has_more, encode_anthropic_batch)


def _page(
    batches: Sequence[BatchEntry], has_more: bool, encode: Callable[[BatchEntry], dict[str, Any]]
) -> dict[str, Any]:
    return {
        "data": [encode(batch) for batch in batches],
        "first_id": batches[0].id if batches else None,
        "last_id": batches[-1].id if batches else None,
        "has_more": has_more,
    }


def encode_anthropic_deleted(batch_id: str) -> dict[str, Any]:
    return {"id": batch_id, "type": "message_batch_deleted"}


def _whole(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds)


def _timestamp(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
