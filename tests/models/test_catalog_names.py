"""One entry of the configuration, several models: the names of adapters, and what a new configuration makes of them."""

from pathlib import Path
from typing import Any

import pytest

from dragoman.config.model_spec import ModelSpec
from dragoman.config.settings import Settings
from dragoman.core.errors import ConfigError, ModelNotFound
from dragoman.engines.scripted import ScriptedEngine, ScriptedOptions
from dragoman.models import Catalog
from dragoman.models.static_info import wrong_files
from tests.files.test_gguf import WHOLE

FILE = "/nowhere/m.gguf"


def spec(name: str = "base", adapters: dict[str, Any] | None = None, **options: Any) -> ModelSpec:
    given = {**options, "adapters": adapters} if adapters else options
    return ModelSpec(name, "llama", FILE, given, adapters=tuple(adapters or ()))


def settings(*models: ModelSpec, **others: Any) -> Settings:
    return Settings(models=models, models_dir=(), **others)


LEGAL = {"base-legal": "legal.gguf"}
BOTH = LEGAL | {"base-poet": {"path": "poet.gguf", "scale": 0.5}}


def test_all_names_of_a_model_lead_to_one_engine() -> None:
    catalog = Catalog(settings(spec(adapters=BOTH), spec("other"), aliases={"tuned-*": "base-poet"}))
    assert [model.name for model in catalog.listed()] == ["base", "base-legal", "base-poet", "other"]
    host = catalog.resolve("base").host
    assert catalog.resolve("BASE-Legal").host is catalog.resolve("tuned-1").host is host
    assert catalog.resolve("tuned-1").name == "base-poet"
    assert catalog.resolve("other").host is not host
    with pytest.raises(ModelNotFound, match="did you mean base-legal"):
        catalog.resolve("base-lega")


def test_the_most_exact_alias_counts_wherever_it_stands() -> None:
    aliases = {"*": "a", "gpt-*": "b", "gpt-4*": "c", "*-mini": "a", "gpt-?": "d", "gpt-4": "e"}
    catalog = Catalog(settings(*(spec(name) for name in "abcde"), aliases=aliases))
    wanted = {"x": "a", "gpt-55": "b", "gpt-45": "c", "gpt-4-mini": "c", "GPT-5": "d", "gpt-4": "e", "o-mini": "a"}
    assert {name: catalog.resolve(name).name for name in wanted} == wanted


def test_a_new_configuration_keeps_an_engine_only_with_the_same_adapters() -> None:
    catalog = Catalog(settings(spec(adapters=LEGAL), keep_alive=60.0))
    host = catalog.resolve("base").host
    catalog.reconfigure(settings(spec(adapters=LEGAL), keep_alive=5.0))
    assert catalog.resolve("base").host is catalog.resolve("base-legal").host is host
    assert catalog.lifecycle.seat(host).keep_alive == 5
    catalog.reconfigure(settings(spec(adapters=BOTH)))
    assert catalog.resolve("base").host is catalog.resolve("base-poet").host
    assert catalog.resolve("base").host is not host
    catalog.reconfigure(settings(spec()))
    with pytest.raises(ModelNotFound):
        catalog.resolve("base-legal")
    assert list(catalog.models) == ["base"]


def test_an_adapters_name_may_become_that_of_a_model_of_its_own() -> None:
    catalog = Catalog(settings(spec(adapters=LEGAL)))
    host = catalog.resolve("base").host
    catalog.reconfigure(settings(spec("base-legal"), spec()))
    assert catalog.resolve("base-legal").host is not catalog.resolve("base").host
    assert host not in (catalog.resolve("base-legal").host, catalog.resolve("base").host)


def test_a_name_that_is_taken_changes_nothing() -> None:
    catalog = Catalog(settings(spec()), [ScriptedEngine("own", ScriptedOptions())])
    host = catalog.resolve("base").host
    with pytest.raises(ConfigError, match="two models are called 'OWN'"):
        catalog.reconfigure(settings(spec(adapters={"OWN": "legal.gguf"})))
    assert catalog.resolve("base").host is host


def test_the_files_of_adapters_are_missed(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(WHOLE)
    (tmp_path / "a.gguf").touch()
    adapters = {"a": str(tmp_path / "a.gguf"), "b": {"path": str(tmp_path / "b.gguf")}}
    found = ModelSpec("m", "llama", str(tmp_path / "m.gguf"), {"adapters": adapters}, adapters=("a", "b"))
    assert [mistake.message for mistake in wrong_files([found])] == [f"there is no adapter at {tmp_path / 'b.gguf'}"]
