"""Stores responses, their items, and the events of their streams.

Rules
1. Every response belongs to a principal. Other principals cannot see it. It is there until it is deleted or expires.
2. What `keep` has stored survives kill -9.
3. A response that has ended never changes. One that was cancelled or deleted while it ran stays cancelled or deleted.
4. A response runs on one server. If that server dies, its queued responses run on another server or after the next
   start, and those in progress fail. A response whose end could not be stored fails once the database works again.
5. In memory, the number of responses, their total size and their age are limited. The oldest are removed first. A
   response that is larger than the size limit is not stored.
6. `remove_expired` and `close_lost` are periodic jobs.
"""

import asyncio
import logging
import re
import time
from collections.abc import Iterable, Mapping
from functools import partial

from dragoman.config.sections import MEMORY
from dragoman.config.settings import Settings
from dragoman.core.errors import StorageUnavailable, TooLarge
from dragoman.storage import conversation_sql, response_sql
from dragoman.storage.database import Database
from dragoman.storage.response_sql import Bounds, LostResponse
from dragoman.storage.response_values import (
    EarlyEnd,
    EndedResponse,
    EventPage,
    Recording,
    ResponseItems,
    StoredItem,
    StoredResponse,
)
from dragoman.storage.space import SpaceLimit

log = logging.getLogger("dragoman.storage")

ID = re.compile(r"[A-Za-z0-9_.:-]{1,200}")
"""Postgres refuses NUL characters in text."""
EXPIRY_SECONDS = 60.0
"""The pause between two runs of `remove_expired`."""
WAIT_SECONDS, SHARED_WAIT_SECONDS = 10.0, 1.0
"""How long `read_events` waits for events. In a shared database, those of other servers are seen after this time."""
LOST_MESSAGE = "the server stopped before the response was complete; send the request again"


class ResponseStore:
    def __init__(self, database: Database, settings: Settings, space: SpaceLimit | None = None) -> None:
        self._database = database
        self._space = space
        limits, self._keep_seconds = settings.limits, settings.storage.keep.responses
        self._bounds: Bounds | None = None
        if database.address == MEMORY:
            self._bounds = Bounds(limits.kept_responses, limits.kept_bytes)
            self._keep_seconds = min(self._keep_seconds, limits.kept_seconds)
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}
        """Readers of events, by the response."""
        self._lost: set[str] = set()
        """Recorded responses that no longer run, and whose end is not stored."""

    @property
    def keep_seconds(self) -> float:
        return self._keep_seconds

    @property
    def bounds(self) -> Bounds | None:
        return self._bounds

    async def check(self, principal: str) -> None:
        if self._database.is_failing:
            await self._database.renew_heartbeat()
        await self._take_space(principal, 0)

    async def _take_space(self, principal: str, size: int) -> None:
        if self._space is not None:
            await self._space.take(principal, size)

    async def keep(self, ended: EndedResponse) -> bool:
        arguments = ended, self._database.server, self._expires(), self._bounds
        try:
            await self._take_space_for(ended)
            is_kept = await self._database.write(lambda connection: response_sql.keep(connection, *arguments))
        except StorageUnavailable:
            if ended.is_recorded:
                self._lost.add(ended.response.id)
            raise
        self._notify(ended.response.id)
        return is_kept

    async def _take_space_for(self, ended: EndedResponse) -> None:
        try:
            await self._take_space(ended.response.principal, response_sql.size_of(ended))
        except TooLarge as error:
            # Its caller gets the reply, if it does not rely on the storage.
            raise StorageUnavailable(error.message) from error

    async def record(self, recording: Recording) -> bool:
        server, expires = self._database.server, self._expires()
        recorded = await self._database.write(
            lambda connection: response_sql.record(connection, recording, server, expires)
        )
        self._notify(recording.response.id)
        return recorded

    async def queue(self, response: StoredResponse, request: bytes, frames: bytes) -> None:
        """Store a background response with the request that starts it, and the first frames of its stream."""
        await self._take_space(response.principal, len(request))
        server, expires = self._database.server, self._expires()
        await self._database.write(
            lambda connection: response_sql.queue(connection, response, server, expires, request, frames)
        )

    async def end_early(self, response_id: str, status: EarlyEnd, code: str, message: str) -> None:
        end = partial(response_sql.end_early, response_id=response_id, status=status, code=code, message=message)
        try:
            await self._database.write(end)
        except StorageUnavailable:
            self._lost.add(response_id)
            raise
        self._notify(response_id)

    async def find(self, principal: str, response_id: str) -> StoredResponse | None:
        if not ID.fullmatch(response_id):
            return None
        return await self._database.read(lambda connection: response_sql.find(connection, principal, response_id))

    async def find_items(self, principal: str, response_id: str) -> ResponseItems | None:
        if not ID.fullmatch(response_id):
            return None
        return await self._database.read(lambda connection: response_sql.find_items(connection, principal, response_id))

    async def items(self, principal: str, ids: Iterable[str]) -> Mapping[str, bytes]:
        keys = {conversation_sql.item_key(item): item for item in ids}
        if not keys:
            return {}
        found = await self._database.read(
            lambda connection: response_sql.newest_items(connection, principal, list(keys))
        )
        return {keys[key]: body for key, body in found.items()}

    async def conversation_items(self, principal: str, conversation_id: str) -> tuple[StoredItem, ...] | None:
        if not ID.fullmatch(conversation_id):
            return None
        return await self._database.read(
            lambda connection: conversation_sql.find_items(connection, principal, conversation_id)
        )

    async def read_events(self, principal: str, response_id: str, after: int) -> EventPage | None:
        if not ID.fullmatch(response_id):
            return None
        changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(response_id, set())
        waiting.add(changed)
        try:
            page = await self._read_page(principal, response_id, after)
            if page is None or page.frames or page.has_ended:
                return page
            await asyncio.wait((changed,), timeout=SHARED_WAIT_SECONDS if self._database.is_shared else WAIT_SECONDS)
            return await self._read_page(principal, response_id, after)
        finally:
            waiting.discard(changed)
            if not waiting and self._waiting.get(response_id) is waiting:
                del self._waiting[response_id]

    async def _read_page(self, principal: str, response_id: str, after: int) -> EventPage | None:
        return await self._database.read(
            lambda connection: response_sql.read_events(connection, principal, response_id, after)
        )

    def _notify(self, response_id: str) -> None:
        for changed in self._waiting.pop(response_id, ()):
            if not changed.done():
                changed.set_result(None)

    async def delete(self, principal: str, response_id: str) -> bool:
        """Return whether the response existed."""
        if not ID.fullmatch(response_id):
            return False
        removed = await self._database.write(lambda connection: response_sql.remove(connection, principal, response_id))
        self._notify(response_id)
        return removed

    async def remove_expired(self) -> None:
        if not self._database.is_open:
            return
        while await self._database.write(response_sql.remove_expired):
            pass

    def note_lost(self, response_ids: Iterable[str]) -> None:
        """Note responses whose front end died. `close_lost` ends those that were recorded."""
        self._lost.update(response_ids)

    async def close_lost(self) -> list[LostResponse]:
        """End responses that no longer run. Take over queued ones of dead servers, and return them to be started."""
        if self._bounds is not None and not self._database.is_open:
            return []
        for response_id in list(self._lost):
            await self.end_early(response_id, "failed", "server_error", LOST_MESSAGE)
            self._lost.discard(response_id)
        server, ended = self._database.server, 0
        claimed = await self._database.write(lambda connection: response_sql.claim_queued(connection, server))
        while found := await self._database.read(lambda connection: response_sql.find_lost(connection, server)):
            for response_id in found:
                ended += await self._database.write(
                    partial(response_sql.end_lost, server=server, response_id=response_id, message=LOST_MESSAGE)
                )
        if ended:
            log.warning("marked %d responses as failed: their server stopped while they were in progress", ended)
        return claimed

    def _expires(self) -> float:
        return time.time() + self._keep_seconds
