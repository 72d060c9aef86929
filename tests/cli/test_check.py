"""`dragoman check`, as a user types it."""

from pathlib import Path

from tests.cli.test_cli import refused, run
from tests.engines.adapters import write_adapter


def test_a_sound_configuration(tmp_path: Path) -> None:
    (tmp_path / "dragoman.yaml").write_text("models: {a: {engine: scripted}, b: smollm2}\n")
    done = run(tmp_path, "check")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "the configuration is sound; models: a, b\n"


def test_every_mistake_is_a_line(tmp_path: Path) -> None:
    (tmp_path / "team.yaml").write_text("models:\n  a: {engine: scripted, chunk: 0}\nport: x\n")
    done = run(tmp_path, "check", "--config", "team.yaml")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "dragoman: team.yaml:2: models.a.chunk: expected int >= 1",
        "dragoman: team.yaml:3: port: expected int, got str",
    ]


def test_files_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "dragoman.yaml").write_text("models: {a: ./gone.gguf}\n")
    assert refused(run(tmp_path, "check")).startswith("model a: no file gone.gguf; a source is a path")


def test_files_that_the_server_itself_needs(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("short")
    (tmp_path / "keys.db").write_text("no database at all, but long enough to be taken for one" * 20)
    (tmp_path / "dragoman.yaml").write_text(
        "models: {a: {engine: scripted}}\n"
        "tls: {certificate: gone.pem, key: gone.key}\n"
        "keys: {store: keys.db, jwt: {algorithm: HS256, key_file: secret}}\n"
    )
    done = run(tmp_path, "check")
    told = done.stderr.splitlines()
    assert (done.returncode, len(told)) == (2, 3)
    assert told[0] == "dragoman: tls: gone.pem and gone.key cannot be used: No such file or directory"
    assert "at least 32 bytes" in told[1]
    assert "keys.db cannot be read" in told[2]


def test_adapters_that_would_not_be_loaded(tmp_path: Path, smollm2_path: Path) -> None:
    whole = write_adapter(tmp_path / "whole.gguf")
    (tmp_path / "tiny.gguf").write_bytes(b"hello")
    (tmp_path / "half.gguf").write_bytes(whole.read_bytes()[:-5000])
    write_adapter(tmp_path / "other.gguf", architecture="qwen2")
    files = {"a": "whole.gguf", "b": "tiny.gguf", "c": "half.gguf", "d": "other.gguf", "e": str(smollm2_path)}
    adapters = ", ".join(f"{name}: {file}" for name, file in files.items())
    (tmp_path / "dragoman.yaml").write_text(f"models: {{base: {{path: {smollm2_path}, adapters: {{{adapters}}}}}}}\n")
    done = run(tmp_path, "check")
    told = done.stderr.splitlines()
    assert (done.returncode, len(told)) == (2, 4)
    for line, name, words in zip(
        told,
        "bcde",
        ("does not begin with GGUF", "it is cut off", "architecture qwen2, and this one is llama", "no LoRA adapter"),
        strict=True,
    ):
        assert line.startswith(f"dragoman: model base: adapter {name}: "), line
        assert words in line


def test_numbers_that_llama_cannot_have(tmp_path: Path) -> None:
    (tmp_path / "dragoman.yaml").write_text(
        "models:\n"
        "  smollm2:\n"
        "    threads: 100000\n"
        "    context: 99999999999\n"
        "    adapters: {a: {path: a.gguf, scale: .nan}}\n"
    )
    assert run(tmp_path, "check").stderr.splitlines() == [
        "dragoman: dragoman.yaml:3: models.smollm2.threads: expected int <= 512",
        "dragoman: dragoman.yaml:4: models.smollm2.context: expected int <= 100000000",
        "dragoman: dragoman.yaml:5: models.smollm2.adapters[...]: scale: expected a number that is finite",
    ]


def test_what_does_nothing_is_noted(tmp_path: Path) -> None:
    (tmp_path / "dragoman.yaml").write_text("models: {smollm2: {isolate: true}}\nkeys: {store: keys.db}\n")
    done = run(tmp_path, "check")
    assert (done.returncode, done.stdout) == (0, "the configuration is sound; models: smollm2\n")
    words = "note: model smollm2: isolate does nothing where no API key is asked for: all callers are one\n"
    assert done.stderr == words
    with (tmp_path / "dragoman.yaml").open("a") as file:
        file.write("api_keys: [secret]\n")
    assert run(tmp_path, "check").stderr == ""


def test_no_such_configuration(tmp_path: Path) -> None:
    assert "cannot read the configuration none.yaml" in refused(run(tmp_path, "check", "--config", "none.yaml"))
