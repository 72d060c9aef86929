import os
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from dragoman.files import sources
from tests.support.server_process import Running, serving

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
REAL_MODELS = ("smollm2_path", "minilm_path", "smol")
"""Fixtures of tests that compute with a real model; a parameter may name one, too."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        asked = getattr(item, "fixturenames", ())
        if spec := getattr(item, "callspec", None):
            asked = [*asked, *spec.params.values()]
        if any(name in REAL_MODELS for name in asked):
            item.add_marker("model")
        if item.path.is_relative_to(TESTS / "server") or item.path.is_relative_to(TESTS / "security"):
            item.add_marker("server")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    return sources.fetch("smollm2")


@pytest.fixture(scope="session")
def minilm_path() -> Path:
    return sources.fetch("minilm")


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
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
def smollm2(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[Running]:
    """One server with the real model."""
    # The developer may have tuned the model. Tests must not depend on it.
    config = {"models": {"smollm2": {"source": str(smollm2_path), "context": 2048, "slots": 4, "layout": "as-is"}}}
    with serving(tmp_path_factory.mktemp("smollm2"), config) as running:
        yield running
