"""Sends the requests of a recording again.

Rules
1. Requests are sent in the order of the recording, several at a time if wanted, and the results have this order too.
2. A request that continues a response of the recording waits for it, and then names the new response: ids of responses,
   items and calls are replaced.
3. Requests are left out whose body is incomplete or is not a JSON object, and those whose client left before the end.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import msgspec

from dragoman.client.http_settings import NO_RESPONSE, describe
from dragoman.protocols.reply_fields import list_of, object_of, text_of
from dragoman.recordings.comparison import Comparison, compare, is_repeatable
from dragoman.recordings.outcome import ReplayOutcome, final_response, read_outcome, recorded_pieces
from dragoman.recordings.recorded_exchange import RecordedExchange

if TYPE_CHECKING:
    import httpx

RESPONSES = "/v1/responses"
HEADERS = {"content-type": "application/json", "accept-encoding": "identity"}
Numbered = tuple[int, RecordedExchange]
"""An exchange with the number of its line."""
Send = Callable[[str, bytes, Mapping[str, str]], "AbstractContextManager[httpx.Response]"]
"""Posts a body to a path, with headers."""
NewIds = dict[str, str]
"""Ids of a recorded response and of its items, and those of the new one."""


class Replayed(msgspec.Struct, frozen=True):
    """One request that was sent again, or, with a reason, one that was not."""

    number: int
    path: str
    id: str
    model: str
    skipped: str | None = None
    is_exact: bool = False
    comparison: Comparison | None = None
    recorded: ReplayOutcome | None = None
    now: ReplayOutcome | None = None


class Replayer:
    """`model` replaces the model of all requests."""

    def __init__(self, send: Send, model: str | None = None, is_exact: bool = False, concurrency: int = 1) -> None:
        self._send = send
        self._model = model
        self._is_exact = is_exact
        self._concurrency = concurrency
        self._new_ids: dict[str, Future[NewIds]] = {}
        """By the ids of recorded responses and items."""

    def run(self, exchanges: Iterable[Numbered]) -> Iterator[Replayed]:
        pending: deque[Future[Replayed]] = deque()
        with ThreadPoolExecutor(self._concurrency, "dragoman-replay") as pool:
            try:
                for number, exchange in exchanges:
                    pending.append(self._submit(pool, number, exchange))
                    while pending and (len(pending) > 2 * self._concurrency or pending[0].done()):
                        yield pending.popleft().result()
                while pending:
                    yield pending.popleft().result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _submit(self, pool: ThreadPoolExecutor, number: int, exchange: RecordedExchange) -> Future[Replayed]:
        body = exchange.body
        entry = Replayed(number, exchange.path, exchange.id, self._model or exchange.model or "")
        reason = _reason_to_skip(exchange, body)
        if reason is not None:
            skipped: Future[Replayed] = Future()
            skipped.set_result(msgspec.structs.replace(entry, skipped=reason))
            return skipped
        if exchange.path != RESPONSES:
            return pool.submit(self._replay, entry, exchange, body, [], None)
        earlier = [self._new_ids[name] for name in _references(body) if name in self._new_ids]
        new_ids: Future[NewIds] = Future()
        replayed = pool.submit(self._replay, entry, exchange, body, earlier, new_ids)
        for name in _ids(_recorded_response(exchange)):
            self._new_ids[name] = new_ids
        return replayed

    def _replay(
        self,
        entry: Replayed,
        exchange: RecordedExchange,
        body: dict[str, Any],
        earlier: Iterable[Future[NewIds]],
        new_ids: Future[NewIds] | None,
    ) -> Replayed:
        """Send the request. `new_ids` gets the ids of the new response."""
        found: NewIds = {}
        try:
            if self._model is not None:
                body["model"] = self._model
            content = bytes(exchange.request) if self._model is None else msgspec.json.encode(body)
            for ids in earlier:
                for old, new in ids.result().items():
                    content = content.replace(f'"{old}"'.encode(), f'"{new}"'.encode())
            pieces, status, total = self._post(exchange, content)
            now = read_outcome(exchange.path, body, status, pieces, total)
            if new_ids is not None:
                found = _match_ids(_recorded_response(exchange), final_response(b"".join(data for _, data in pieces)))
        except NO_RESPONSE as error:
            now = ReplayOutcome(0, error="no_response", message=describe(error))
        finally:
            if new_ids is not None:
                new_ids.set_result(found)
        recorded = read_outcome(
            exchange.path, exchange.body, exchange.status, recorded_pieces(exchange), exchange.duration
        )
        is_exact = self._is_exact or is_repeatable(body)
        comparison = compare(recorded, now, is_exact)
        return msgspec.structs.replace(entry, is_exact=is_exact, comparison=comparison, recorded=recorded, now=now)

    def _post(self, exchange: RecordedExchange, content: bytes) -> tuple[list[tuple[float, bytes]], int, float]:
        began = time.perf_counter()
        with self._send(exchange.path, content, {**HEADERS, **exchange.headers}) as response:
            pieces = [(time.perf_counter() - began, data) for data in response.iter_raw()]
            return pieces, response.status_code, time.perf_counter() - began


def _reason_to_skip(exchange: RecordedExchange, body: Mapping[str, Any]) -> str | None:
    if exchange.disconnected:
        return "its client left"
    if exchange.cut:
        return f"its {exchange.cut[0]} was too long to be recorded"
    return None if body else "its body is not a JSON object"


def _references(body: Mapping[str, Any]) -> list[str]:
    """The ids of the response and the items that a request continues."""
    items = [object_of(item) for item in list_of(body.get("input"))]
    names = [item.get("id") for item in items if item.get("type") == "item_reference"]
    return list(filter(None, map(text_of, (body.get("previous_response_id"), *names))))


def _recorded_response(exchange: RecordedExchange) -> dict[str, Any]:
    return final_response(b"".join(data for _, data in recorded_pieces(exchange)))


def _ids(response: Mapping[str, Any]) -> list[str]:
    items = [object_of(item) for item in list_of(response.get("output"))]
    return [text_of(response.get("id")), *(text_of(item.get(name)) for item in items for name in ("id", "call_id"))]


def _match_ids(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> NewIds:
    return {old: new for old, new in zip_longest(_ids(recorded), _ids(now), fillvalue="") if old and new}
