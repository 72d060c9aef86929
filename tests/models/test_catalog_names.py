"""Names, aliases and adapters of configured models."""

from pathlib import Path
from typing import Any

import pytest

from dragoman.config.model_spec import ModelSpec
from dragoman.config.settings import Settings
from dragoman.core.errors import ConfigError, ModelNotFound
from dragoman.engines.scripted import ScriptedEngine, ScriptedOptions
from dragoman.models import Catalog
from dragoman.server.preflight_checks import find_diagnostics
from tests.support.gguf_files import WHOLE

FILE = "/nowhere/m.gguf"


def spec(name: str = "base", adapters: dict[str, Any] | None = None, **options: Any) -> ModelSpec:
    given = {**options, "adapters": adapters} if adapters else options
    return ModelSpec(name, "llama", FILE, given, adapters=tuple(adapters or ()))


def settings(*models: ModelSpec, **others: Any) -> Settings:
    return Settings(models=models, models_dir=(), **others)


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
    assert catalog.resolve("base-legal").host is not catalog.resolve("base").host
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
