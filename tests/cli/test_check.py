"""`dragoman check`, as a user types it."""

from pathlib import Path

from tests.cli.test_cli import refused, run


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


def test_no_such_configuration(tmp_path: Path) -> None:
    assert "cannot read the configuration none.yaml" in refused(run(tmp_path, "check", "--config", "none.yaml"))


def test_keys_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "dragoman.yaml").write_text(
        "models:\n  a: {engine: upstream, urls: [http://b, {url: http://c, key_env: NO_SUCH_KEY}]}\n"
    )
    assert refused(run(tmp_path, "check")) == "models.a: the environment variable NO_SUCH_KEY has no key for http://c"
