import os
from collections.abc import Iterator

import pytest

from tests.engines.fake_vllm_engine import STAND_IN
from tests.engines.layout_fixtures import home, q8_copy, small
from tests.engines.llama_fixtures import anyio_backend, engine, halves_path, model_path
from tests.support.bad_server import BadServer

__all__ = ["anyio_backend", "engine", "halves_path", "home", "model_path", "q8_copy", "small"]


@pytest.fixture
def server() -> Iterator[BadServer]:
    with BadServer() as server:
        yield server


@pytest.fixture
def other() -> Iterator[BadServer]:
    with BadServer() as server:
        yield server


@pytest.fixture(scope="module")
def stand_in() -> Iterator[None]:
    """Worker processes find the fake vLLM."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(STAND_IN), prepend=os.pathsep)
        yield
