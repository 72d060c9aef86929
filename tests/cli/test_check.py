"""`dragoman check`, run as a command."""

import contextlib
from pathlib import Path

import pytest

from dragoman.cli import main
from tests.cli.test_cli import refused, run
from tests.engines.lora_files import write_adapter


def test_valid_configuration(tmp_path: Path) -> None:
    (tmp_path / "dragoman.yaml").write_text("models: {a: {engine: scripted}, b: smollm2}\n")
    done = run(tmp_path, "check")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "the configuration is valid; models: a, b\n"


def test_each_error_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "team.yaml").write_text("models:\n  a: {engine: scripted, chunk: 0}\nport: x\n")
    done = run(tmp_path, "check", "--config", "team.yaml")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "dragoman: team.yaml:2: models.a.chunk: expected int >= 1",
        "dragoman: team.yaml:3: port: expected int, got str",
    ]


def test_missing_model_file(tmp_path: Path) -> None:
    (tmp_path / "dragoman.yaml").write_text("models: {a: ./gone.gguf}\n")
    assert refused(run(tmp_path, "check")).startswith(
        "dragoman.yaml:1: models.a: no file gone.gguf; a source is a path"
    )


def test_missing_and_invalid_server_files(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("short")
    (tmp_path / "keys.db").write_text("not a database" * 20)
    (tmp_path / "dragoman.yaml").write_text(
        "models: {a: {engine: scripted}}\n"
        "tls: {certificate: gone.pem, key: gone.key}\n"
        "keys: {store: keys.db, jwt: {algorithm: HS256, key_file: secret}}\n"
    )
    done = run(tmp_path, "check")
    lines = done.stderr.splitlines()
    assert (done.returncode, len(lines)) == (2, 4)
    assert lines[0] == "dragoman: dragoman.yaml:2: tls.certificate: there is no file gone.pem"
    assert lines[1] == "dragoman: dragoman.yaml:2: tls.key: there is no file gone.key"
    assert lines[2].startswith("dragoman: dragoman.yaml:3: keys.jwt.key_file: a secret for HS256 has at least 32 bytes")
    assert lines[3].startswith("dragoman: dragoman.yaml:3: keys.store: the keys in keys.db cannot be read")


FILES = {
    "models:\n  a: {engine: scripted}\n  b: ./text.gguf\n": "3: models.b: text.gguf is not a GGUF file",
    "models:\n  b:\n    path: ./text.gguf\n": "3: models.b.path: text.gguf is not a GGUF file",
    "models: {b: 'hf:bogus'}\n": "1: models.b: 'hf:bogus' is not a source; write hf:ORG/REPO/FILE.gguf",
    "models: {b: 'pypi:'}\n": "1: models.b: 'pypi:' is not a source; write pypi:PACKAGE",
    "models:\n  b: {source: 'https://a.example/b.gguf#sha256=zz'}\n": "2: models.b.source: https://a.example/b.gguf: ",
    "strict: true\nevent_log: none/e.jsonl\n": "2: event_log: there is no folder none",
    "event_log: .\n": "1: event_log: . is a folder; expected a file",
    "socket: none/s\n": "1: socket: there is no folder none",
    "keys:\n  store: none/k.db\n": "2: keys.store: there is no folder none; `dragoman keys create NAME` makes it",
    "keys: {jwt: {algorithm: HS256, key_file: gone}}\n": "1: keys.jwt.key_file: gone cannot be read: No such file",
    "tls: {certificate: text.gguf, key: text.gguf}\n": "1: tls: text.gguf and text.gguf cannot be used",
}


@pytest.mark.parametrize("written", FILES)
def test_errors_in_named_files(tmp_path: Path, written: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.gguf").write_text("a text of more than a few bytes")
    (tmp_path / "c.yaml").write_text(written)
    with contextlib.chdir(tmp_path):
        assert main(["check", "--config", "c.yaml"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"dragoman: c.yaml:{FILES[written]}")


def test_error_of_flag_has_no_line(tmp_path: Path) -> None:
    (tmp_path / "dragoman.yaml").write_text("models: {a: {engine: scripted}}\nevent_log: e.jsonl\n")
    assert refused(run(tmp_path, "serve", "--event-log", "none/e")) == "--event-log none/e: there is no folder none"


def test_warnings_about_unused_settings(tmp_path: Path) -> None:
    (tmp_path / "dragoman.yaml").write_text(
        "models:\n"
        "  a: {engine: scripted}\n"
        "  cloud: {engine: upstream, url: 'http://127.0.0.1:9/v1', models: all}\n"
        "models_dir: ./none\n"
        "aliases:\n"
        "  cloud/x*: a\n"
        "  clou*: a\n"
    )
    done = run(tmp_path, "check")
    assert done.returncode == 0
    first, second = done.stderr.splitlines()
    assert first == "dragoman: warning: dragoman.yaml:4: models_dir: there is no folder none yet, so it has no models"
    assert second.startswith("dragoman: warning: dragoman.yaml:6: aliases.cloud/x*: never used: requests")


def test_warnings_about_context_and_threads(tmp_path: Path, smollm2_path: Path, minilm_path: Path) -> None:
    (tmp_path / "dragoman.yaml").write_text(
        "models:\n"
        f"  a:\n    source: {smollm2_path}\n    context: 20000\n    slots: 1\n    isolate: false\n    threads: 512\n"
        f"  b:\n    source: {minilm_path}\n    context: 5000\n"
        f"  c:\n    source: {smollm2_path}\n    context: 20000000\n"
        f"  d:\n    source: {smollm2_path}\n    context: 8192\n    threads: 1\n"
    )
    done = run(tmp_path, "check")
    assert done.returncode == 0
    first, second, third, fourth, fifth = done.stderr.splitlines()
    begin = "dragoman: warning: dragoman.yaml:"
    assert first == (
        f"{begin}4: models.a.context: this model was trained for 8192 tokens; its output beyond them is of poor quality"
    )
    assert second.startswith(f"{begin}7: models.a.threads: 512 threads on ")
    assert third == (f"{begin}10: models.b.context: this model was trained for 512 tokens; longer inputs are refused")
    assert fourth.startswith(f"{begin}13: models.c.context: this model was trained for 8192 tokens")
    assert fifth.startswith(f"{begin}13: models.c.context: the slots need ")
    assert run(tmp_path, "serve", "--port", "0", stub_server=True).stderr == done.stderr


def test_layout_auto_is_accepted_with_a_warning(tmp_path: Path, smollm2_path: Path) -> None:
    entry = f"{{path: {smollm2_path}, layout: auto}}"
    (tmp_path / "dragoman.yaml").write_text(f"layout: auto\nmodels:\n  a: {smollm2_path}\n  b: {entry}\n")
    done = run(tmp_path, "check")
    assert done.returncode == 0
    first, second = done.stderr.splitlines()
    assert first.startswith("dragoman: warning: dragoman.yaml:1: layout: auto has no effect: run `dragoman tune MODEL`")
    assert second.startswith("dragoman: warning: dragoman.yaml:4: models.b.layout: auto has no effect: ")
    assert f"`dragoman tune {smollm2_path}`" in second
    assert run(tmp_path, "serve", "--port", "0", stub_server=True).stderr == done.stderr


def test_invalid_adapters(tmp_path: Path, smollm2_path: Path) -> None:
    whole = write_adapter(tmp_path / "whole.gguf")
    (tmp_path / "tiny.gguf").write_bytes(b"hello")
    (tmp_path / "half.gguf").write_bytes(whole.read_bytes()[:-5000])
    write_adapter(tmp_path / "other.gguf", architecture="qwen2")
    files = {"a": "whole.gguf", "b": "tiny.gguf", "c": "half.gguf", "d": "other.gguf", "e": str(smollm2_path)}
    adapters = "\n".join(f"      {name}: {file}" for name, file in files.items())
    (tmp_path / "dragoman.yaml").write_text(f"models:\n  base:\n    path: {smollm2_path}\n    adapters:\n{adapters}\n")
    done = run(tmp_path, "check")
    lines = done.stderr.splitlines()
    assert (done.returncode, len(lines)) == (2, 4)
    for at, line, name, message in zip(
        range(6, 10),
        lines,
        "bcde",
        (
            "does not begin with GGUF",
            "it is cut off",
            "architecture qwen2, but this model is llama",
            "not a LoRA adapter",
        ),
        strict=True,
    ):
        assert line.startswith(f"dragoman: dragoman.yaml:{at}: models.base.adapters.{name}: "), line
        assert message in line


def test_llama_options_out_of_range(tmp_path: Path) -> None:
    (tmp_path / "dragoman.yaml").write_text("models:\n  smollm2:\n    threads: 100000\n    context: 99999999999\n")
    assert run(tmp_path, "check").stderr.splitlines() == [
        "dragoman: dragoman.yaml:3: models.smollm2.threads: expected int <= 512",
        "dragoman: dragoman.yaml:4: models.smollm2.context: expected int <= 20000000",
    ]


def test_warning_about_isolate_without_keys(tmp_path: Path) -> None:
    (tmp_path / "dragoman.yaml").write_text("models: {smollm2: {isolate: true}}\nkeys: {store: keys.db}\n")
    done = run(tmp_path, "check")
    assert (done.returncode, done.stdout) == (0, "the configuration is valid; models: smollm2\n")
    assert done.stderr == (
        "dragoman: warning: dragoman.yaml:1: models.smollm2.isolate: has no effect without API keys: "
        "all callers share one identity\n"
    )
    with (tmp_path / "dragoman.yaml").open("a") as file:
        file.write("api_keys: [secret]\n")
    assert run(tmp_path, "check").stderr == ""


def test_warning_about_too_many_workers(tmp_path: Path) -> None:
    (tmp_path / "dragoman.yaml").write_text("models: {a: {engine: scripted}}\nworkers: 100000\n")
    done = run(tmp_path, "check")
    assert done.returncode == 0
    assert done.stderr.startswith("dragoman: warning: dragoman.yaml:2: workers: 100000 processes are too many for ")
    assert done.stderr.count("\n") == 1
    (tmp_path / "dragoman.yaml").write_text("models: {a: {engine: scripted}}\nworkers: 4\n")
    assert run(tmp_path, "check").stderr == ""


def test_missing_configuration_file(tmp_path: Path) -> None:
    assert "cannot read the configuration none.yaml" in refused(run(tmp_path, "check", "--config", "none.yaml"))


def test_missing_upstream_key(tmp_path: Path) -> None:
    (tmp_path / "dragoman.yaml").write_text(
        "models:\n  a: {engine: upstream, urls: [http://b, {url: http://c, key_env: NO_SUCH_KEY}]}\n"
    )
    assert (
        refused(run(tmp_path, "check"))
        == "dragoman.yaml:2: models.a: the environment variable NO_SUCH_KEY has no key for http://c"
    )
