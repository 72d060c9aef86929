"""Names, aliases and adapters of configured models, and the models in the models folder."""

import asyncio
import struct
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dragoman.config.model_spec import ModelSpec
from dragoman.config.settings import Limits, Settings
from dragoman.core.errors import ConfigError, ModelNotFound
from dragoman.engines.scripted import ScriptedEngine, ScriptedOptions
from dragoman.files.discovery import Discovery
from dragoman.models import Catalog
from dragoman.server.preflight_checks import find_diagnostics
from tests.support.gguf_files import WHOLE, gguf, pair, text

FILE = "/nowhere/m.gguf"
HEAD = gguf(pair("general.architecture", 8, text("llama")), pair("llama.block_count", 4, struct.pack("<I", 1)))


def spec(name: str = "base", adapters: dict[str, Any] | None = None, **options: Any) -> ModelSpec:
    given = {**options, "adapters": adapters} if adapters else options
    return ModelSpec(name, "llama", FILE, given, adapters=tuple(adapters or ()))


def settings(*models: ModelSpec, folder: Path | None = None, **others: Any) -> Settings:
    return Settings(models=models, models_dir=() if folder is None else (str(folder),), **others)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("gpt-4o", "big"):
        (tmp_path / f"{name}.gguf").write_bytes(HEAD)
    return tmp_path


LEGAL = {"base-legal": "legal.gguf"}
BOTH = LEGAL | {"base-poet": {"path": "poet.gguf", "scale": 0.5}}


def test_all_names_of_a_model_share_a_host() -> None:
    catalog = Catalog(settings(spec(adapters=BOTH), spec("other"), aliases={"tuned-*": "base-poet"}))
    assert [model.name for model in catalog.list_models()] == ["base", "base-legal", "base-poet", "other"]
    host = catalog.resolve("base").host
    assert catalog.resolve("BASE-Legal").host is catalog.resolve("tuned-1").host is host
    assert catalog.resolve("tuned-1").name == "base-poet"
    assert catalog.resolve("other").host is not host
    with pytest.raises(ModelNotFound, match="did you mean base-legal"):
        catalog.resolve("base-lega")


def test_names_with_the_same_file_and_options_share_a_host() -> None:
    specs = [spec("a", context=512), spec("b", context=512), spec("c", context=256)]
    specs[1] = msgspec.structs.replace(specs[1], keep_alive=60.0)
    catalog = Catalog(settings(*specs, keep_alive=5.0))
    host = catalog.resolve("a").host
    assert catalog.resolve("b").host is host is not catalog.resolve("c").host
    assert catalog.lifecycle.residency_of(host).keep_alive == 60
    catalog.reconfigure(settings(specs[0], spec("b", context=256), specs[2]))
    assert catalog.resolve("a").host is host is not catalog.resolve("b").host
    assert catalog.resolve("b").host is catalog.resolve("c").host
    catalog.reconfigure(settings(spec("renamed", context=512)))
    assert catalog.resolve("renamed").host is host


def test_name_and_path_of_the_same_file_share_a_host(smollm2_path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.gguf"
    link.symlink_to(smollm2_path)
    sources = {"name": "smollm2", "path": str(smollm2_path), "link": str(link), "other": FILE}
    catalog = Catalog(settings(*(ModelSpec(name, "llama", source) for name, source in sources.items())))
    hosts = {name: catalog.resolve(name).host for name in sources}
    assert hosts["name"] is hosts["path"] is hosts["link"] is not hosts["other"]


def test_alias_of_whatever_a_request_may_name(folder: Path) -> None:
    aliases = {"best": "GOOD", "good": "base:latest", "mine": "llama:7b", "any-*": "best", "x": "y", "y": "x"}
    catalog = Catalog(settings(spec(), folder=folder, aliases=aliases))
    (folder / "gpt-4o.gguf").unlink()
    asyncio.run(catalog.scan())
    assert {catalog.resolve(name).name for name in ("best", "good", "any-1")} == {"base"}
    with pytest.raises(ModelNotFound):
        catalog.resolve("mine")
    with pytest.raises(ModelNotFound):
        catalog.resolve("x")
    assert catalog.resolve("llama").name == "big"


def test_ambiguous_architecture_lists_the_candidates(folder: Path) -> None:
    catalog = Catalog(settings(spec(), folder=folder))
    asyncio.run(catalog.scan())
    with pytest.raises(ModelNotFound, match="did you mean big or gpt-4o"):
        catalog.resolve("llama")


def test_most_specific_alias_wins() -> None:
    aliases = {"*": "a", "gpt-*": "b", "gpt-4*": "c", "*-mini": "a", "gpt-?": "d", "gpt-4": "e"}
    catalog = Catalog(settings(*(spec(name) for name in "abcde"), aliases=aliases))
    wanted = {"x": "a", "gpt-55": "b", "gpt-45": "c", "gpt-4-mini": "c", "GPT-5": "d", "gpt-4": "e", "o-mini": "a"}
    assert {name: catalog.resolve(name).name for name in wanted} == wanted


def test_reconfigure_keeps_a_host_with_the_same_adapters() -> None:
    catalog = Catalog(settings(spec(adapters=LEGAL), keep_alive=60.0))
    host = catalog.resolve("base").host
    catalog.reconfigure(settings(spec(adapters=LEGAL), keep_alive=5.0))
    assert catalog.resolve("base").host is catalog.resolve("base-legal").host is host
    assert catalog.lifecycle.residency_of(host).keep_alive == 5
    catalog.reconfigure(settings(spec(adapters=BOTH)))
    assert catalog.resolve("base").host is catalog.resolve("base-poet").host
    assert catalog.resolve("base").host is not host
    catalog.reconfigure(settings(spec()))
    with pytest.raises(ModelNotFound):
        catalog.resolve("base-legal")
    assert list(catalog.models) == ["base"]


def test_adapter_name_can_become_a_model() -> None:
    catalog = Catalog(settings(spec(adapters=LEGAL)))
    host = catalog.resolve("base").host
    catalog.reconfigure(settings(spec("base-legal"), spec()))
    assert catalog.resolve("base-legal").host is catalog.resolve("base").host
    assert host not in (catalog.resolve("base-legal").host, catalog.resolve("base").host)


def test_duplicate_name_changes_nothing() -> None:
    catalog = Catalog(settings(spec()), [ScriptedEngine("own", ScriptedOptions())])
    host = catalog.resolve("base").host
    with pytest.raises(ConfigError, match="two models are called 'OWN'"):
        catalog.reconfigure(settings(spec(adapters={"OWN": "legal.gguf"})))
    assert catalog.resolve("base").host is host


def test_missing_adapter_files_are_reported(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(WHOLE)
    (tmp_path / "a.gguf").touch()
    adapters = {"a": str(tmp_path / "a.gguf"), "b": {"path": str(tmp_path / "b.gguf")}}
    found = ModelSpec("m", "llama", str(tmp_path / "m.gguf"), {"adapters": adapters}, adapters=("a", "b"))
    errors = [found.message for found in find_diagnostics(settings(found)) if found.level == "error"]
    assert errors == [f"adapter not found: {tmp_path / 'b.gguf'}"]


async def test_reconfigure_applies_to_folder_models(folder: Path) -> None:
    catalog = Catalog(settings(folder=folder, keep_alive=60.0))
    host = (await catalog.find("big")).host
    catalog.reconfigure(settings(folder=folder, keep_alive=5.0, limits=Limits(queue=7)))
    model = await catalog.find("big")
    assert model.host is host
    assert (catalog.lifecycle.residency_of(host).keep_alive, host.limits.queue) == (5.0, 7)
    catalog.reconfigure(settings(folder=folder, layout="as-is"))
    model = await catalog.find("big")
    assert model.spec is not None
    assert (model.spec.options, model.host is host) == ({"layout": "as-is"}, False)
    assert (await catalog.find("big")).host is model.host
    await catalog.stop()


async def test_model_of_a_removed_folder_is_removed(folder: Path) -> None:
    catalog = Catalog(settings(folder=folder))
    await catalog.find("big")
    catalog.reconfigure(settings(ModelSpec("m", "scripted")))
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

    catalog = Catalog(settings(folder=folder))
    host = (await catalog.find("big")).host
    monkeypatch.setattr(Discovery, "scan", slow)
    catalog.reconfigure(settings(folder=folder))
    scan = asyncio.create_task(catalog.scan())
    await asyncio.to_thread(began.wait, 5)
    catalog.reconfigure(settings(folder=folder))
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
    catalog = Catalog(settings(folder=folder))
    with pytest.raises(ModelNotFound, match=r"did you mean one/same or two/same\? .* --alias '.*=one/same'"):
        await catalog.find("same")
    with pytest.raises(ModelNotFound) as refusal:
        await catalog.find("nothing of the kind")
    listed = [model.name for model in catalog.list_models()]
    assert f"models: {', '.join(listed)} (" in str(refusal.value)
    await catalog.stop()


async def test_alias_precedes_a_folder_model(folder: Path) -> None:
    aliases = {"gpt-*": "m", "mine": "big", "m2:latest": "m"}
    catalog = Catalog(settings(ModelSpec("m", "scripted"), folder=folder, aliases=aliases))
    assert catalog.resolve("gpt-4o").name == "m"
    await catalog.scan()
    names = ("gpt-4o", "GPT-4o:latest", "m:latest", "m2:latest", "mine", "big", "big:latest", "")
    assert [catalog.resolve(name).name for name in names] == ["m", "m", "m", "m", "big", "big", "big", "m"]
    await catalog.stop()
