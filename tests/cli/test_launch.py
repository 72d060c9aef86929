"""`dragoman launch`, with a program in place of each agent that records what it was given and asks the server."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from dragoman.agents.setup import NO_KEY, SCRIPT_DIRECTORY, Endpoint, build_setup, format_script
from dragoman.agents.table import AGENTS, Agent
from tests.cli.test_cli import environment, refused
from tests.support import fake_agent
from tests.support.requests import eventually
from tests.support.server_process import Running, children_of, command_of, has_ended, serving
from tools import ports

KEY = "launch-key"
MODEL = {"engine": "scripted", "format": "hermes", "context": 65536, "replies": [{"output": "Hello, agent."}]}
MODELS = {"for-agents": MODEL, "small": {"engine": "scripted", "context": 4000}}
DOCUMENTED = Endpoint("http://127.0.0.1:8000", "http://127.0.0.1:8000/v1", "my-key", "mine", 65536, "hermes")
DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"```(\w+)\n(.*?)\n```", re.DOTALL)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("launch"), {"models": MODELS, "api_keys": [KEY]}) as running:
        yield running


@pytest.fixture(scope="module")
def open_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server without keys."""
    with serving(tmp_path_factory.mktemp("open"), {"models": MODELS}) as running:
        yield running


@dataclass
class LaunchEnvironment:
    """A folder with the fake agents, a home, and a place for temporary files."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return environment(self.folder) | {
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "TMPDIR": str(self.folder / "tmp"),
            # Servers that are started need a home of their own, for their admin tokens.
            "DRAGOMAN_HOME": str(self.folder / "dragoman"),
            "FAKE_AGENT_RECORD": str(self.folder / "record.json"),
        }

    def launch(self, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "dragoman", "launch", *arguments],
            cwd=self.folder,
            env=self.environment | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def start(self, *arguments: str, **variables: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "dragoman", "launch", *arguments],
            cwd=self.folder,
            env=self.environment | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Without a terminal: Ctrl-C on one is not passed on.
            start_new_session=True,
        )

    def record(self) -> dict[str, Any]:
        record: dict[str, Any] = json.loads((self.folder / "record.json").read_text())
        return record

    def temporary_folders(self) -> list[Path]:
        return [path for path in (self.folder / "tmp").iterdir() if path.is_dir()]


@pytest.fixture
def launch_env(tmp_path: Path) -> LaunchEnvironment:
    for name in ("bin", "tmp"):
        (tmp_path / name).mkdir()
    for agent in AGENTS.values():
        script = tmp_path / "bin" / agent.program
        script.write_text(f"#!{sys.executable}\n{Path(fake_agent.__file__).read_text()}")
        script.chmod(0o755)
    return LaunchEnvironment(tmp_path)


@pytest.mark.parametrize("agent", AGENTS.values(), ids=AGENTS)
def test_agent_gets_its_settings_and_reaches_the_server(
    launch_env: LaunchEnvironment, server: Running, agent: Agent
) -> None:
    conflicting = {name: "1" for name, value in agent.environment.items() if value is None}
    done = launch_env.launch(
        *(agent.name, "--url", server.url, "--api-key", KEY, "--model", "for-agents"),
        *("--", "--print", "a question", "--"),
        **conflicting,
        FAKE_AGENT_KEY=KEY,
        FAKE_AGENT_EXIT="7",
    )
    assert (done.returncode, done.stdout) == (7, "Hello, agent.\n"), done.stderr
    assert "warning" not in done.stderr
    record = launch_env.record()
    assert record["arguments"][-3:] == ["--print", "a question", "--"]
    assert not set(conflicting) & set(record["environment"])
    assert set(record["files"]) == set(agent.files)
    assert launch_env.temporary_folders() == []


@pytest.mark.parametrize("agent", AGENTS.values(), ids=AGENTS)
def test_printed_settings_are_those_of_a_launch(
    launch_env: LaunchEnvironment, open_server: Running, agent: Agent
) -> None:
    """The script that is printed gives the agent the same variables, arguments and files."""
    arguments = (agent.name, "--url", open_server.url, "--model", "for-agents")
    done = launch_env.launch(*arguments, FAKE_AGENT_KEY=NO_KEY)
    assert done.returncode == 0, done.stderr
    launched = comparable(launch_env.record())
    (launch_env.folder / "record.json").unlink()
    printed = launch_env.launch(*arguments, "--print-config")
    assert (printed.returncode, printed.stderr) == (0, "")
    assert not (launch_env.folder / "record.json").exists()
    subprocess.run(
        ["sh", "-eu"], input=printed.stdout, env=launch_env.environment, cwd=launch_env.folder, text=True, check=True
    )
    assert comparable(launch_env.record()) == launched


def comparable(record: dict[str, Any]) -> dict[str, Any]:
    """A record without the names of temporary directories, and without variables that a shell sets."""
    text = fake_agent.TEMPORARY.sub("DIR", json.dumps(record))
    shown: dict[str, Any] = json.loads(text)
    for name in ("FAKE_AGENT_KEY", "PWD", "OLDPWD", "SHLVL", "_", "LC_CTYPE"):
        shown["environment"].pop(name, None)
    return shown


def test_printed_settings_hide_the_key(launch_env: LaunchEnvironment, server: Running) -> None:
    done = launch_env.launch("claude", "--url", server.url, "--api-key", KEY, "--print-config")
    assert KEY not in done.stdout
    assert "export ANTHROPIC_AUTH_TOKEN='***'" in done.stdout
    assert "export ANTHROPIC_MODEL=for-agents" in done.stdout


def test_printed_settings_without_a_server(launch_env: LaunchEnvironment) -> None:
    port = write_config(launch_env)
    done = launch_env.launch("claude", "--print-config")
    assert done.returncode == 0
    assert done.stderr == f"no server runs at http://127.0.0.1:{port}; the settings are for one that does\n"
    assert f"export ANTHROPIC_BASE_URL=http://127.0.0.1:{port}\n" in done.stdout
    assert "export CLAUDE_CODE_MAX_CONTEXT_TOKENS=65536\n" in done.stdout


def write_config(launch_env: LaunchEnvironment, **more: Any) -> int:
    """Write a configuration for a server that does not run. Returns its port."""
    port = ports.free_port()
    config = {"models": MODELS, "models_dir": [], "storage": "memory", "port": port} | more
    (launch_env.folder / "dragoman.yaml").write_text(json.dumps(config))
    return port


@pytest.mark.parametrize("workers", [1, 2], ids=["one process", "two front ends"])
def test_server_is_started_and_ended_with_the_agent(launch_env: LaunchEnvironment, workers: int) -> None:
    write_config(launch_env, workers=workers, api_keys=[KEY])
    done = launch_env.launch("claude", FAKE_AGENT_KEY=KEY)
    assert (done.returncode, done.stdout) == (0, "Hello, agent.\n"), done.stderr
    started = re.search(r"starting a server on (http://127\.0\.0\.1:\d+); its log is (\S+)\n", done.stderr)
    assert started is not None
    assert launch_env.record()["environment"]["ANTHROPIC_BASE_URL"] == started[1]
    log = Path(started[2]).read_text()
    assert "ready" in log
    assert "Traceback" not in log
    assert "no answer" in refused(launch_env.launch("claude", "--url", started[1]))


def test_server_at_the_configured_address_is_used(launch_env: LaunchEnvironment, server: Running) -> None:
    write_config(launch_env, api_keys=[KEY])
    config = json.loads((launch_env.folder / "dragoman.yaml").read_text())
    (launch_env.folder / "dragoman.yaml").write_text(json.dumps(config | {"port": server.port}))
    done = launch_env.launch("claude", FAKE_AGENT_KEY=KEY)
    assert (done.returncode, done.stdout) == (0, "Hello, agent.\n"), done.stderr
    assert done.stderr == f"starting Claude Code with the model for-agents of {server.url}\n"


def test_file_is_served_by_a_server_of_its_own(
    launch_env: LaunchEnvironment, server: Running, smollm2_path: Path
) -> None:
    write_config(launch_env, port=server.port)
    done = launch_env.launch("aider", "--model", f"for-agents-too={smollm2_path}")
    assert done.returncode == 0, done.stderr
    assert "starting a server on " in done.stderr
    assert "--model=openai/for-agents-too" in launch_env.record()["arguments"]
    assert '"max_input_tokens": 8192' in launch_env.record()["files"]["models.json"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_reach_the_agent_once(launch_env: LaunchEnvironment, server: Running, number: signal.Signals) -> None:
    process = launch_env.start("qwen", "--url", server.url, "--api-key", KEY, FAKE_AGENT_WAIT="1", FAKE_AGENT_EXIT="9")
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    assert len(launch_env.temporary_folders()) == 1
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, output) == (9, f"got {number.name}\n")
    assert launch_env.temporary_folders() == []


@pytest.mark.parametrize("is_piped", [False, True], ids=["terminal", "redirected input"])
def test_ctrl_c_on_a_terminal_reaches_the_agent_once(
    launch_env: LaunchEnvironment, server: Running, is_piped: bool
) -> None:
    command = [sys.executable, "-m", "dragoman", "launch", "claude", "--url", server.url, "--api-key", KEY]
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(launch_env.folder)
        if is_piped:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.execve(sys.executable, command, launch_env.environment | {"FAKE_AGENT_WAIT": "1", "FAKE_AGENT_EXIT": "3"})
    shown = b""
    while b"waiting" not in shown:
        shown += os.read(terminal, 4096)
    os.write(terminal, b"\x03")
    try:
        while piece := os.read(terminal, 4096):
            shown += piece
    except OSError:
        pass  # the terminal is closed
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    assert b"got SIGINT\r\n" in shown


def test_killed_agent(launch_env: LaunchEnvironment, server: Running) -> None:
    done = launch_env.launch("claude", "--url", server.url, "--api-key", KEY, FAKE_AGENT_EXIT="-9")
    assert done.returncode == 137


def test_started_server_ends_with_a_killed_launcher(launch_env: LaunchEnvironment) -> None:
    write_config(launch_env)
    process = launch_env.start("claude", FAKE_AGENT_WAIT="1")
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    server, agent = sorted(children_of(process.pid), key=lambda pid: b"claude" in command_of(pid))
    process.kill()
    process.wait()
    try:
        assert eventually(lambda: has_ended(server))
    finally:
        os.kill(agent, signal.SIGKILL)
        process.stdout.close()
        assert process.stderr is not None
        process.stderr.close()


@pytest.mark.parametrize(
    ("models", "arguments", "words"),
    [
        ({"lost": "lost.gguf"}, [], "the server did not start: dragoman.yaml:1: models.lost: "),
        (MODELS, ["--model", "lost.gguf"], "the server answered 503 Service Unavailable: no file lost.gguf"),
    ],
)
def test_model_that_cannot_be_loaded(
    launch_env: LaunchEnvironment, models: Any, arguments: list[str], words: str
) -> None:
    write_config(launch_env, models=models)
    done = launch_env.launch("claude", *arguments)
    assert done.returncode == 2
    assert words in done.stderr.splitlines()[-1]
    assert not (launch_env.folder / "record.json").exists()


def test_warnings_about_the_model(launch_env: LaunchEnvironment, server: Running) -> None:
    done = launch_env.launch("codex", "--url", server.url, "--api-key", KEY, "--model", "small")
    assert done.returncode == 0
    context, form, _ = done.stderr.splitlines()
    assert context.startswith("warning: the model small has a context of 4,000 tokens, and Codex needs at least 32,768")
    assert form.startswith("warning: the model small has the format plain, so Codex gets no tool calls")


def test_list_of_agents(launch_env: LaunchEnvironment) -> None:
    (launch_env.folder / "bin" / "codex").unlink()
    done = launch_env.launch(PATH=str(launch_env.folder / "bin"))
    rows = {line.split()[0]: line for line in done.stdout.splitlines()[1:]}
    assert list(rows) == list(AGENTS)
    assert rows["claude"].endswith(str(launch_env.folder / "bin" / "claude"))
    assert rows["codex"].endswith("no: npm install -g @openai/codex")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["clade"], "unknown agent 'clade'; did you mean claude? The agents are claude, codex, "),
        (["claude", "--url", "unix:/tmp/x.sock"], "--url unix:/tmp/x.sock: agents cannot connect to a Unix socket"),
        (["claude", "--url", "http://u:p@127.0.0.1:1"], "agents cannot send a user and a password"),
        (["claude", "--url", "http://127.0.0.1:1"], "no answer"),
        (["claude", "--url", "{url}"], "the server answered 401 Unauthorized; give --api-key"),
        (["claude", "--url", "{url}", "--api-key", KEY, "--model", "other"], "model 'other' is not served here"),
        (["claude", "--model", "other"], "--model other: expected NAME=SOURCE, a path, or a built-in name"),
    ],
)
def test_user_errors(launch_env: LaunchEnvironment, server: Running, arguments: list[str], words: str) -> None:
    write_config(launch_env)
    given = [argument.replace("{url}", server.url) for argument in arguments]
    assert words in refused(launch_env.launch(*given))


def test_agent_that_is_not_installed(launch_env: LaunchEnvironment) -> None:
    words = refused(launch_env.launch("claude", PATH=str(launch_env.folder)))
    assert words == "Claude Code is not installed: npm install -g @anthropic-ai/claude-code"


PAGE = (DOCS / "agents.md").read_text()
PRINTED = ("cn", "cline", "pi")
"""Agents whose settings are long. The page names the command that prints them."""


@pytest.mark.parametrize("agent", AGENTS.values(), ids=AGENTS)
def test_documented_settings_are_those_of_the_table(agent: Agent) -> None:
    """Sections of docs/agents.md have the settings as a script, those of Codex and opencode have them as a file."""
    assert f"| `{agent.name}` | {agent.title} | {agent.context:,} |" in PAGE
    setup = build_setup(agent, DOCUMENTED, SCRIPT_DIRECTORY)
    blocks = BLOCK.findall(PAGE.partition(f"\n## {agent.title}\n")[2].partition("\n## ")[0])
    if agent.name in PRINTED:
        assert f"`dragoman launch {agent.name} --print-config`" in PAGE
    elif agent.name == "codex":
        (text,) = (text for language, text in blocks if language == "toml")
        flags = (argument.removeprefix("--config=") for argument in setup.command[1:])
        assert tomllib.loads(text) == tomllib.loads("\n".join(flags))
    elif agent.name == "opencode":
        (text,) = (text for language, text in blocks if language == "json")
        config = json.loads(setup.environment["OPENCODE_CONFIG_CONTENT"])
        assert json.loads(text) == {"$schema": "https://opencode.ai/config.json", **config}
    else:
        assert ("sh", format_script(setup)) in blocks


def test_unknown_values_are_left_out() -> None:
    unknown = Endpoint("http://127.0.0.1:1", "http://127.0.0.1:1/v1", "k", "m")
    for agent in AGENTS.values():
        setup = build_setup(agent, unknown, "/d")
        texts = [*setup.environment.values(), *setup.command, *setup.files.values()]
        assert not any("None" in text or "null" in text or "$" in text for text in texts), agent.name
    codex = build_setup(AGENTS["codex"], unknown, "/d").command
    assert not any("context_window" in argument for argument in codex)
    provider = json.loads(build_setup(AGENTS["opencode"], unknown, "/d").environment["OPENCODE_CONFIG_CONTENT"])
    assert provider["provider"]["dragoman"]["models"]["m"]["limit"] == {}


def test_yaml_of_continue_is_yaml() -> None:
    (text,) = build_setup(AGENTS["cn"], DOCUMENTED, "/d").files.values()
    loaded: Mapping[str, Any] = yaml.safe_load(text)
    assert loaded["models"][0]["defaultCompletionOptions"] == {"contextLength": 65536, "maxTokens": 16384}
