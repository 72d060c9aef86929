"""The states of batches and of their lines, and how they change: values and rules, without a database.

    batch   validating ──> in_progress ──> finalizing ──> completed | expired | failed
                 └──────────────┴── cancelling ──> cancelled
    line    waiting ──> succeeded | errored

Rules
1. One server at a time runs a batch. When it has died, another takes the batch over, with everything that is recorded.
2. A line keeps the state `waiting` until its result is recorded. So a line whose server dies runs again.
3. The first recorded result of a line is final. Only the server of the batch records results, and only until the batch
   is finalized. So every line has exactly one result, however often it ran.
4. A batch is finalized when no line is waiting, when it has expired, or when it is cancelled. Lines that wait then have
   the result `expired` or `cancelled`.
5. A batch fails if every line of its input has an error. A batch that has ended never changes.
6. A request that failed for a transient reason is retried with growing pauses: up to `MAX_REFUSALS` times if its model
   was not ready, up to `MAX_FAILURES` times if it failed while it ran.
"""

from typing import Literal

import msgspec

from dragoman.core.events import Usage
from dragoman.protocols.batch_lines import LineState
from dragoman.protocols.batches import BatchEntry, InputError

Outcome = Literal["completed", "failed", "expired", "cancelled"]
Step = Literal["validate", "run", "write_results"]
MAX_FAILURES = 5
MAX_REFUSALS = 200
"""Tries of a request whose model is not ready: several hours."""
NOT_READY = frozenset({408, 409, 429, 503, 529})
FAILED_STATUS = 502
FAILED = frozenset({FAILED_STATUS, 504})
FIRST_PAUSE, MAX_PAUSE = 0.5, 60.0


class StoredBatch(BatchEntry, frozen=True, kw_only=True):
    """`caller` is the caller of its requests, as the server encodes it. `source` is a file of the server itself, the
    input, with the content `digest`."""

    principal: str
    server: str | None
    caller: bytes
    source: str
    digest: str
    output_seconds: int | None = None
    """How long the result files are kept; None means as long as the batch."""
    outcome: Outcome = "completed"
    """The state in which the batch will end, as far as known."""

    @property
    def is_validated(self) -> bool:
        return self.started is not None

    @property
    def takes_results(self) -> bool:
        return self.is_validated and self.state in ("in_progress", "cancelling")


class WrongState(Exception):
    """The batch is in a state in which this cannot happen."""


def next_step(batch: StoredBatch) -> Step | None:
    """What the server of the batch has to do; None once it has ended."""
    if batch.has_ended:
        return None
    if not batch.is_validated:
        return "validate"
    return "run" if batch.state == "in_progress" else "write_results"


def validated(batch: StoredBatch, total: int, errors: tuple[InputError, ...], bad: int, now: float) -> StoredBatch:
    """The input was read; `bad` of its lines have errors, of which `errors` are the first."""
    if batch.is_validated or batch.has_ended:
        raise WrongState
    counted = msgspec.structs.replace(batch, started=now, total=total, errored=bad, errors=errors)
    if batch.state == "cancelling":
        return counted
    if bad == total:
        return msgspec.structs.replace(counted, state="finalizing", finalizing=now, outcome="failed")
    return msgspec.structs.replace(counted, state="in_progress")


def cancel(batch: StoredBatch, now: float) -> StoredBatch:
    """A batch that is already cancelled, or writes its results, stays as it is."""
    if batch.has_ended:
        raise WrongState
    if batch.state not in ("validating", "in_progress"):
        return batch
    return msgspec.structs.replace(batch, state="cancelling", cancelling=now, outcome="cancelled")


def record(batch: StoredBatch, line: LineState, server: str, result: LineState, usage: Usage) -> StoredBatch | None:
    """The batch with the result of a line; None if the result does not count."""
    if batch.server != server or not batch.takes_results or line != "waiting":
        return None
    return msgspec.structs.replace(
        batch,
        succeeded=batch.succeeded + (result == "succeeded"),
        errored=batch.errored + (result == "errored"),
        prompt=batch.prompt + usage.prompt,
        cached=batch.cached + usage.cached,
        completion=batch.completion + usage.completion,
        reasoning=batch.reasoning + usage.reasoning,
    )


def finalize(batch: StoredBatch, now: float) -> StoredBatch:
    """Begin to write the results, if all lines are answered or the batch has expired."""
    is_expired = now >= batch.expires and batch.waiting > 0
    if batch.state != "in_progress" or not (is_expired or not batch.waiting):
        return batch
    outcome: Outcome = "expired" if is_expired else "completed"
    return msgspec.structs.replace(batch, state="finalizing", finalizing=now, outcome=outcome)


def end(batch: StoredBatch, output_file: str | None, error_file: str | None, now: float) -> StoredBatch:
    """The results are written."""
    if not batch.is_validated or batch.state not in ("finalizing", "cancelling"):
        raise WrongState
    return msgspec.structs.replace(
        batch, state=batch.outcome, ended=now, output_file=output_file, error_file=error_file, server=None
    )


def retry_pause(status: int, tries: int, wanted: float | None = None) -> float | None:
    """Return the seconds before the next try of a request, after `tries` tries of which the last one had this status;
    None if the answer is final. `wanted` is the pause that the answer asks for."""
    most = MAX_REFUSALS if status in NOT_READY else MAX_FAILURES if status in FAILED else 0
    if tries >= most:
        return None
    return min(MAX_PAUSE, max(wanted or 0.0, FIRST_PAUSE * 2.0 ** min(tries - 1, 10)))
