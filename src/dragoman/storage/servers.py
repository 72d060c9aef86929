"""Which servers use the database, and which of them are alive.

Rules
1. A server has a row while it has the database open, and renews its heartbeat every `HEARTBEAT_SECONDS`.
2. A server without a row, or without a heartbeat for `DEAD_SECONDS`, is dead: others may take over its work. The clocks
   of servers that share a database must agree within a few seconds.
3. Only one server has an SQLite database open. When it starts, all others are dead. It does not renew its heartbeat.
"""

import time

from sqlalchemy import ColumnElement, Connection, delete, insert, select, update

from dragoman.storage.tables import servers

HEARTBEAT_SECONDS = 5.0
DEAD_SECONDS = 30.0


def register_server(connection: Connection, server: str, *, is_alone: bool) -> None:
    """Add the row of a server that has just connected, in place of the rows of dead ones."""
    now = time.time()
    connection.execute(delete(servers) if is_alone else delete(servers).where(servers.c.heartbeat < now - DEAD_SECONDS))
    connection.execute(insert(servers).values(id=server, started=now, heartbeat=now))


def renew_heartbeat(connection: Connection, server: str) -> None:
    now = time.time()
    renewed = connection.execute(update(servers).where(servers.c.id == server).values(heartbeat=now))
    if not renewed.rowcount:
        # Another server took this one for dead, as after a suspended laptop has woken up.
        register_server(connection, server, is_alone=False)


def remove_server(connection: Connection, server: str) -> None:
    connection.execute(delete(servers).where(servers.c.id == server))


def is_dead(server: ColumnElement[str], now: float) -> ColumnElement[bool]:
    """The condition that the server in this column is dead."""
    return server.not_in(select(servers.c.id).where(servers.c.heartbeat >= now - DEAD_SECONDS))
