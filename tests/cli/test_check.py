"""`dragoman check`."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from dragoman.cli import main
from tests.cli.test_cli import refused, run
from tests.engines.lora_files import write_adapter
from tests.support.gguf_files import tensor, with_tensors

Check = Callable[[str], list[str]]
ERROR, WARNING = "dragoman: dragoman.yaml:", "dragoman: warning: dragoman.yaml:"


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Check:
    """Checks a text as dragoman.yaml and returns the lines of stderr."""

    def check(written: str) -> list[str]:
        (tmp_path / "dragoman.yaml").write_text(written)
        with contextlib.chdir(tmp_path):
            code = main(["check"])
        out, err = capsys.readouterr()
        lines = err.splitlines()
        has_errors = any(line.startswith(ERROR) for line in lines)
        assert (code, out.startswith("the configuration is valid; models: ")) == (
            (2, False) if has_errors else (0, True)
        )
        return lines

    return check


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


ERRORS = {
    "models: {a: ./gone.gguf}\n": ["1: models.a: no file gone.gguf; a source is a path"],
    "models:\n  a: {engine: scripted}\n  b: ./text.gguf\n": ["3: models.b: text.gguf is not a GGUF file"],
    "models:\n  b:\n    path: ./text.gguf\n": ["3: models.b.path: text.gguf is not a GGUF file"],
    "models: {b: 'hf:bogus'}\n": ["1: models.b: 'hf:bogus' is not a source; write hf:ORG/REPO/FILE.gguf"],
    "models: {b: 'pypi:'}\n": ["1: models.b: 'pypi:' is not a source; write pypi:PACKAGE"],
    "models:\n  b: {source: 'https://a.example/b.gguf#sha256=zz'}\n": [
        "2: models.b.source: https://a.example/b.gguf: "
    ],
    "models:\n  smollm2:\n    threads: 100000\n    context: 99999999999\n": [
        "3: models.smollm2.threads: expected int <= 512",
        "4: models.smollm2.context: expected int <= 20000000",
    ],
    "models:\n  a: {engine: upstream, urls: [http://b, {url: http://c, key_env: NO_SUCH_KEY}]}\n": [
        "2: models.a: the environment variable NO_SUCH_KEY has no key for http://c"
    ],
    "strict: true\nevent_log: none/e.jsonl\n": ["2: event_log: there is no folder none"],
    "storage: mysql://x:secret@h/y\n": [
        "1: storage: expected memory, a path, or postgresql://USER:PASSWORD@HOST:PORT/NAME"
    ],
    "port: 1\nstorage: {address: 'sqlite:///x.db'}\n": ["2: storage: expected memory, a path, or postgresql://"],
    "storage: .\n": ["1: storage: . is a folder; expected a file"],
    "event_log: .\n": ["1: event_log: . is a folder; expected a file"],
    "record: none/r.jsonl\n": ["1: record: there is no folder none"],
    "event_log: r.jsonl\nrecord: r.jsonl\n": ["2: record: r.jsonl is the event log; give the recording a file"],
    "socket: none/s\n": ["1: socket: there is no folder none"],
    "keys:\n  store: none/k.db\n": ["2: keys.store: there is no folder none; `dragoman keys create NAME` makes it"],
    "keys: {jwt: {algorithm: HS256, key_file: gone}}\n": ["1: keys.jwt.key_file: gone cannot be read: No such file"],
    "models: {a: {engine: scripted}}\n"
    "tls: {certificate: gone.pem, key: gone.key}\n"
    "keys: {store: text.gguf, jwt: {algorithm: HS256, key_file: secret}}\n": [
        "2: tls.certificate: there is no file gone.pem",
        "2: tls.key: there is no file gone.key",
        "3: keys.jwt.key_file: a secret for HS256 has at least 32 bytes",
        "3: keys.store: the keys in text.gguf cannot be read",
    ],
    "tls: {certificate: text.gguf, key: text.gguf}\n": ["1: tls: text.gguf and text.gguf cannot be used"],
}


@pytest.mark.parametrize("written", ERRORS)
def test_errors(tmp_path: Path, check: Check, written: str) -> None:
    (tmp_path / "text.gguf").write_text("a text that is neither a model nor a database" * 20)
    (tmp_path / "secret").write_text("short")
    for line, expected in zip(check(written), ERRORS[written], strict=True):
        assert line.startswith(ERROR + expected)


def test_error_of_flag_has_no_line(tmp_path: Path) -> None:
    (tmp_path / "dragoman.yaml").write_text("models: {a: {engine: scripted}}\nevent_log: e.jsonl\n")
    assert refused(run(tmp_path, "serve", "--event-log", "none/e")) == "--event-log none/e: there is no folder none"


def test_no_file_is_reported(tmp_path: Path) -> None:
    done = run(tmp_path, "check")
    assert (done.returncode, done.stderr) == (0, "")
    missing = "there is no configuration file (--config FILE, $DRAGOMAN_CONFIG or ./dragoman.yaml)"
    assert done.stdout == f"{missing}; the defaults are valid; models: smollm2\n"


def test_public_address_without_keys(check: Check) -> None:
    written = "models: {a: {engine: scripted}}\nhost: 0.0.0.0\n"
    (line,) = check(written)
    assert line.startswith(f"{ERROR}2: host: 0.0.0.0 can be reached from other machines, and no API key is set; ")
    assert check(written + "api_keys: [secret]\n") == []


@pytest.mark.parametrize("kind", ["missing", "cut off"])
def test_only_the_default_model_needs_its_file_to_start(tmp_path: Path, check: Check, kind: str) -> None:
    content = with_tensors(tensor("a", 64))
    message = "no file broken.gguf"
    if kind == "cut off":
        (tmp_path / "broken.gguf").write_bytes(content[:-10])
        message = (
            f"broken.gguf is not a GGUF file: it is cut off: it has {len(content) - 10} bytes, and its tensors need "
        )
    written = "models:\n  a: {engine: scripted}\n  b: ./broken.gguf\n"
    (line,) = check(written)
    assert line.startswith(f"{ERROR}3: models.b: {message}")
    done = run(tmp_path, "serve", "--port", "0", stub_server=True)
    assert done.returncode == 0
    assert done.stderr.splitlines() == [line.replace(ERROR, WARNING)]
    (line,) = check(f"{written}default: b\n")
    assert run(tmp_path, "serve", "--port", "0").stderr.splitlines() == [line]


def test_damaged_files_of_the_models_directory(tmp_path: Path, check: Check) -> None:
    content = with_tensors(tensor("a", 64))
    (tmp_path / "models").mkdir()
    (tmp_path / "models/whole.gguf").write_bytes(content)
    (tmp_path / "models/cut.gguf").write_bytes(content[:-10])
    written = "models:\n  a: {engine: scripted}\nmodels_dir: models\n"
    (line,) = check(written)
    message = f"models/cut.gguf is not a GGUF file: it is cut off: it has {len(content) - 10} bytes, and its tensors"
    assert line.startswith(f"{WARNING}3: models_dir: not served: {tmp_path}/{message}")
    (tmp_path / "models/cut.gguf").rename(tmp_path / "models/named.gguf")
    (line,) = check(written.replace("scripted}\n", "scripted}\n  named: models/named.gguf\n"))
    assert line.startswith(f"{ERROR}3: models.named: models/named.gguf is not a GGUF file")


def test_warnings_about_unused_settings(check: Check) -> None:
    first, second = check(
        "models:\n"
        "  a: {engine: scripted}\n"
        "  cloud: {engine: upstream, url: 'http://127.0.0.1:9/v1', models: all}\n"
        "models_dir: ./none\n"
        "aliases:\n"
        "  cloud/x*: a\n"
        "  clou*: a\n"
    )
    assert first == f"{WARNING}4: models_dir: there is no folder none yet, so it has no models"
    assert second.startswith(f"{WARNING}6: aliases.cloud/x*: never used: requests")


def test_warnings_about_context_and_threads(
    tmp_path: Path, check: Check, smollm2_path: Path, minilm_path: Path
) -> None:
    lines = check(
        "models:\n"
        f"  a:\n    source: {smollm2_path}\n    context: 20000\n    slots: 1\n    isolate: false\n    threads: 512\n"
        f"  b:\n    source: {minilm_path}\n    context: 5000\n"
        f"  c:\n    source: {smollm2_path}\n    context: 20000000\n"
        f"  d:\n    source: {smollm2_path}\n    context: 8192\n    threads: 1\n"
    )
    first, second, third, fourth, fifth = lines
    trained = "this model was trained for 8192 tokens"
    assert first == f"{WARNING}4: models.a.context: {trained}; its output beyond them is of poor quality"
    assert second.startswith(f"{WARNING}7: models.a.threads: 512 threads on ")
    assert third == f"{WARNING}10: models.b.context: this model was trained for 512 tokens; longer inputs are refused"
    assert fourth.startswith(f"{WARNING}13: models.c.context: {trained}")
    assert fifth.startswith(f"{WARNING}13: models.c.context: the slots need ")
    assert run(tmp_path, "serve", "--port", "0", stub_server=True).stderr.splitlines() == lines


def test_layout_auto_is_accepted_with_a_warning(tmp_path: Path, check: Check, smollm2_path: Path) -> None:
    entry = f"{{path: {smollm2_path}, layout: auto}}"
    first, second = lines = check(f"layout: auto\nmodels:\n  a: {smollm2_path}\n  b: {entry}\n")
    assert first.startswith(f"{WARNING}1: layout: auto has no effect: run `dragoman tune MODEL`")
    assert second.startswith(f"{WARNING}4: models.b.layout: auto has no effect: ")
    assert f"`dragoman tune {smollm2_path}`" in second
    assert run(tmp_path, "serve", "--port", "0", stub_server=True).stderr.splitlines() == lines


def test_invalid_adapters(tmp_path: Path, check: Check, smollm2_path: Path) -> None:
    valid = write_adapter(tmp_path / "valid.gguf")
    (tmp_path / "tiny.gguf").write_bytes(b"hello")
    (tmp_path / "half.gguf").write_bytes(valid.read_bytes()[:-5000])
    write_adapter(tmp_path / "other.gguf", architecture="qwen2")
    adapters = {
        "valid.gguf": "",
        "tiny.gguf": "does not begin with GGUF",
        "half.gguf": "it is cut off",
        "other.gguf": "architecture qwen2, but this model is llama",
        str(smollm2_path): "not a LoRA adapter",
    }
    entries = "\n".join(f"      {name}: {file}" for name, file in zip("abcde", adapters, strict=True))
    lines = check(f"models:\n  base:\n    path: {smollm2_path}\n    adapters:\n{entries}\n")
    for at, (line, message) in enumerate(zip(lines, list(adapters.values())[1:], strict=True)):
        assert line.startswith(f"{ERROR}{6 + at}: models.base.adapters.{'bcde'[at]}: "), line
        assert message in line


def test_warning_about_isolate_without_keys(check: Check) -> None:
    written = "models: {smollm2: {isolate: true}}\nkeys: {store: keys.db}\n"
    assert check(written) == [
        f"{WARNING}1: models.smollm2.isolate: has no effect without API keys: all callers share one identity"
    ]
    assert check(written + "api_keys: [secret]\n") == []


def test_warnings_about_prices_and_costs_without_effect(check: Check) -> None:
    models = "models: {a: {engine: scripted}}\nmodels_dir: []\n"
    assert check(
        f"{models}prices:\n  A: {{input: 1}}\n  'b*': {{input: 1}}\nbudgets: [{{principal: x, per: day, cost: 1}}]\n"
    ) == [f"{WARNING}5: prices.b*: matches no configured model; names of aliases do not count"]
    assert check(
        f"{models}budgets:\n  - {{principal: x, per: day, tokens: 1}}\n  - {{principal: x, per: day, cost: 1}}\n"
    ) == [f"{WARNING}5: budgets[1].cost: has no effect without `prices`: all requests cost nothing"]


def test_warning_about_too_many_workers(check: Check) -> None:
    (line,) = check("models: {a: {engine: scripted}}\nworkers: 100000\n")
    assert line.startswith(f"{WARNING}2: workers: 100000 processes are too many for ")
    assert check("models: {a: {engine: scripted}}\nworkers: 4\n") == []
