"""The statements about stored responses. Each function runs within a transaction."""

import time
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from sqlalchemy import ColumnElement, Connection, and_, delete, func, insert, select, update

from dragoman.protocols.responses import frames as wire
from dragoman.storage import conversation_sql
from dragoman.storage.response_values import (
    RUNNING,
    EndedResponse,
    EventPage,
    RecordedEvents,
    Recording,
    ResponseItems,
    StoredItem,
    StoredResponse,
)
from dragoman.storage.servers import is_dead
from dragoman.storage.tables import response_events, response_items, responses

OVERHEAD = 512
"""Approximate overhead in bytes of a response and of each item."""
EVENT_ROWS = 64
"""Rows of events that are read at a time."""
GROUP = 200
"""Responses that one statement removes or looks at."""
_HEAD = (
    *(responses.c.id, responses.c.principal, responses.c.created, responses.c.status, responses.c.body),
    responses.c.is_background,
)


class Bounds(NamedTuple):
    """How many responses a database in memory keeps, and of what total size."""

    most: int
    most_bytes: int


class LostResponse(NamedTuple):
    """A queued response whose server died, and what starts it."""

    id: str
    request: bytes


def keep(connection: Connection, ended: EndedResponse, server: str, expires: float, bounds: Bounds | None) -> bool:
    response = ended.response
    if ended.should_store and not _keep_response(connection, ended, server, expires, bounds):
        return False
    if ended.conversation is not None:
        conversation_sql.append(connection, response.principal, ended.conversation, ended.new_items, time.time())
        if bounds is not None:
            conversation_sql.evict(connection, *bounds)
    return True


def _keep_response(
    connection: Connection, ended: EndedResponse, server: str, expires: float, bounds: Bounds | None
) -> bool:
    response = ended.response
    size = size_of(ended)
    if ended.is_recorded:
        length = func.coalesce(func.sum(func.length(response_events.c.body)), 0)
        size += connection.execute(select(length).where(response_events.c.response == response.id)).scalar_one()
        values = {"status": response.status, "body": response.body, "size": size, "request": None}
        if not connection.execute(update(responses).where(_runs_on(server, response.id)).values(values)).rowcount:
            return False
    elif bounds is not None and size > bounds.most_bytes:
        return True
    else:
        # A line of a batch that ran twice has the same id.
        connection.execute(
            delete(responses).where(responses.c.id == response.id, responses.c.principal == response.principal)
        )
        insert_response(connection, response, server, expires, size)
    _insert_items(connection, ended)
    if ended.events is not None:
        _insert_events(connection, response.id, ended.events)
    if bounds is not None:
        _evict(connection, bounds)
    return True


def insert_response(
    connection: Connection,
    response: StoredResponse,
    server: str,
    expires: float,
    size: int = OVERHEAD,
    request: bytes | None = None,
) -> None:
    connection.execute(
        insert(responses).values(
            id=response.id,
            principal=response.principal,
            created=response.created,
            expires=expires,
            status=response.status,
            is_background=int(response.is_background),
            server=server,
            size=size,
            request=request,
            body=response.body,
        )
    )


def queue(
    connection: Connection, response: StoredResponse, server: str, expires: float, request: bytes, frames: bytes
) -> None:
    """Insert a background response, with the first events of its stream."""
    insert_response(connection, response, server, expires, OVERHEAD + len(response.body) + len(request), request)
    _insert_events(connection, response.id, RecordedEvents(0, frames))


def _insert_items(connection: Connection, ended: EndedResponse) -> None:
    response = ended.response
    rows = [
        {
            "response": response.id,
            "position": position,
            "is_output": int(position >= len(ended.input)),
            "principal": response.principal,
            "item": conversation_sql.item_key(item.id),
            "body": item.body,
        }
        for position, item in enumerate(ended.input + ended.output)
    ]
    if rows:
        connection.execute(insert(response_items), rows)


def _insert_events(connection: Connection, response_id: str, events: RecordedEvents) -> None:
    connection.execute(insert(response_events).values(response=response_id, first=events.first, body=events.frames))


def record(connection: Connection, recording: Recording, server: str, expires: float) -> bool:
    response = recording.response
    if recording.is_first and not response.is_background:
        if connection.execute(select(responses.c.id).where(responses.c.id == response.id)).one_or_none() is not None:
            # Its end was stored while its client left.
            return False
        insert_response(connection, response, server, expires)
    elif recording.is_first:
        is_queued = and_(responses.c.id == response.id, responses.c.status == "queued", responses.c.server == server)
        values = {"status": response.status, "body": response.body}
        if not connection.execute(update(responses).where(is_queued).values(values)).rowcount:
            return False
    elif connection.execute(select(responses.c.id).where(_runs_on(server, response.id))).one_or_none() is None:
        return False
    _insert_events(connection, response.id, recording.events)
    return True


def end_early(
    connection: Connection,
    response_id: str,
    status: Literal["failed", "cancelled"],
    code: str,
    message: str,
    *conditions: ColumnElement[bool],
) -> bool:
    """End a recorded response that no longer runs. False: it has already ended, or a condition does not hold."""
    query = select(responses.c.body).where(_runs(response_id), *conditions).with_for_update()
    body = connection.execute(query).scalar_one_or_none()
    if body is None:
        return False
    events = select(response_events.c.first, response_events.c.body).where(response_events.c.response == response_id)
    rows = connection.execute(events.order_by(response_events.c.first)).all()
    number = rows[-1].first + wire.count_frames(rows[-1].body) if rows else 0
    so_far = b"".join([row.body for row in rows])
    body, frames = wire.end_early(body, so_far, number, status, code, message)
    values = {"status": status, "body": body, "size": OVERHEAD + len(body) + len(so_far), "request": None}
    connection.execute(update(responses).where(responses.c.id == response_id).values(values))
    _insert_events(connection, response_id, RecordedEvents(number, frames))
    return True


def find(connection: Connection, principal: str, response_id: str) -> StoredResponse | None:
    row = connection.execute(select(*_HEAD).where(_is_visible(principal, response_id))).one_or_none()
    return None if row is None else StoredResponse(**row._asdict() | {"is_background": bool(row.is_background)})


def find_items(connection: Connection, principal: str, response_id: str) -> ResponseItems | None:
    status = connection.execute(
        select(responses.c.status).where(_is_visible(principal, response_id))
    ).scalar_one_or_none()
    if status is None:
        return None
    query = select(response_items).where(response_items.c.response == response_id).order_by(response_items.c.position)
    rows = connection.execute(query).all()
    return ResponseItems(status, _items(row for row in rows if not row.is_output), _items(rows, is_output=True))


def _items(rows: Any, is_output: bool = False) -> tuple[StoredItem, ...]:
    return tuple(
        StoredItem(row.item.decode("utf-8", "surrogatepass"), row.body)
        for row in rows
        if bool(row.is_output) == is_output
    )


def newest_items(connection: Connection, principal: str, ids: Sequence[bytes]) -> dict[bytes, bytes]:
    """The bodies of items by their ids. Responses that continue each other have copies of the same items."""
    columns = response_items.c
    rank = func.row_number().over(partition_by=columns.item, order_by=responses.c.created.desc())
    found = (
        select(columns.response, columns.position, rank.label("rank"))
        .join(responses, columns.response == responses.c.id)
        .where(columns.principal == principal, columns.item.in_(ids), responses.c.expires > time.time())
        .subquery()
    )
    is_found = and_(columns.response == found.c.response, columns.position == found.c.position)
    query = select(columns.item, columns.body).join(found, is_found).where(found.c.rank == 1)
    return {row.item: row.body for row in connection.execute(query)}


def read_events(connection: Connection, principal: str, response_id: str, after: int) -> EventPage | None:
    # The status is read first: the last events are committed together with the end.
    status = connection.execute(
        select(responses.c.status).where(_is_visible(principal, response_id))
    ).scalar_one_or_none()
    if status is None:
        return None
    columns = response_events.c
    is_own = columns.response == response_id
    start = select(func.coalesce(func.max(columns.first), 0)).where(is_own, columns.first <= after + 1)
    query = select(columns.first, columns.body).where(is_own, columns.first >= start.scalar_subquery())
    rows = connection.execute(query.order_by(columns.first).limit(EVENT_ROWS)).all()
    pieces, last = [], after
    for row in rows:
        end = row.first + wire.count_frames(row.body) - 1
        if end > last:
            pieces.append(wire.skip_frames(row.body, last + 1 - row.first))
            last = end
    return EventPage(b"".join(pieces), last, status not in RUNNING and len(rows) < EVENT_ROWS)


def remove(connection: Connection, principal: str, response_id: str) -> bool:
    return bool(connection.execute(delete(responses).where(_is_visible(principal, response_id))).rowcount)


def remove_expired(connection: Connection) -> int:
    expired = select(responses.c.id).where(responses.c.expires <= time.time()).limit(GROUP)
    return connection.execute(delete(responses).where(responses.c.id.in_(expired))).rowcount


def claim_queued(connection: Connection, server: str) -> list[LostResponse]:
    """Take over queued responses of servers that died."""
    is_lost = and_(responses.c.status == "queued", _is_lost(server))
    query = update(responses).where(is_lost).values(server=server).returning(responses.c.id, responses.c.request)
    return [LostResponse(row.id, row.request) for row in connection.execute(query)]


def find_lost(connection: Connection, server: str) -> Sequence[str]:
    """Responses that were running when their servers died. `server` is this one, which is alive."""
    is_lost = and_(responses.c.status == "in_progress", _is_lost(server))
    return connection.execute(select(responses.c.id).where(is_lost).limit(GROUP)).scalars().all()


def end_lost(connection: Connection, server: str, response_id: str, message: str) -> bool:
    return end_early(connection, response_id, "failed", "server_error", message, _is_lost(server))


def _is_lost(server: str) -> ColumnElement[bool]:
    # With an SQLite database a server has no heartbeat.
    return and_(responses.c.server != server, is_dead(responses.c.server, time.time()))


def size_of(ended: EndedResponse) -> int:
    items = ended.input + ended.output
    events = 0 if ended.events is None else len(ended.events.frames)
    return len(ended.response.body) + events + sum(len(item.body) + OVERHEAD for item in items) + OVERHEAD


def _evict(connection: Connection, bounds: Bounds) -> None:
    """Remove the oldest responses that have ended, while there are too many."""
    totals = select(func.count(), func.coalesce(func.sum(responses.c.size), 0)).select_from(responses)
    count, size = connection.execute(totals).one()
    while count > bounds.most or size > bounds.most_bytes:
        oldest = select(responses.c.id).where(responses.c.status.not_in(RUNNING)).order_by(responses.c.created).limit(1)
        query = delete(responses).where(responses.c.id.in_(oldest)).returning(responses.c.size)
        removed = connection.execute(query).scalar_one_or_none()
        if removed is None:
            return
        count, size = count - 1, size - removed


def _runs(response_id: str) -> ColumnElement[bool]:
    return and_(responses.c.id == response_id, responses.c.status.in_(RUNNING))


def _runs_on(server: str, response_id: str) -> ColumnElement[bool]:
    """A server that was taken for dead, and comes back, has no part in the response any more."""
    return and_(_runs(response_id), responses.c.server == server)


def _is_visible(principal: str, response_id: str) -> ColumnElement[bool]:
    return and_(responses.c.id == response_id, responses.c.principal == principal, responses.c.expires > time.time())
