from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.security.credentials import Authority
from tests.support.server_process import Running, Serving


@dataclass
class Guarded:
    """A server that accepts every kind of key, and the authority that makes them."""

    running: Running
    authority: Authority
    folder: Path


@pytest.fixture(scope="package")
def guarded(tmp_path_factory: pytest.TempPathFactory, serving: Serving) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    authority = Authority(folder)
    models = {"echo": {"engine": "scripted"}, "other": {"engine": "scripted"}}
    config = {"models": models, "default": "echo", "aliases": {"gpt-*": "other"}, **authority.config}
    with serving(folder, config) as running:
        yield Guarded(running, authority, folder)
