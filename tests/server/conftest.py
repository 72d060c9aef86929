from collections.abc import Iterator

import pytest

from tests.server.sdk import Asking, sdk
from tests.serving import Running


@pytest.fixture(scope="session")
def poet(scripted: Running) -> Iterator[Asking]:
    with sdk(scripted) as client:
        yield Asking(client, scripted, "poet")


@pytest.fixture(scope="session")
def smol(smollm2: Running) -> Iterator[Asking]:
    with sdk(smollm2) as client:
        yield Asking(client, smollm2, "smollm2")
