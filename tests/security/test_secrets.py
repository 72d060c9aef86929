"""No secret appears in any output: each kind of secret is a known string, and all output is searched for it.

Output is: answers, logs at debug level, the event log, traces, metrics, command lines, the files of the state folder,
and what the commands print.
"""

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest

from dragoman.cli import main
from dragoman.storage.keys import KeyStore
from tests.security.credentials import other_last_byte
from tests.security.echo_upstream import EchoUpstream
from tests.support.requests import CHAT, eventually
from tests.support.server_process import Running, Serving, command_of

STATIC = "sk-canary-static-4f1d"
ODD_STATIC = "canary static+key/4f1d"
ENVIRONMENT = "sk-canary-environment-77aa"
UPSTREAM = "canary-upstream-0e9b"
LOGIN = "canary-login-5c2e"
HUB = "hf_canaryhub0123456789abcdef"
JWT_SECRET = "canary-jwt-secret-of-more-than-thirty-two-bytes-9d"
PROMPT = "canary-prompt-b2c4"
ECHOES = (*(f"status {status}" for status in (400, 401, 404, 413, 422, 429, 500, 503)), "stream", "garbage", "redirect")
"""Forms in which the upstream server repeats its credentials."""
PATHS = ("/v1/models/{}", "/v1/{}", "/{}", "/v1/responses/{}", "/admin/models/{}/load", "/v1/models?api_key={}")


@dataclass
class Watched:
    """A server with known secrets, and all its output."""

    running: Running
    folder: Path
    upstream: EchoUpstream
    secrets: set[str]
    answers: list[bytes] = field(default_factory=list)

    def send(self, method: str, path: str, key: str = STATIC, **options: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"} | options.pop("headers", {})
        with httpx.Client(base_url=self.running.url, trust_env=False, timeout=60) as client:
            answer = client.request(method, path, headers=headers, **options)
        self.answers.append(repr(answer.headers).encode() + answer.content)
        return answer

    def outputs(self) -> dict[str, bytes]:
        """All output so far, by source."""
        places = ((self.folder / "home").rglob("*"), self.folder.glob("dragoman.db*"))
        files = {str(file): file.read_bytes() for place in places for file in place if file.is_file()}
        found = {
            "log": self.running.log.read_bytes(),
            "event log": self.running.event_log.read_bytes(),
            "traces": self.upstream.traces,
        }
        return found | files | {f"command line of {pid}": command_of(pid) for pid in self.processes()}

    def recording(self) -> dict[str, bytes]:
        """The recorded requests and replies, which contain prompts."""
        return {"recording": (self.folder / "recording.jsonl").read_bytes()}

    def processes(self) -> list[int]:
        return [self.running.process.pid, *self.running.children()]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, serving: Serving) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("canaries")
    store = KeyStore(folder / "home" / "keys.db")
    stored, _ = store.create("anna")
    revoked, key = store.create("former")
    store.revoke(key.id)
    (folder / "jwt.secret").write_text(JWT_SECRET)
    with pytest.MonkeyPatch.context() as patch, EchoUpstream() as upstream:
        patch.setenv("DRAGOMAN_HOME", str(folder / "home"))
        patch.setenv("UPSTREAM_KEY", UPSTREAM)
        patch.setenv("HF_TOKEN", HUB)
        with serving(folder, config(upstream.port), "--record", str(folder / "recording.jsonl")) as running:
            token = jwt.encode({"sub": "user:carl", "exp": 4102444800}, JWT_SECRET, "HS256")
            secrets = {STATIC, ODD_STATIC, UPSTREAM, LOGIN, HUB, JWT_SECRET, stored, revoked, token}
            yield Watched(running, folder, upstream, secrets)


def model_for(said: str) -> str:
    return said.replace(" ", "-")


def upstreams(port: int) -> dict[str, dict[str, Any]]:
    """Upstream models by name. Each fails in one way only, because a failed upstream server is not used for a while."""
    at = f"127.0.0.1:{port}"
    usual = {"engine": "upstream", "protocol": "chat", "health_seconds": 0}
    keyed = usual | {"url": f"http://{at}", "key_env": "UPSTREAM_KEY"}
    login = usual | {"url": f"http://me:{LOGIN}@{at}"}
    return {
        f"{name}-{model_for(said)}": entry
        for name, entry in (("keyed", keyed), ("login", login))
        for said in (*ECHOES, "fine")
    }


def config(port: int) -> dict[str, Any]:
    at = f"127.0.0.1:{port}"
    return {
        "models": {
            "echo": {"engine": "scripted"},
            "crashing": {"engine": "scripted", "crash_after": 1, "replies": [{"output": "one two three"}]},
            "failing": {"engine": "scripted", "fail_after": 1, "replies": [{"output": "one two three"}]},
            **upstreams(port),
        },
        "default": "echo",
        "api_keys": [STATIC, ODD_STATIC],
        "keys": {"jwt": {"algorithm": "HS256", "key_file": "jwt.secret"}},
        "telemetry": {
            "log_level": "debug",
            "log_requests": True,
            "traces": {"endpoint": f"http://{at}/v1/traces"},
        },
    }


def says(words: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": words}]


def assert_nowhere(secrets: set[str], outputs: dict[str, bytes]) -> None:
    found = [
        f"{secret} in {where}: ...{text[max(0, at - 200) : at + 60]!r}"
        for secret in sorted(secrets)
        for where, text in outputs.items()
        if (at := text.find(secret.encode())) >= 0
    ]
    assert not found, "\n".join(found)


def requests_with_keys(watched: Watched) -> None:
    """Send keys in the right header, and in places where callers put them by mistake."""
    for key in sorted(watched.secrets):
        for sent in (key, other_last_byte(key)):
            watched.send("GET", "/v1/models", sent)
            watched.send("POST", CHAT, sent, json={"messages": says("hello")})
            watched.send("GET", "/stats", sent)
        watched.send(
            "POST", CHAT, headers={"content-type": "application/json"}, content=f'{{"api_key": "{key}",'.encode()
        )
    for path in ("/metrics", "/stats", "/admin/models", "/v1/models", "/ready", "/admin/upstreams"):
        assert watched.send("GET", path).status_code == 200


@pytest.mark.parametrize("said", ECHOES)
def test_credentials_repeated_by_an_upstream_reach_neither_caller_nor_log(watched: Watched, said: str) -> None:
    before = len(watched.upstream.credentials)
    for name in upstreams(0):
        if name.endswith(model_for(said)):
            for path, stream in ((CHAT, False), (CHAT, True), ("/v1/messages", False)):
                body = {"model": name, "messages": says(said), "stream": stream, "max_tokens": 5}
                watched.send("POST", path, json=body)
    echoed = watched.upstream.credentials[before:]
    assert any(UPSTREAM in given for given in echoed)
    assert any(LOGIN in given for given in echoed)
    secrets = {UPSTREAM, LOGIN, *(given.split()[-1] for given in echoed)}
    assert_nowhere(secrets, watched.outputs() | {"answers": b"\n".join(watched.answers)})


def test_keys_are_in_no_output(watched: Watched) -> None:
    requests_with_keys(watched)
    assert_nowhere(watched.secrets, watched.outputs() | {"answers": b"\n".join(watched.answers)})


def test_keys_are_in_no_recording(watched: Watched) -> None:
    requests_with_keys(watched)
    for key in sorted(watched.secrets):
        fields = {"model": "keyed-fine", "api_key": key, "tools": [{"type": "mcp", "headers": {"x-any-name": key}}]}
        for path, body in ((CHAT, {"messages": says(PROMPT)}), ("/v1/responses", {"input": PROMPT, "store": False})):
            for stream in (False, True):
                headers = {"cookie": f"session={key}", "x-dragoman-admin-token": key, "user-agent": f"agent {STATIC}"}
                watched.send("POST", f"{path}?key={key}", headers=headers, json={**body, **fields, "stream": stream})
    # Of keys and tokens of this server, a prompt may have none either.
    known = sorted(watched.secrets - {UPSTREAM, LOGIN, HUB, JWT_SECRET})
    answer = watched.send("POST", CHAT, json={"model": "echo", "messages": says(" ".join(known))})
    recorded = answer.headers["x-request-id"].encode()
    assert eventually(lambda: recorded in watched.recording()["recording"])
    assert PROMPT.encode() in watched.recording()["recording"]
    assert_nowhere(watched.secrets, watched.recording())


def test_keys_sent_in_a_path_are_not_recorded(watched: Watched) -> None:
    for key in sorted(watched.secrets - {UPSTREAM, LOGIN, HUB, JWT_SECRET}):
        for path in PATHS:
            # An answer may repeat to its caller what the caller sent.
            answer = watched.send("GET", path.format(key))
            watched.answers.pop()
            recorded = answer.headers["x-request-id"].encode()
            assert eventually(lambda recorded=recorded: recorded in watched.running.event_log.read_bytes())  # type: ignore[misc]
    assert_nowhere(watched.secrets, watched.outputs())


def test_prompts_and_replies_are_in_no_log(watched: Watched) -> None:
    prompt = {"model": "echo", "messages": says(PROMPT)}
    schema = {"name": "x", "schema": {"type": PROMPT}}
    changes: list[dict[str, Any]] = [
        *({}, {"stream": True}, {"model": "crashing"}, {"model": "failing", "stream": True}, {"model": "keyed-fine"}),
        *({"temperature": PROMPT}, {PROMPT: 1}, {"model": PROMPT}, {"messages": [{"role": PROMPT, "content": {}}]}),
        {"response_format": {"type": "json_schema", "json_schema": schema}},
    ]
    sent: list[tuple[str, dict[str, Any]]] = [
        *((CHAT, prompt | change) for change in changes),
        (f"{CHAT}/render", prompt),
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/messages", prompt | {"max_tokens": 5, "system": PROMPT, "metadata": {"user_id": PROMPT}}),
        ("/v1/responses", {"input": PROMPT, "store": False}),
        ("/v1/responses", {"input": PROMPT, "previous_response_id": PROMPT}),
        ("/v1/embeddings", {"input": PROMPT}),
        ("/v1/rerank", {"query": PROMPT, "documents": [PROMPT]}),
        ("/tokenize", {"prompt": PROMPT}),
    ]
    for path, body in sent:
        watched.send("POST", path, json=body)
    watched.send(
        "POST", CHAT, headers={"content-type": "application/json"}, content=b'{"messages": "' + PROMPT.encode()
    )
    watched.answers.clear()
    pages = {path: watched.send("GET", path).content for path in ("/metrics", "/stats", "/admin/models")}
    assert_nowhere({PROMPT}, watched.outputs() | pages)


UNSTORED = "canary-unstored-5a1e"
UPLOADED = "canary-uploaded-93c7"


def test_storage_contains_neither_keys_nor_prompts_that_are_not_stored(watched: Watched) -> None:
    requests_with_keys(watched)
    prompt = {"model": "echo", "messages": says(UNSTORED), "max_tokens": 5}
    for path, body in (
        (CHAT, prompt | {"metadata": {"note": UNSTORED}, "user": UNSTORED}),
        (CHAT, prompt | {"stream": True}),
        (CHAT, prompt | {"model": "crashing"}),
        ("/v1/messages", prompt | {"metadata": {"user_id": UNSTORED}}),
        ("/v1/completions", {"prompt": UNSTORED}),
        ("/v1/embeddings", {"input": UNSTORED}),
        ("/v1/responses", {"input": UNSTORED, "store": False}),
        ("/v1/responses", {"input": UNSTORED, "store": False, "stream": True}),
    ):
        watched.send("POST", path, json=body)
    content = {"file": ("a", UPLOADED.encode())}
    file = watched.send("POST", "/v1/files", files=content, data={"purpose": "batch"}).json()["id"]
    database = watched.folder / "dragoman.db"

    def stored() -> bytes:
        return b"".join(path.read_bytes() for path in watched.folder.glob(f"{database.name}*") if path.is_file())

    # The ledger writes a moment after the reply. Its rows show that the search looks at the right place.
    principal = watched.running.events()[-1]["principal"]
    assert eventually(lambda: stored().count(principal.encode()) > 10)
    assert_nowhere(watched.secrets | {UNSTORED, UPLOADED}, {"database": stored()})
    assert file.encode() in stored()
    (kept,) = [path for path in (watched.folder / "dragoman.db-blobs").rglob("*") if path.is_file()]
    assert kept.read_bytes() == UPLOADED.encode()
    # Deleting it removes the content at once.
    watched.send("DELETE", f"/v1/files/{file}")
    assert not kept.exists()
    assert_nowhere(watched.secrets | {UNSTORED, UPLOADED}, watched.outputs())


def test_storage_is_readable_by_its_owner_only(watched: Watched) -> None:
    watched.send("POST", "/v1/files", files={"file": ("a", b"x")}, data={"purpose": "batch"})
    blobs = watched.folder / "dragoman.db-blobs"
    places = [*watched.folder.glob("dragoman.db*"), *watched.folder.glob("recording*"), *blobs.rglob("*")]
    assert len(places) > 5
    for place in places:
        assert stat.S_IMODE(place.stat().st_mode) == (0o700 if place.is_dir() else 0o600), place


def test_crashed_worker_reveals_no_secret(watched: Watched) -> None:
    answer = watched.send("POST", CHAT, json={"model": "crashing", "messages": says(PROMPT)})
    assert answer.status_code == 502
    for pid in watched.running.workers():
        os.kill(pid, signal.SIGSEGV)
    assert_nowhere(watched.secrets | {PROMPT}, watched.outputs())


def test_key_store_is_readable_by_its_owner_only(watched: Watched) -> None:
    home = watched.folder / "home"
    for place in (home, *home.glob("keys.db*")):
        assert not stat.S_IMODE(place.stat().st_mode) & 0o077, place


WRONG = {
    "YAML that breaks off": f'api_keys: ["{STATIC}\n',
    "a key that is not a list": f'api_keys: {{"{STATIC}": 1}}\n',
    "a key with a wrong entry": f'api_keys: ["{STATIC}", 5, ["{ENVIRONMENT}"]]\n',
    "a key beside the list": f'api_keys: []\napi_key: "{STATIC}"\n',
    "a tab in YAML": f'api_keys:\n\t- "{STATIC}"\n',
    "a control character": f'api_keys: ["{STATIC}\x01"]\n',
    "an unknown tag": f'api_keys: !secret "{STATIC}"\n',
    "an unknown alias": f'api_keys: ["{STATIC}", *missing]\n',
    "a login in a wrong address": f'models: {{x: {{engine: upstream, url: "ftp://me:{LOGIN}@host"}}}}\n',
    "a login in an address with a query": f'models: {{x: {{engine: upstream, url: "http://me:{LOGIN}@host/?k={STATIC}"}}}}\n',
    "a login in a proxy": f'models: {{x: {{engine: upstream, url: "http://host", proxy: "x://me:{LOGIN}@host"}}}}\n',
    "a login in a source": f'models: {{x: "ftp://me:{LOGIN}@127.0.0.1:1/x.gguf"}}\n',
    "a key for a variable's name": f'models: {{x: {{engine: upstream, url: "http://host", api_key: "{UPSTREAM}"}}}}\n',
}


@pytest.mark.parametrize("mistake", WRONG)
def test_configuration_errors_contain_no_secret(
    tmp_path: Path, mistake: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "dragoman.yaml"
    file.write_text(WRONG[mistake])
    monkeypatch.setenv("DRAGOMAN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DRAGOMAN_API_KEY", ENVIRONMENT)
    assert main(["check", "--config", str(file)])
    printed = "".join(capfd.readouterr())
    assert str(file) in printed
    assert_nowhere({STATIC, LOGIN, UPSTREAM, ENVIRONMENT}, {"output": printed.encode()})


def test_failed_reload_reveals_no_secret(watched: Watched) -> None:
    file = watched.folder / "dragoman.json"
    before = file.read_text()
    try:
        # In JSON a tab is valid.
        for text in (text for text in WRONG.values() if "\t" not in text):
            file.write_text(text)
            assert watched.send("POST", "/admin/reload").status_code == 400
    finally:
        file.write_text(before)
    assert_nowhere(watched.secrets, watched.outputs() | {"answers": b"\n".join(watched.answers)})


def test_commands_print_no_secret(watched: Watched) -> None:
    config_file = str(watched.folder / "dragoman.json")
    environment = os.environ | {"DRAGOMAN_API_KEY": ENVIRONMENT}
    url = watched.running.url.replace("://", f"://me:{LOGIN}@")
    commands = [
        ["keys", "list", "--config", config_file],
        ["keys", "list", "--json", "--config", config_file],
        ["keys", "usage", "--config", config_file, "--api-key", STATIC],
        ["usage", "--url", watched.running.url, "--api-key", STATIC],
        ["check", "--config", config_file],
        ["models", "--url", watched.running.url],
        ["models", "--url", url],
        ["models", "load", "missing", "--url", url],
    ]
    for arguments in commands:
        command = [sys.executable, "-m", "dragoman", *arguments]
        run = subprocess.run(command, capture_output=True, env=environment, timeout=120, check=False)
        printed = run.stdout + run.stderr
        assert_nowhere(watched.secrets | {ENVIRONMENT}, {" ".join(arguments): printed})
        assert b"Traceback" not in printed
