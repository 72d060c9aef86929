"""Limits how much one principal stores, so that no caller can fill the disk for all.

Rules
1. Files, inputs and results of batches, responses and conversations count.
2. The sum is read from the database at most once in `REFRESH_SECONDS`, or once a second for a principal without room.
   Between two reads, what this server adds is counted. So a principal may exceed the limit a little.
"""

import time

import msgspec
from sqlalchemy import Connection, Table, func, select

from dragoman.core.errors import TooLarge
from dragoman.storage.database import Database
from dragoman.storage.tables import conversations, files, responses

REFRESH_SECONDS, RETRY_SECONDS = 10.0, 1.0
MOST_PRINCIPALS = 10_000
"""Principals whose sums are in memory."""


class _Used(msgspec.Struct):
    size: int
    read: float


class SpaceLimit:
    """`most` is the number of bytes for each principal."""

    def __init__(self, database: Database, most: int) -> None:
        self._database = database
        self._most = most
        self._used: dict[str, _Used] = {}

    async def take(self, principal: str, size: int) -> None:
        """Count what is about to be stored. Raises TooLarge if there is no room for it."""
        used = self._used.get(principal)
        if used is None or _is_older(used, REFRESH_SECONDS):
            used = await self._read(principal)
        if used.size + size > self._most and _is_older(used, RETRY_SECONDS):
            used = await self._read(principal)
        if used.size + size > self._most:
            raise TooLarge(
                f"what this key stores would be larger than {self._most} bytes (`storage.principal_bytes` of this "
                "server); delete files, responses or conversations"
            )
        used.size += size

    async def _read(self, principal: str) -> _Used:
        if len(self._used) >= MOST_PRINCIPALS:
            self._used.clear()
        size = await self._database.read(lambda connection: _sum(connection, principal))
        self._used[principal] = used = _Used(size, time.monotonic())
        return used


def _is_older(used: _Used, seconds: float) -> bool:
    return time.monotonic() - used.read > seconds


def _sum(connection: Connection, principal: str) -> int:
    def add(table: Table, owner: str) -> int:
        total = select(func.coalesce(func.sum(table.c.size), 0)).where(table.c[owner] == principal)
        return int(connection.execute(total).scalar_one())

    return add(files, "owner") + add(responses, "principal") + add(conversations, "principal")
