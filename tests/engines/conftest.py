from collections.abc import Iterator

import pytest

from tests.badserver import BadServer
from tests.engines.running import halves_path, with_engine, with_halves

__all__ = ["halves_path", "with_engine", "with_halves"]


@pytest.fixture
def server() -> Iterator[BadServer]:
    with BadServer() as server:
        yield server


@pytest.fixture
def other() -> Iterator[BadServer]:
    with BadServer() as server:
        yield server
