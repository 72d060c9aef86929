from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An own directory for stored models, and no proxies."""
    monkeypatch.setenv("DRAGOMAN_HOME", str(tmp_path / "home"))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
    return tmp_path / "home"


@pytest.fixture
def use_hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes huggingface_hub use the server at an address."""
    constants = pytest.importorskip("huggingface_hub.constants")

    def use(url: str) -> None:
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)

    return use
