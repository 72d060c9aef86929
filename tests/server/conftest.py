from collections.abc import Callable, Iterator

import httpx
import msgspec
import pytest

from dragoman.config.sections import KeyLimits
from dragoman.core.types import RouteScope
from dragoman.storage.keys import KeyStore
from tests.support.requests import CHAT, ask, talking, text_of
from tests.support.sdk import ModelClient, sdk
from tests.support.server_process import Running, Serving

HEADER_BYTES = 4096
BODY_SECONDS = 1
BODY_BYTES = 4 * 1024 * 1024


@pytest.fixture(scope="session")
def poet(scripted: Running) -> Iterator[ModelClient]:
    with sdk(scripted) as client:
        yield ModelClient(client, scripted, "poet")


@pytest.fixture(scope="session")
def smol(smollm2: Running) -> Iterator[ModelClient]:
    with sdk(smollm2) as client:
        yield ModelClient(client, smollm2, "smollm2")


@pytest.fixture(scope="session")
def server(scripted: Running) -> Running:
    """The server of `client`. Modules with a server of their own override it."""
    return scripted


@pytest.fixture
def client(server: Running) -> Iterator[httpx.Client]:
    with talking(server) as made:
        yield made


TIGHT = {
    "echo": {"engine": "scripted", "slots": 1, "chunk": 1000},
    # Ten minutes: a test that waits for the end of this reply fails.
    "slow": {"engine": "scripted", "slots": 1, "tokens_per_second": 20, "replies": [{"output": "tick" * 12_000}]},
    "slow-to-start": {"engine": "scripted", "slots": 1, "prefill_seconds": 600},
    "in-worker": {
        "engine": "scripted",
        "slots": 1,
        "tokens_per_second": 20,
        "crash_after": 100_000,
        "replies": [{"output": "tick" * 12_000}],
    },
}
TIGHT_LIMITS = {"header_bytes": HEADER_BYTES, "body_bytes": BODY_BYTES, "queue": 1}


@pytest.fixture(scope="session")
def tight(tmp_path_factory: pytest.TempPathFactory, serving: Serving) -> Iterator[Running]:
    """A server with low limits. Every model has one slot, and one more request may wait."""
    with serving(tmp_path_factory.mktemp("tight"), {"models": TIGHT, "limits": TIGHT_LIMITS}) as running:
        yield running


@pytest.fixture(scope="session")
def impatient(tmp_path_factory: pytest.TempPathFactory, serving: Serving) -> Iterator[Running]:
    """The same server with one second to send a request and one second to read more of the response."""
    limits = TIGHT_LIMITS | {"body_seconds": BODY_SECONDS, "write_seconds": 1}
    with serving(tmp_path_factory.mktemp("impatient"), {"models": TIGHT, "limits": limits}) as running:
        yield running


@pytest.fixture
def served_afterwards(tight: Running) -> Iterator[None]:
    yield
    with talking(tight) as client:
        assert text_of(ask(client, CHAT)) == "hello"


Make = Callable[..., str]


@pytest.fixture
def make(store: KeyStore) -> Make:
    """Creates keys in the fixture `store` of the module."""

    def made(
        name: str = "anna", models: tuple[str, ...] = (), routes: tuple[RouteScope, ...] = (), **limits: int
    ) -> str:
        return store.create(name, models=models, routes=routes, limits=msgspec.convert(limits, KeyLimits))[0]

    return made
