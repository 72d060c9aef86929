"""The pytest plugin. It loads itself; the server is imported by the first test that uses it.

A test that uses `model_server` also fails if the server refused a request, as its script had no reply for it.
"""

import sys
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from dragoman.testing.server import ModelServer

FIXTURE = "model_server"
SERVER_MODULE = "dragoman.testing.server"


@pytest.fixture
def model_server() -> "Iterator[ModelServer]":
    """A model server for this test, with an empty script; see `dragoman.testing`."""
    from dragoman.testing.server import ModelServer

    server = ModelServer()
    server.start()
    try:
        yield server
    finally:
        server.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    yield
    module = sys.modules.get(SERVER_MODULE)
    server = getattr(item, "funcargs", {}).get(FIXTURE)
    # The tests may have a fixture of their own with this name.
    if module is not None and isinstance(server, module.ModelServer) and server.failures:
        pytest.fail("\n".join(server.failures), pytrace=False)
