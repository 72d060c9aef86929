"""Whether the programs that people use work: each asks a real server, runs a tool and prints the final answer.

    python -m clients.run [--list] [NAME ...]

`dragoman serve` plays clients/rehearsal.yaml: a model that calls one tool, and answers when it has seen what that
printed. Every client gets a home and a folder of its own, the key of the rehearsal and a time limit, and runs after the
one before. It has passed if it ended well, the file is there that only its tool can have written, the answer was
printed, and the server refused nothing that it asked, but for what a client is known to try first.

The packages are installed by `make clients` into .clients, in the versions of clients/package-lock.json. Configuration
files are used as a person would write them, with the address of the server put in.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.error import URLError
from urllib.request import urlopen

HERE = Path(__file__).parent
PACKAGES = HERE.parent / ".clients"
WRITTEN_ADDRESS = "http://127.0.0.1:8000"
KEY = "rehearsal-key"
PROMPT = "Write the proof and tell me what you wrote."
PROOF = "proof-4711"
ANSWER = f"The tool wrote {PROOF}."
SECONDS = 120
HARMLESS = frozenset({426, 499})
"""A WebSocket that is refused, and a request that its client gave up."""


class Client(NamedTuple):
    name: str
    package: str
    api: str
    command: Sequence[str]
    environment: Mapping[str, str] = {}
    files: Mapping[str, str] = {}
    """Where in its home a file from beside this one belongs."""
    answers: int = 1
    """How often the answer is printed: programs ask twice, collected and streamed."""
    refused: frozenset[int] = frozenset()
    """Statuses that it is known to go on from."""


class Outcome(NamedTuple):
    client: Client
    version: str
    requests: int
    seconds: float
    problem: str
    """Nothing, if it has passed."""


class Server(NamedTuple):
    url: str
    log: Path
    event_log: Path

    def answers(self) -> list[tuple[int, str]]:
        """Status and error of every request so far, in the order in which they ended."""
        lines = self.event_log.read_text().splitlines() if self.event_log.exists() else []
        events = [event for event in map(json.loads, lines) if event["event"] == "request"]
        return [(event["status"], event.get("error", "")) for event in events if event["route"] != "GET /ready"]


def clients() -> list[Client]:
    return [*agents(), *programs()]


def agents() -> Iterator[Client]:
    quiet = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"}
    claude = ("claude", "--print", PROMPT, "--allowedTools", "Bash")
    package = "@anthropic-ai/claude-code"
    by_alias = quiet | {"ANTHROPIC_BASE_URL": WRITTEN_ADDRESS, "ANTHROPIC_API_KEY": KEY}
    by_name = quiet | {
        "ANTHROPIC_BASE_URL": WRITTEN_ADDRESS,
        "ANTHROPIC_AUTH_TOKEN": KEY,
        "ANTHROPIC_MODEL": "for-claude-code",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "for-claude-code",
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "200000",
    }
    yield Client("claude-code", package, "messages", claude, by_alias)
    yield Client("claude-code-model", package, "messages", claude, by_name)

    codex = ("codex", "exec", "--skip-git-repo-check", "--sandbox", "workspace-write", PROMPT)
    key = {"DRAGOMAN_API_KEY": KEY}
    yield Client("codex", "@openai/codex", "responses", codex, key, {".codex/config.toml": "codex.toml"})
    # Its own provider tries a WebSocket first, and hands over its tools in an item of the input.
    built_in = (*codex[:-1], "--config", f'openai_base_url="{WRITTEN_ADDRESS}/v1"', PROMPT)
    yield Client("codex-built-in", "@openai/codex", "responses", built_in, {"CODEX_API_KEY": KEY})

    offline = key | {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"}
    config = {".config/opencode/opencode.json": "opencode.json"}
    for api in ("chat", "messages", "responses"):
        opencode = ("opencode", "run", "--auto", "--title", "proof", "--model", f"{api}/for-opencode", PROMPT)
        yield Client(f"opencode-{api}", "opencode-ai", api, opencode, offline, config)


def programs() -> Iterator[Client]:
    def program(name: str, package: str, api: str, *command: str, refused: frozenset[int] = frozenset()) -> Client:
        environment = {"DRAGOMAN_URL": WRITTEN_ADDRESS, "DRAGOMAN_API_KEY": KEY}
        return Client(name, package, api, ("node", *command), environment, answers=2, refused=refused)

    yield program("openai-chat", "openai", "chat", "openai.mjs", "chat")
    yield program("openai-responses", "openai", "responses", "openai.mjs", "responses")
    # Its tool runner asks for a thread that the server keeps, is told 400, and sends everything itself.
    yield program("anthropic-sdk", "@anthropic-ai/sdk", "messages", "anthropic.mjs", refused=frozenset({400}))
    yield program("ai-chat", "@ai-sdk/openai", "chat", "aisdk.mjs", "chat")
    yield program("ai-responses", "@ai-sdk/openai", "responses", "aisdk.mjs", "responses")
    yield program("ai-messages", "@ai-sdk/anthropic", "messages", "aisdk.mjs", "messages")
    yield program("ai-compatible", "@ai-sdk/openai-compatible", "chat", "aisdk.mjs", "compatible")


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    server = Server(f"http://127.0.0.1:{port}", folder / "server.log", folder / "events.jsonl")
    flags = ("--config", str(HERE / "rehearsal.yaml"), "--port", str(port), "--event-log", str(server.event_log))
    with server.log.open("wb") as output:
        process = subprocess.Popen([sys.executable, "-m", "dragoman", "serve", *flags], stdout=output, stderr=output)
    try:
        _wait_until_ready(process, server)
        yield server
    finally:
        end(process)


def end(process: subprocess.Popen[bytes], patience: float = 40) -> None:
    process.terminate()
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], server: Server) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urlopen(f"{server.url}/ready", timeout=1).close()
            return
        except (URLError, OSError):
            time.sleep(0.1)
    raise SystemExit(f"the server did not start:\n{server.log.read_text()}")


def try_out(client: Client, server: Server) -> Outcome:
    before, begun = len(server.answers()), time.monotonic()
    # Away from the checkout: an agent reads what it finds in the folders above its own.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        home, work = Path(folder) / "home", Path(folder) / "work"
        work.mkdir()
        _furnish(home, client, server.url)
        status, output, errors = _run(client, server.url, home, work)
        proof = work / "proof.txt"
        written = proof.read_text() if proof.exists() else None
    seconds = time.monotonic() - begun
    answers = server.answers()[before:]
    problem = _problem(client, status, output, written, answers)
    if problem:
        parts = {"output": output, "errors": errors, "answered": str(answers), "server": server.log.read_text()}
        shown = "\n".join(f"--- {title}\n{text[-2000:]}" for title, text in parts.items())
        print(f"{client.name}: {problem}\n{shown}\n---", flush=True)
    return Outcome(client, _version(client.package), len(answers), seconds, problem)


def _furnish(home: Path, client: Client, url: str) -> None:
    home.mkdir()
    for place, source in client.files.items():
        target = home / place
        target.parent.mkdir(parents=True)
        target.write_text((HERE / source).read_text().replace(WRITTEN_ADDRESS, url))


def _run(client: Client, url: str, home: Path, work: Path) -> tuple[int | None, str, str]:
    """Status (None: the time was over), output, errors."""
    command = [part.replace(WRITTEN_ADDRESS, url) for part in client.command]
    ours = {name: value.replace(WRITTEN_ADDRESS, url) for name, value in client.environment.items()}
    path = f"{PACKAGES / 'node_modules' / '.bin'}{os.pathsep}{os.environ['PATH']}"
    process = subprocess.Popen(
        [str(PACKAGES / part) if part.endswith(".mjs") else part for part in command],
        cwd=work,
        env={"PATH": path, "HOME": str(home), "TERM": "dumb", "LANG": "C.UTF-8", **ours},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        return None, output, errors
    return process.returncode, output, errors


def _problem(
    client: Client, status: int | None, output: str, written: str | None, answers: Sequence[tuple[int, str]]
) -> str:
    refused = {f"{code} {error}" for code, error in answers if error and code not in HARMLESS | client.refused}
    if status is None:
        return f"not done after {SECONDS} s"
    if status:
        return f"ended with status {status}"
    if written != PROOF:
        return "the tool did not run" if written is None else f"the tool wrote {written!r}"
    if output.count(ANSWER) < client.answers:
        return "the answer was not printed"
    return f"requests were answered {', '.join(sorted(refused))}" if refused else ""


def _version(package: str) -> str:
    description = json.loads((PACKAGES / "node_modules" / package / "package.json").read_text())
    return str(description["version"])


def show(outcomes: Sequence[Outcome]) -> None:
    print(f"\n{'client':<20}{'package':<28}{'version':<10}{'API':<11}{'requests':>8}{'seconds':>9}  result")
    for client, version, requests, seconds, problem in outcomes:
        row = f"{client.name:<20}{client.package:<28}{version:<10}{client.api:<11}{requests:>8}{seconds:>9.1f}"
        print(f"{row}  {problem or 'passed'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", metavar="NAME", nargs="*", help="only these clients")
    parser.add_argument("--list", action="store_true", help="show their names")
    arguments = parser.parse_args()
    known = {client.name: client for client in clients()}
    if arguments.list:
        print("\n".join(known))
        return
    if unknown := sorted(set(arguments.names) - set(known)):
        parser.error(f"no client {', '.join(unknown)}; there are {', '.join(known)}")
    if not (PACKAGES / "node_modules").is_dir():
        raise SystemExit("the clients are not installed: run `make clients`")
    # A script finds its packages in the folder where it lies.
    for script in HERE.glob("*.mjs"):
        shutil.copy(script, PACKAGES)
    outcomes = []
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as server:
        for name in arguments.names or known:
            print(f"{name} ...", flush=True)
            outcomes.append(try_out(known[name], server))
    show(outcomes)
    sys.exit(any(outcome.problem for outcome in outcomes))


if __name__ == "__main__":
    main()
