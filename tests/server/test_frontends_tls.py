"""TLS with several front ends, including a restarted one."""

import os
import signal
import ssl
import time
from contextlib import ExitStack
from pathlib import Path

import httpx

from tests.server.test_connections import certified
from tests.server.test_frontends import front_of
from tests.support.requests import CHAT, HELLO, ask, eventually, text_of
from tests.support.server_process import Running, serving_at

CONFIG = {
    "models": {"echo": {"engine": "scripted"}},
    "tls": {"certificate": "server.pem", "key": "server.key"},
}

UNUSABLE = "a front end cannot apply the configuration: tls: "


def talking(port: int, trusted: ssl.SSLContext) -> httpx.Client:
    return httpx.Client(base_url=f"https://localhost:{port}", verify=trusted, trust_env=False, timeout=30)


def talk_to_each(running: Running, trusted: ssl.SSLContext) -> None:
    """Send requests that each front end answers itself and requests that it relays."""
    deadline = time.monotonic() + 40
    found: set[int | None] = set()
    with ExitStack() as stack:
        while len(found - {None}) < 2:
            assert time.monotonic() < deadline, found
            client = stack.enter_context(talking(running.port, trusted))
            found.add(front_of(running, client))
            assert text_of(ask(client, CHAT)) == "hello"
            told = client.post(CHAT, json={"messages": HELLO, "stream": True})
            assert told.text.endswith("data: [DONE]\n\n")
            assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["echo"]


def test_each_front_end_speaks_tls(tmp_path: Path) -> None:
    certificate = Path(certified(tmp_path).certificate)
    trusted, whole = ssl.create_default_context(cafile=certificate), certificate.read_bytes()
    with serving_at(tmp_path, CONFIG, lambda port: talking(port, trusted), "--workers", "2") as (running, _):
        talk_to_each(running, trusted)
        certificate.write_text("no certificate")
        os.kill(running.fronts()[0], signal.SIGKILL)
        assert eventually(lambda: UNUSABLE in running.log.read_text())
        certificate.write_bytes(whole)
        assert eventually(lambda: len(running.fronts()) == 2)
        talk_to_each(running, trusted)
        assert running.stop() == 0
        assert f"https://127.0.0.1:{running.port}" in running.log.read_text()
        assert "Traceback" not in running.log.read_text()
