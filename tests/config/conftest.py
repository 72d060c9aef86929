"""Loads settings from a file in the working directory of the test."""

from pathlib import Path

import msgspec
import pytest

from dragoman.config.loading import Flags, default_address, load_settings
from dragoman.config.sections import MEMORY
from dragoman.config.settings import Settings


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(text: str, flags: Flags | None = None, environ: dict[str, str] | None = None) -> Settings:
    """The settings, with the default address of the storage as in `Settings`."""
    Path("dragoman.yaml").write_text(text)
    settings = load_settings(None, flags or Flags(), environ or {})
    if settings.storage.address != default_address():
        return settings
    return msgspec.structs.replace(settings, storage=msgspec.structs.replace(settings.storage, address=MEMORY))


def without_locations(settings: Settings) -> Settings:
    """Remove the lines of the models, for comparison."""
    models = tuple(msgspec.structs.replace(model, location=None) for model in settings.models)
    return msgspec.structs.replace(settings, models=models)
