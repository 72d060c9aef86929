"""Stores batches, their lines, and the results of their lines.

Rules
1. A batch belongs to a principal. Other principals cannot see it. It is there for `storage.keep.batches` after its end.
2. The input is a file of the server itself (`SERVER_PRINCIPAL`), so the batch does not need the uploaded file.
   The results of a batch in Anthropic's API are such a file too; those in OpenAI's belong to the caller.
3. Everything that changes a batch is one transaction, which looks at its present state (see `batch_states`).
4. The lines are removed when the results are in files.
5. One principal has at most `MAX_RUNNING` batches that have not ended.
6. A batch whose server is dead (see `servers`) is taken over by the first server that polls for it.
"""

import re
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
from sqlalchemy import ColumnElement, Connection, Row, and_, delete, exists, func, insert, or_, select, tuple_, update

from dragoman.config.sections import MEMORY
from dragoman.core.errors import BadRequest, DragomanError, RateLimited
from dragoman.core.events import Usage
from dragoman.core.ids import new_id
from dragoman.protocols.batch_lines import InputLine, LineResult, LineState, ResultLine, refused_result
from dragoman.protocols.batches import FINAL_STATES, PREFIXES, Api, InputError
from dragoman.protocols.files import Order
from dragoman.storage import batch_states
from dragoman.storage.batch_states import StoredBatch, WrongState
from dragoman.storage.blobs import Blob
from dragoman.storage.database import Database
from dragoman.storage.files import FileStore, NewFile, StoredFile
from dragoman.storage.pages import select_page
from dragoman.storage.servers import is_dead
from dragoman.storage.tables import batch_lines as lines
from dragoman.storage.tables import batches

SERVER_PRINCIPAL = "batches"
"""The principal of files that belong to the server itself. No caller has it."""
ID = re.compile(f"({'|'.join(PREFIXES.values())})[0-9a-f]+")
NO_NAME = b"\xff"
"""The first byte of the `custom_id` of lines with errors, which may be missing or used twice. UTF-8 never has it."""
SPARE_SECONDS = 30 * 86400.0
"""How much longer than its window the input of a batch is kept, for a server that does not run for a while."""
MAX_RUNNING = 100
"""Batches of one principal that have not ended."""
GROUP = 1000
"""Rows of one statement that removes something."""
CLEANUP_SECONDS = 60.0
_COLUMNS = [name for name in StoredBatch.__struct_fields__ if name in batches.c]
"""The fields that have columns of their own."""


class BatchPage(NamedTuple):
    batches: Sequence[StoredBatch]
    has_more: bool


class WaitingLine(NamedTuple):
    number: int
    begin: int
    length: int
    prefix: bytes


FIRST = (b"", 0)
"""The position before all waiting lines: a prefix and a number."""


class Batches(Protocol):
    """The interface of the batch store that front ends have too."""

    async def add(self, batch: "NewBatch") -> StoredBatch: ...

    async def find(self, principal: str, api: Api, batch_id: str) -> StoredBatch | None: ...


class NewBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch that a caller creates. `seconds` is the length of its window."""

    api: Api
    principal: str
    caller: bytes
    endpoint: str
    window: str
    seconds: float
    blob: Blob
    """The content of the input."""
    input_file: str = ""
    metadata: dict[str, str] | None = None
    output_seconds: int | None = None
    total: int = 0


class BatchStore:
    def __init__(self, database: Database, files: FileStore, keep_seconds: float) -> None:
        self._database = database
        self._files = files
        self.keep_seconds = keep_seconds

        self.on_change: Callable[[], None] = lambda: None
        """Called after a batch was added or cancelled."""

    @property
    def is_used(self) -> bool:
        """Whether there may be batches. An unused database in memory has none."""
        return self._database.is_open or self._database.address != MEMORY

    async def add(self, batch: NewBatch) -> StoredBatch:
        now, fields = time.time(), msgspec.structs.asdict(batch)
        blob, expires = fields.pop("blob"), now + fields.pop("seconds")
        batch_id = new_id(PREFIXES[batch.api])
        kept_until = expires + SPARE_SECONDS
        source = self._files.draft(
            NewFile(SERVER_PRINCIPAL, batch_id, "batch", blob, kept_until, owner=batch.principal)
        )
        stored = StoredBatch(
            id=batch_id,
            created=now,
            expires=expires,
            state="validating",
            server=self._database.server,
            source=source.id,
            digest=blob.digest,
            **fields,
        )

        def change(connection: Connection) -> None:
            running = and_(batches.c.principal == batch.principal, batches.c.ended.is_(None))
            count = connection.execute(select(func.count()).select_from(batches).where(running)).scalar_one()
            if count >= MAX_RUNNING:
                raise RateLimited(f"{count} batches of this key are running; wait for their end", retry_after=60)
            self._files.insert(connection, source)
            connection.execute(insert(batches).values(_row(stored)))

        try:
            await self._files.take_space(source)
            await self._database.write(change)
        except DragomanError:
            await self._files.remove_unused_contents([blob.digest])
            raise
        self.on_change()
        return stored

    async def find(self, principal: str, api: Api, batch_id: str) -> StoredBatch | None:
        if not ID.fullmatch(batch_id):
            return None
        query = select(batches).where(batches.c.id == batch_id, self._is_visible(principal, api))
        row = await self._database.read(lambda connection: connection.execute(query).one_or_none())
        return None if row is None else _batch(row)

    async def list(
        self, principal: str, api: Api, limit: int, after: StoredBatch | None = None, order: Order = "desc"
    ) -> BatchPage:
        """Batches in the order of their creation, beginning after `after`."""
        query = select(batches).where(self._is_visible(principal, api))
        query = select_page(query, batches, limit, after, order)
        rows = await self._database.read(lambda connection: connection.execute(query).all())
        return BatchPage([_batch(row) for row in rows[:limit]], len(rows) > limit)

    async def cancel(self, principal: str, api: Api, batch_id: str) -> StoredBatch | None:
        """Returns None if the batch does not exist. Raises a BadRequest if it has ended."""
        if not ID.fullmatch(batch_id):
            return None
        condition = and_(batches.c.id == batch_id, self._is_visible(principal, api))
        try:
            changed = await self._change(condition, lambda batch: batch_states.cancel(batch, time.time()))
        except WrongState:
            raise BadRequest("this batch has already ended") from None
        self.on_change()
        return changed

    async def delete(self, principal: str, api: Api, batch_id: str) -> bool:
        """Delete a batch that has ended, and its results. Returns whether it existed."""
        found = await self.find(principal, api, batch_id)
        if found is None:
            return False
        if not found.has_ended:
            raise BadRequest("this batch is still being processed; cancel it first, or wait for its end")
        query = delete(batches).where(batches.c.id == batch_id)
        removed = await self._database.write(lambda connection: connection.execute(query).rowcount)
        if found.output_file is not None:
            await self._files.delete(SERVER_PRINCIPAL, found.output_file)
        return bool(removed)

    def _is_visible(self, principal: str, api: Api) -> ColumnElement[bool]:
        is_kept = or_(batches.c.ended.is_(None), batches.c.ended > time.time() - self.keep_seconds)
        return and_(batches.c.principal == principal, batches.c.api == api, is_kept)

    async def claim(self) -> int:
        """Take over the batches of servers that died; return their number."""
        me = self._database.server

        def change(connection: Connection) -> int:
            is_lost = or_(
                batches.c.server.is_(None), and_(batches.c.server != me, is_dead(batches.c.server, time.time()))
            )
            query = select(batches.c.id).where(_is_running, is_lost).with_for_update(skip_locked=True)
            found = connection.execute(query).scalars().all()
            connection.execute(update(batches).where(batches.c.id.in_(found)).values(server=me))
            return len(found)

        return await self._database.write(change)

    async def list_own(self) -> Sequence[StoredBatch]:
        """The batches that this server runs, oldest first."""
        is_mine = and_(_is_running, batches.c.server == self._database.server)
        query = select(batches).where(is_mine).order_by(batches.c.created, batches.c.id)
        rows = await self._database.read(lambda connection: connection.execute(query).all())
        return [_batch(row) for row in rows]

    async def find_own(self, batch_id: str) -> StoredBatch | None:
        """The batch, if this server runs it."""
        query = select(batches).where(self._is_mine(batch_id))
        row = await self._database.read(lambda connection: connection.execute(query).one_or_none())
        return None if row is None else _batch(row)

    def _is_mine(self, batch_id: str) -> ColumnElement[bool]:
        return and_(batches.c.id == batch_id, batches.c.server == self._database.server)

    async def add_lines(self, batch_id: str, added: Sequence[InputLine]) -> None:
        """Raises WrongState if this server does not read the input of the batch any more."""
        rows = [_line_row(batch_id, line) for line in added]

        def change(connection: Connection) -> None:
            self._check_reads(connection, batch_id)
            connection.execute(insert(lines), rows)

        if rows:
            await self._database.write(change)

    def _check_reads(self, connection: Connection, batch_id: str) -> None:
        batch = _read(connection, self._is_mine(batch_id))
        if batch is None or batch.is_validated or batch.has_ended:
            raise WrongState

    async def note_validated(
        self, batch_id: str, total: int, errors: tuple[InputError, ...], bad: int
    ) -> StoredBatch | None:
        """Returns None if this server does not run the batch any more."""
        now = time.time()
        return await self._change(
            self._is_mine(batch_id), lambda batch: batch_states.validated(batch, total, errors, bad, now)
        )

    async def read_waiting(self, batch_id: str, place: tuple[bytes, int], limit: int) -> Sequence[WaitingLine]:
        """Waiting lines in the order in which they should run, beginning after `place`."""
        columns = (lines.c.number, lines.c.begin, lines.c.length, lines.c.prefix)
        query = select(*columns).where(lines.c.batch == batch_id, lines.c.state == "waiting")
        query = query.where(tuple_(lines.c.prefix, lines.c.number) > place)
        query = query.order_by(lines.c.prefix, lines.c.number).limit(limit)
        rows = await self._database.read(lambda connection: connection.execute(query).all())
        return [WaitingLine(*row) for row in rows]

    async def record(self, batch_id: str, number: int, result: LineResult, usage: Usage) -> bool:
        """Record the result of a line. Returns False, without an effect, if it does not count."""
        encoded = msgspec.msgpack.encode(result)
        server, state = self._database.server, result.state

        def change(connection: Connection) -> bool:
            batch = _read(connection, batches.c.id == batch_id)
            row = and_(lines.c.batch == batch_id, lines.c.number == number)
            before: LineState | None = connection.execute(select(lines.c.state).where(row)).scalar_one_or_none()
            if batch is None or before is None:
                return False
            counted = batch_states.record(batch, before, server, state, usage)
            if counted is None:
                return False
            connection.execute(update(lines).where(row).values(state=state, result=encoded))
            connection.execute(update(batches).where(batches.c.id == batch_id).values(_changed(batch, counted)))
            return True

        return await self._database.write(change)

    async def finalize(self, batch_id: str) -> StoredBatch | None:
        """Begin to write the results, if all lines have one or the batch has expired. Returns None if this server no
        longer runs the batch."""
        now = time.time()
        return await self._change(self._is_mine(batch_id), lambda batch: batch_states.finalize(batch, now))

    async def read_results(self, batch_id: str, after: int, limit: int) -> Sequence[ResultLine]:
        """The results in the order of the input, beginning after line number `after`."""
        columns = (lines.c.number, lines.c.custom_id, lines.c.result)
        query = select(*columns).where(lines.c.batch == batch_id, lines.c.number > after)
        query = query.order_by(lines.c.number).limit(limit)
        rows = await self._database.read(lambda connection: connection.execute(query).all())
        return [_result_line(*row) for row in rows]

    async def end(self, batch_id: str, output: StoredFile | None, errors: StoredFile | None) -> StoredBatch | None:
        """Add the files with the results, and end the batch. Returns None if this server does not run it any more."""
        now = time.time()
        output_id, error_id = (None if file is None else file.id for file in (output, errors))

        def add_files(connection: Connection) -> None:
            for file in (output, errors):
                if file is not None:
                    self._files.insert(connection, file)

        return await self._change(
            self._is_mine(batch_id), lambda batch: batch_states.end(batch, output_id, error_id, now), add_files
        )

    async def remove_lines(self, batch_id: str, *, is_reading: bool = False) -> None:
        """Remove the lines of a batch whose results are in files, or whose input will be read again. Raises WrongState
        if this server does not read it any more."""
        some = select(lines.c.number).where(lines.c.batch == batch_id).limit(GROUP)
        query = delete(lines).where(lines.c.batch == batch_id, lines.c.number.in_(some))

        def change(connection: Connection) -> int:
            if is_reading:
                self._check_reads(connection, batch_id)
            return connection.execute(query).rowcount

        while await self._database.write(change):
            pass

    async def remove_expired(self) -> None:
        """Remove ended batches after `storage.keep.batches`, and lines of ended batches that a crash left."""
        if not self._database.is_open:
            return
        has_lines = exists().where(lines.c.batch == batches.c.id)
        left = select(batches.c.id).where(batches.c.state.in_(FINAL_STATES), has_lines)
        for batch_id in await self._database.read(lambda connection: connection.execute(left).scalars().all()):
            await self.remove_lines(batch_id)
        query = delete(batches).where(batches.c.ended <= time.time() - self.keep_seconds)
        await self._database.write(lambda connection: connection.execute(query) and None)

    async def _change(
        self,
        condition: ColumnElement[bool],
        transition: Callable[[StoredBatch], StoredBatch],
        besides: Callable[[Connection], None] | None = None,
    ) -> StoredBatch | None:
        """Change a batch in a transaction. Returns None if no batch fulfils the condition."""

        def change(connection: Connection) -> StoredBatch | None:
            before = _read(connection, condition)
            if before is None:
                return None
            after = transition(before)
            if besides is not None:
                besides(connection)
            values = _changed(before, after)
            if values:
                connection.execute(update(batches).where(batches.c.id == before.id).values(values))
            return after

        return await self._database.write(change)


_is_running = batches.c.state.not_in(FINAL_STATES)


def _read(connection: Connection, condition: ColumnElement[bool]) -> StoredBatch | None:
    row = connection.execute(select(batches).where(condition).with_for_update()).one_or_none()
    return None if row is None else _batch(row)


def _row(batch: StoredBatch) -> dict[str, Any]:
    fields = msgspec.structs.asdict(batch)
    row = {name: fields.pop(name) for name in _COLUMNS}
    return row | {"body": msgspec.json.encode(fields)}


def _changed(before: StoredBatch, after: StoredBatch) -> dict[str, Any]:
    old, new = _row(before), _row(after)
    return {name: value for name, value in new.items() if value != old[name]}


def _batch(row: Row[Any]) -> StoredBatch:
    fields = {name: getattr(row, name) for name in _COLUMNS}
    return msgspec.convert(msgspec.json.decode(row.body) | fields, StoredBatch)


def _line_row(batch_id: str, line: InputLine) -> dict[str, Any]:
    is_good = line.error is None
    name = (line.custom_id or "").encode() if is_good else NO_NAME + str(line.number).encode()
    return {
        "batch": batch_id,
        "number": line.number,
        "custom_id": name,
        "begin": line.begin,
        "length": line.length,
        "prefix": line.prefix,
        "state": "waiting" if is_good else "errored",
        "result": None if is_good else msgspec.msgpack.encode(refused_result(line)),
    }


_result = msgspec.msgpack.Decoder(LineResult)


def _result_line(number: int, name: bytes, encoded: bytes | None) -> ResultLine:
    result = None if encoded is None else _result.decode(encoded)
    if result is not None and name.startswith(NO_NAME):
        return ResultLine(number, result.custom_id, result)
    return ResultLine(number, name.decode(), result)
