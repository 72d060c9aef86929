from collections.abc import Iterator

import pytest

from tests.server.sdk import Asking, sdk
from tests.server.talking import CHAT, ask, talking, text_of
from tests.serving import Running, serving

HEADER_BYTES = 4096
BODY_BYTES = 4 * 1024 * 1024


@pytest.fixture(scope="session")
def poet(scripted: Running) -> Iterator[Asking]:
    with sdk(scripted) as client:
        yield Asking(client, scripted, "poet")


@pytest.fixture(scope="session")
def smol(smollm2: Running) -> Iterator[Asking]:
    with sdk(smollm2) as client:
        yield Asking(client, smollm2, "smollm2")


@pytest.fixture(scope="session")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose limits are near. Every model has one slot, and one more request may wait."""
    config = {
        "models": {
            "echo": {"engine": "scripted", "slots": 1, "chunk": 1000},
            "slow": {"engine": "scripted", "slots": 1, "tokens_per_second": 20, "replies": [{"output": "tick" * 400}]},
            "slow-to-start": {"engine": "scripted", "slots": 1, "prefill_seconds": 1.5},
            "in-worker": {
                "engine": "scripted",
                "slots": 1,
                "tokens_per_second": 20,
                "crash_after": 100_000,
                "replies": [{"output": "tick" * 400}],
            },
        },
        "limits": {
            "header_bytes": HEADER_BYTES,
            "body_bytes": BODY_BYTES,
            "body_seconds": 1,
            "write_seconds": 1,
            "queue": 1,
        },
    }
    with serving(tmp_path_factory.mktemp("tight"), config) as running:
        yield running


@pytest.fixture
def served_afterwards(tight: Running) -> Iterator[None]:
    yield
    with talking(tight) as client:
        assert text_of(ask(client, CHAT)) == "hello"
