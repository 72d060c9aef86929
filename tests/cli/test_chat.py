"""`dragoman chat`, in a pipe and on a terminal."""

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tools.ports import free_port

from tests.cli.test_cli import environment
from tests.support.server_process import Running, serving

CALL = json.dumps({"name": "weather", "arguments": {"city": "Paris"}})
TOOLS = '''
import json as _json
from pathlib import Path

def weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"

def _hidden() -> None: ...
'''


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    replies = [
        {"match": "^sunny", "output": "Sunny."},
        {"match": "weather", "output": f"<think>Hmm.</think><tool_call>{CALL}</tool_call>"},
        {"match": "escape", "output": "a\x1b[31mred\x07 b"},
        {"match": "slow", "output": "tick " * 2000},
        {"output": "<think>Hmm.</think>Hello, world."},
    ]
    agent = {"engine": "scripted", "format": "hermes", "replies": replies, "tokens_per_second": 2000}
    config = {"models": {"agent": agent, "short": {"engine": "scripted", "context": 5}}}
    with serving(tmp_path_factory.mktemp("chat"), config) as running:
        yield running


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "dragoman", "chat", *arguments]


def piped(folder: Path, text: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command(*arguments), input=text, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=60
    )


class Terminal:
    def __init__(self, master: int, process: "subprocess.Popen[bytes]") -> None:
        self._master = master
        self.process = process
        self.shown = ""

    def see(self, text: str, seconds: float = 60) -> str:
        """Wait for this text, and return all new output up to it."""
        deadline = time.monotonic() + seconds
        while text not in self.shown:
            assert time.monotonic() < deadline, self.shown
            if select.select([self._master], [], [], 0.1)[0]:
                self.shown += os.read(self._master, 65536).decode("utf-8", "replace")
        before, _, self.shown = self.shown.partition(text)
        return before + text

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def ask(self, line: str, text: str) -> str:
        self.type(line + "\r")
        self.see("\n")
        shown = self.see(text)
        self.see("> ")
        return shown


@contextmanager
def terminal(folder: Path, *arguments: str, **variables: str) -> Iterator[Terminal]:
    master, slave = pty.openpty()
    env = environment(folder) | {"TERM": "xterm", **variables}
    process = subprocess.Popen(
        command(*arguments), stdin=slave, stdout=slave, stderr=slave, cwd=folder, env=env, start_new_session=True
    )
    os.close(slave)
    try:
        yield Terminal(master, process)
    finally:
        process.kill()
        process.wait()
        os.close(master)


def test_pipe_gets_only_the_answer(tmp_path: Path, server: Running) -> None:
    done = piped(tmp_path, "hello\n", "--url", server.url)
    assert (done.returncode, done.stdout, done.stderr) == (0, "Hello, world.\n", "")


def test_tools_with_piped_input(tmp_path: Path, server: Running) -> None:
    (tmp_path / "tools.py").write_text(TOOLS)
    done = piped(tmp_path, "weather?", "--url", f"{server.url}/v1", "--tools", "tools.py", "--protocol", "messages")
    assert (done.returncode, done.stdout, done.stderr) == (0, "Sunny.\n", "")


def test_server_not_running(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    done = piped(tmp_path, "hello", "--url", url)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"dragoman: cannot connect to {url}: ")
    assert done.stderr.endswith("; start one with `dragoman serve`, or give --url\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("hello", ["--url", "ftp://x"], "expected an address such as http://127.0.0.1:8000"),
        ("hello", ["--protocol", "smtp"], "protocol 'smtp': expected auto, "),
        ("hello", ["--tools", "none.py"], "file not found"),
        ("hello", ["--tools", "broken.py"], "SyntaxError"),
        ("hello", ["--tools", "empty.py"], "it defines no public functions"),
        ("hello", ["--model", "unknown"], "unknown"),
        ("hello, this is too long for five tokens", ["--model", "short"], "maximum context length"),
        (" \n", [], "the standard input has no question"),
    ],
)
def test_user_errors(tmp_path: Path, server: Running, text: str, arguments: list[str], message: str) -> None:
    (tmp_path / "broken.py").write_text("def f(:")
    (tmp_path / "empty.py").write_text("import json\n")
    done = piped(tmp_path, text, *([] if "--url" in arguments else ["--url", server.url]), *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_interactive_chat(tmp_path: Path, server: Running) -> None:
    (tmp_path / "tools.py").write_text(TOOLS)
    with terminal(tmp_path, "--url", server.url, "--tools", "tools.py", "--system", "Be brief.") as screen:
        assert f"agent at {server.url}" in screen.see("> ")
        shown = screen.ask("hello", "world.")
        assert "\x1b[2mHmm.\x1b[0m" in shown
        shown = screen.ask("the weather?", "Sunny.")
        assert '→ weather {"city": "Paris"}' in shown
        assert "← sunny in Paris" in shown
        assert "/save FILE" in screen.ask("/help", "Ctrl-D")
        assert "* agent" in screen.ask("/models", "short")
        assert "weather  The weather of a city." in screen.ask("/tools", "city.")
        screen.ask("/system", "Be brief.")
        assert "6 messages in" in screen.ask("/save talk.json", "talk.json")
        screen.ask("/clear", "cleared")
        assert "6 messages, with agent" in screen.ask("/load talk.json", "agent")
        assert "error: unknown command /nothing" in screen.ask("/nothing", "lists the commands")
        assert "red b" in screen.ask("escape", " b")
        screen.ask("/model short", "short")
        assert "maximum context length" in screen.ask("hello, this is too long", "has")
        screen.ask("one \\\rtwo", "has")
        screen.type("/quit\r")
        assert screen.process.wait(60) == 0
    history = (tmp_path / "home" / "chat_history").read_text()
    assert "the weather?" in history
    saved = json.loads((tmp_path / "talk.json").read_text())
    roles = [message["role"] for message in saved["messages"]]
    assert roles == ["user", "assistant", "user", "assistant", "tool", "assistant"]


def test_ctrl_c_stops_an_answer(tmp_path: Path, server: Running) -> None:
    with terminal(tmp_path, "--url", server.url, "--model", "agent", NO_COLOR="1") as screen:
        screen.see("> ")
        screen.type("slow\r")
        screen.see("tick tick")
        screen.process.send_signal(2)
        screen.see("(stopped; the message was discarded)")
        screen.see("> ")
        shown = screen.ask("hello", "world.")
        assert "Hmm." in shown
        assert not re.search(r"\x1b\[[012]m", shown)
        screen.type("\x04")
        assert screen.process.wait(60) == 0


def test_closed_output_pipe(server: Running, tmp_path: Path) -> None:
    pipeline = f"echo slow | {' '.join(command('--url', server.url))} | head -c 5"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {pipeline}"],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (141, "tick ", "")


def test_input_is_not_utf_8(server: Running, tmp_path: Path) -> None:
    done = subprocess.run(
        command("--url", server.url),
        input=b"\xff\xfe",
        env=environment(tmp_path) | {"LC_ALL": "C"},
        capture_output=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"dragoman: the standard input is not UTF-8 text")
    assert done.stderr.count(b"\n") == 1


def test_tool_output_goes_to_stderr(server: Running, tmp_path: Path) -> None:
    tools = tmp_path / "tools.py"
    tools.write_text('def weather(city: str) -> str:\n    print("looking")\n    return f"sunny in {city}"\n')
    done = piped(tmp_path, "weather?", "--url", server.url, "--tools", str(tools))
    assert (done.stdout, done.stderr) == ("Sunny.\n", "looking\n")
