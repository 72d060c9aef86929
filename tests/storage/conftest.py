from collections.abc import Iterator
from pathlib import Path

import pytest

from dragoman.storage.database import Database

KINDS = ("memory", "sqlite", "postgres")


@pytest.fixture(params=KINDS)
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of an empty database of each kind."""
    if request.param == "postgres":
        address: str = request.getfixturevalue("postgres").new_database()
        return address
    return "memory" if request.param == "memory" else str(tmp_path / "home" / "dragoman.db")


@pytest.fixture
def database(address: str) -> Iterator[Database]:
    database = Database(address)
    yield database
    database.close()
