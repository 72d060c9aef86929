import asyncio
import inspect
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import hypothesis
import pytest

from dragoman.files import sources
from tests.support import server_process
from tests.support.postgres import Postgres, run_postgres
from tests.support.server_process import Running, Serving

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that runs the tests in the background makes them deaf to it, and with them every process they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# llama.cpp reads this when it is loaded. Its threads wait for each other at every step, which is slow on busy cores.
os.environ.setdefault("OMP_THREAD_LIMIT", "1")

# On a loaded machine the time of an example means nothing.
hypothesis.settings.register_profile(
    "any-speed",
    parent=hypothesis.settings.default,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("any-speed")

TESTS = Path(__file__).parent
REAL_MODELS = {"smollm2_path", "minilm_path"}
"""Fixtures of tests that compute with a real model."""
ARRANGEMENTS = {1: "one process", 2: "two front ends"}


def is_server_test(path: Path) -> bool:
    return path.is_relative_to(TESTS / "server") or path.is_relative_to(TESTS / "security")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test of the server that starts one in both arrangements.

    A test with a real model runs in one: its engine is in a worker process in both, like that of scripted models that
    can crash. The marker `workers` names the only arrangement in which a test makes sense.
    """
    test = metafunc.definition
    is_parametrized = any("workers" in mark.args[0] for mark in test.iter_markers("parametrize"))
    if "workers" not in metafunc.fixturenames or not is_server_test(test.path) or is_parametrized:
        return
    marker = test.get_closest_marker("workers")
    counts = marker.args if marker else (1,) if REAL_MODELS & set(metafunc.fixturenames) else tuple(ARRANGEMENTS)
    metafunc.parametrize("workers", counts, indirect=True, ids=[ARRANGEMENTS[count] for count in counts])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if REAL_MODELS & set(getattr(item, "fixturenames", ())):
            item.add_marker("model")
        if is_server_test(item.path):
            item.add_marker("server")
        if item.path.is_relative_to(TESTS / "tools"):
            item.add_marker("tools")
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and item.callspec.params.get("workers") == 2:
            item.add_marker("front_ends")


@pytest.fixture(scope="session")
def workers(request: pytest.FixtureRequest) -> int:
    """The number of front ends of the servers; with one, everything is in one process."""
    count: int = getattr(request, "param", 1)
    return count


@pytest.fixture(scope="session")
def serving(workers: int) -> Serving:
    return partial(server_process.serving, workers=workers)


@pytest.fixture
def anyio_backend() -> str:
    """The event loop of tests with `pytest.mark.anyio`."""
    return "asyncio"


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function in its own event loop."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj) or pyfuncitem.get_closest_marker("anyio"):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    return sources.fetch("smollm2")


@pytest.fixture(scope="session")
def minilm_path() -> Path:
    return sources.fetch("minilm")


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory, serving: Serving) -> Iterator[Running]:
    """One server with scripted models for all that need no settings of their own."""
    config = {
        "models": {
            "echo": {"engine": "scripted"},
            "poet": {
                "engine": "scripted",
                "replies": [
                    {"match": "(?i)weather", "output": "It is sunny in Paris today."},
                    {"match": "(?i)emoji", "output": "a 😀 b"},
                    {"output": "Roses are red, violets are blue."},
                ],
            },
            "slow": {"engine": "scripted", "tokens_per_second": 20, "replies": [{"output": "tick " * 400}], "slots": 2},
            "failing": {"engine": "scripted", "fail_after": 2, "replies": [{"output": "one two three four"}]},
            "failing-at-once": {"engine": "scripted", "fail_after": 0, "replies": [{"output": "one"}]},
            "crashing": {"engine": "scripted", "crash_after": 2, "replies": [{"output": "one two three four"}]},
            "short": {"engine": "scripted", "context": 20},
            "org/nested": {"engine": "scripted"},
        },
        "aliases": {"gpt-*": "poet"},
        "default": "echo",
    }
    with serving(tmp_path_factory.mktemp("scripted"), config) as running:
        yield running


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path, serving: Serving) -> Iterator[Running]:
    """One server with the real model."""
    # The developer may have tuned the model. Tests must not depend on it.
    config = {"models": {"smollm2": {"source": str(smollm2_path), "context": 2048, "slots": 4, "layout": "as-is"}}}
    with serving(tmp_path_factory.mktemp("smollm2"), config) as running:
        yield running


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A Postgres server; each test makes databases of its own in it."""
    with run_postgres() as server:
        yield server
