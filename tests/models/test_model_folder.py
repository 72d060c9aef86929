"""Models in the models folder."""

import asyncio
import struct
import threading
from pathlib import Path
from typing import Any

import pytest

from dragoman.config.model_spec import ModelSpec
from dragoman.config.settings import Limits, Settings
from dragoman.core.errors import ModelNotFound
from dragoman.files.discovery import Discovery
from dragoman.models import Catalog
from tests.support.gguf_files import gguf, pair, text

HEAD = gguf(pair("general.architecture", 8, text("llama")), pair("llama.block_count", 4, struct.pack("<I", 1)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("gpt-4o", "big"):
        (tmp_path / f"{name}.gguf").write_bytes(HEAD)
    return tmp_path


def settings(folder: Path, *models: ModelSpec, **others: Any) -> Settings:
    return Settings(models=models, models_dir=(str(folder),), **others)


async def test_reconfigure_applies_to_folder_models(folder: Path) -> None:
    catalog = Catalog(settings(folder, keep_alive=60.0))
    host = (await catalog.find("big")).host
    catalog.reconfigure(settings(folder, keep_alive=5.0, limits=Limits(queue=7)))
    model = await catalog.find("big")
    assert model.host is host
    assert (catalog.lifecycle.residency_of(host).keep_alive, host.limits.queue) == (5.0, 7)
    catalog.reconfigure(settings(folder, layout="as-is"))
    model = await catalog.find("big")
    assert model.spec is not None
    assert (model.spec.options, model.host is host) == ({"layout": "as-is"}, False)
    assert (await catalog.find("big")).host is model.host
    await catalog.stop()


async def test_model_of_a_removed_folder_is_removed(folder: Path) -> None:
    catalog = Catalog(settings(folder))
    await catalog.find("big")
    catalog.reconfigure(Settings(models=(ModelSpec("m", "scripted"),), models_dir=()))
    with pytest.raises(ModelNotFound):
        await catalog.find("big")
    assert [model.name for model in catalog.list_models()] == ["m"]
    await catalog.stop()


async def test_reconfigure_during_a_scan_keeps_folder_models(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began, may_end = threading.Event(), threading.Event()
    real_scan = Discovery.scan

    def slow(discovery: Discovery) -> None:
        real_scan(discovery)
        began.set()
        assert may_end.wait(60)

    catalog = Catalog(settings(folder))
    host = (await catalog.find("big")).host
    monkeypatch.setattr(Discovery, "scan", slow)
    catalog.reconfigure(settings(folder))
    scan = asyncio.create_task(catalog.scan())
    await asyncio.to_thread(began.wait, 5)
    catalog.reconfigure(settings(folder))
    may_end.set()
    await scan
    assert catalog.resolve("big").host is host
    await catalog.stop()


async def test_not_found_error_lists_available_models(folder: Path) -> None:
    for name in ("one", "two"):
        (folder / name).mkdir()
        (folder / name / "same.gguf").write_bytes(HEAD)
    (folder / "weights").mkdir()
    (folder / "weights/config.json").write_text("{}")
    (folder / "weights/model.safetensors").write_bytes(bytes(8))
    catalog = Catalog(settings(folder))
    with pytest.raises(ModelNotFound, match=r"did you mean one/same or two/same\?"):
        await catalog.find("same")
    with pytest.raises(ModelNotFound) as refusal:
        await catalog.find("nothing of the kind")
    listed = [model.name for model in catalog.list_models()]
    assert f"models: {', '.join(listed)} (" in str(refusal.value)
    await catalog.stop()


async def test_alias_precedes_a_folder_model(folder: Path) -> None:
    aliases = {"gpt-*": "m", "mine": "big", "m2:latest": "m"}
    catalog = Catalog(settings(folder, ModelSpec("m", "scripted"), aliases=aliases))
    assert catalog.resolve("gpt-4o").name == "m"
    await catalog.scan()
    names = ("gpt-4o", "GPT-4o:latest", "m:latest", "m2:latest", "mine", "big", "big:latest", "")
    assert [catalog.resolve(name).name for name in names] == ["m", "m", "m", "m", "big", "big", "big", "m"]
    await catalog.stop()
