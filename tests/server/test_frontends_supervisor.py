"""Start, restart, configuration and end of front ends."""

import asyncio
import itertools
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from dragoman.config.settings import Settings
from dragoman.core.errors import ConfigError
from dragoman.ipc import child_process
from dragoman.ipc.framing import HEADER, MessageConnection, encode
from dragoman.server.app import App
from dragoman.server.frontends import supervisor as frontend_supervisor
from dragoman.server.frontends.messages import Listening
from dragoman.server.frontends.supervisor import FrontEndConnection, FrontEndSupervisor
from dragoman.server.http.server import bind_listeners
from dragoman.server.routes import build_app
from tests.server.test_jwt import SECRET, token
from tests.support.frontends import each
from tests.support.requests import CHAT, COMPLETIONS, PATIENCE, ask, eventually, refused, talking, text_of
from tests.support.server_process import Running, fronts_of, has_ended, serving

MODELS: dict[str, Any] = {"echo": {"engine": "scripted"}}


def signed_with(folder: Path, secret: str) -> dict[str, Any]:
    """Write the key file and return the configuration."""
    file = folder / f"{secret[:8]}.key"
    file.write_text(secret)
    return {"models_dir": [], "models": MODELS, "keys": {"jwt": {"algorithm": "HS256", "key_file": str(file)}}}


def reload_with(running: Running, secret: str) -> None:
    folder, before = running.log.parent, running.log.read_text().count("read again")
    (folder / "dragoman.json").write_text(json.dumps(signed_with(folder, secret)))
    running.process.send_signal(signal.SIGHUP)
    assert eventually(lambda: running.log.read_text().count("read again") > before)


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token(secret, aud=None)}"}


def is_replaced(running: Running, victim: int) -> bool:
    return eventually(lambda: len(running.fronts()) == 2 and victim not in running.fronts())


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("signed")
    with serving(folder, signed_with(folder, SECRET), "--workers", "2") as running:
        yield running


def test_front_end_restarts_after_the_key_file_moved(signed: Running) -> None:
    secrets = [f"{number} moved, {SECRET}" for number in range(2)]
    for secret in secrets:
        reload_with(signed, secret)
    for file in signed.log.parent.glob("*.key"):
        if file.read_text() != secrets[1]:
            file.unlink()
    victim = signed.fronts()[0]
    os.kill(victim, signal.SIGKILL)
    assert is_replaced(signed, victim)
    with each(signed, bearer(secrets[1])) as clients:
        assert [text_of(ask(client, CHAT)) for client in clients] == ["hello", "hello"]
    with talking(signed, bearer(secrets[0])) as client:
        refused(ask(client, CHAT), 401)


def test_front_end_that_cannot_apply_new_keys_is_replaced(signed: Running) -> None:
    victim = signed.fronts()[0]
    secrets = [f"{number} adopted, {SECRET}" for number in range(2)]
    reload_with(signed, secrets[0])
    # It can open no more files.
    resource.prlimit(victim, resource.RLIMIT_NOFILE, (0, 0))
    reload_with(signed, secrets[1])
    assert is_replaced(signed, victim)
    assert "a front end cannot apply the configuration: " in signed.log.read_text()
    for secret, status in zip(secrets, (401, 200), strict=True):
        with each(signed, bearer(secret)) as clients:
            assert [ask(client, CHAT).status_code for client in clients] == [status, status]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_second_signal_ends_the_drain(tmp_path: Path, workers: str) -> None:
    with serving(tmp_path, {"models": MODELS, "drain_seconds": 60}, "--workers", workers) as running:
        children = running.children()
        running.process.send_signal(signal.SIGINT)
        assert eventually(lambda: "new requests are taken for another 60 s" in running.log.read_text())
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(60) == 0
        assert all(has_ended(pid) for pid in children)
        assert "died" not in running.log.read_text()


def started(folder: Path, *flags: str, before: Callable[[], None] | None = None) -> "subprocess.Popen[bytes]":
    """Start a server with two front ends in its own process group."""
    file = folder / "dragoman.json"
    file.write_text(json.dumps({"models_dir": [], "models": MODELS}))
    command = [sys.executable, "-m", "dragoman", "serve", "--config", str(file), "--workers", "2", "--port", "0"]
    with (folder / "log").open("wb") as log:
        return subprocess.Popen([*command, *flags], stdout=log, stderr=log, start_new_session=True, preexec_fn=before)


def test_signal_to_the_group_during_start(tmp_path: Path) -> None:
    process = started(tmp_path)
    # The processes exist but have not started up.
    assert eventually(lambda: len(fronts_of(process.pid)) == 2)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(60) == 0
    assert "a front end" not in (tmp_path / "log").read_text()


def test_too_few_file_descriptors(tmp_path: Path) -> None:
    def short() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))

    process = started(tmp_path, "--workers", "16", before=short)
    assert process.wait(60) == 2
    told = (tmp_path / "log").read_text().splitlines()[-1]
    assert told.startswith("dragoman: ")
    assert told.endswith("Too many open files; allow more (ulimit -n), or start fewer (--workers)")


@pytest.mark.parametrize("workers", ["1", "2"])
def test_chosen_port_is_logged(tmp_path: Path, workers: str) -> None:
    process = started(tmp_path, "--workers", workers, "--host", "localhost")
    try:
        told = re.compile(r"serving echo on http://localhost:(\d+)/v1")
        assert eventually(lambda: told.search((tmp_path / "log").read_text()) is not None)
        found = told.search((tmp_path / "log").read_text())
        assert found is not None
        assert httpx.get(f"http://localhost:{found[1]}/health", trust_env=False, timeout=60).status_code == 200
    finally:
        process.terminate()
        assert process.wait(60) == 0


SETTINGS = Settings(port=0, models_dir=())


@asynccontextmanager
async def supervised(count: int) -> AsyncIterator[tuple[App, FrontEndSupervisor]]:
    app = build_app(SETTINGS)
    supervisor = FrontEndSupervisor(app, bind_listeners(SETTINGS, count))
    async with asyncio.timeout(60):
        try:
            yield app, supervisor
        finally:
            await supervisor.stop(0)
            await app.stop()


@pytest.mark.anyio
async def test_starting_front_end_is_exempt_from_the_apply_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontend_supervisor, "APPLY_SECONDS", 60)
    connect = MessageConnection.connect
    async with supervised(1) as (app, supervisor):

        async def connect_while_reloading(link: MessageConnection, end: socket.socket) -> None:
            await connect(link, end)
            await app.settings_listeners[0](SETTINGS)

        monkeypatch.setattr(MessageConnection, "connect", connect_while_reloading)
        await supervisor.wait_until_started()
        await app.settings_listeners[0](SETTINGS)


def pids(supervisor: FrontEndSupervisor) -> set[int]:
    return {connection.process.pid for connection in supervisor._connections if connection.process is not None}


async def wait_until_replaced(supervisor: FrontEndSupervisor, victim: int) -> None:
    """Wait until another front end listens."""
    while victim in pids(supervisor) or supervisor._listening_count < len(supervisor._socket_groups):  # noqa: ASYNC110
        await asyncio.sleep(0.05)


async def suspend_new(supervisor: FrontEndSupervisor, others: set[int]) -> int:
    """Suspend a front end that has just been started."""
    while not (new := pids(supervisor) - others):  # noqa: ASYNC110 (one comes)
        await asyncio.sleep(0.001)
    os.kill(min(new), signal.SIGSTOP)
    return min(new)


@pytest.mark.anyio
async def test_only_a_hanging_front_end_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(child_process, "PING_SECONDS", 0.6)
    async with supervised(2) as (_, supervisor):
        await supervisor.wait_until_started()
        before = pids(supervisor)
        await asyncio.sleep(4)
        assert pids(supervisor) == before
        os.kill(min(before), signal.SIGSTOP)
        await wait_until_replaced(supervisor, min(before))
        now = pids(supervisor)
        assert (len(now), now & before) == (2, {max(before)})
    errors = [message for message in caplog.messages if "not answered" in message]
    assert errors == ["a front end has not answered for 3 s; killing it"]


@pytest.mark.anyio
async def test_front_end_that_hangs_before_listening_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begin, seconds = FrontEndConnection.begin, itertools.cycle((1, 60))

    def begin_with(self: FrontEndConnection, settings: Settings) -> None:
        """Every other front end is suspended; the others get time to start."""
        monkeypatch.setattr(frontend_supervisor, "LISTEN_SECONDS", next(seconds))
        begin(self, settings)

    monkeypatch.setattr(FrontEndConnection, "begin", begin_with)
    async with supervised(1) as (_, supervisor):
        first = await suspend_new(supervisor, set())
        await supervisor.wait_until_started()
        second = pids(supervisor)
        assert first not in second
        os.kill(min(second), signal.SIGKILL)
        third = await suspend_new(supervisor, second)
        await wait_until_replaced(supervisor, third)
    assert caplog.messages.count("a front end does not listen 1 s after its start; killing it") == 2


@pytest.mark.anyio
async def test_front_end_that_hangs_while_another_starts_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "PING_SECONDS", 0.6)

    async def one_listens(supervisor: FrontEndSupervisor, others: set[int]) -> int:
        """Wait for one new front end that listens."""
        while supervisor._listening_count < 1 or len(new := pids(supervisor) - others) != 1:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        return new.pop()

    async with supervised(2) as (_, supervisor):
        late = await suspend_new(supervisor, set())
        first = await one_listens(supervisor, {late})
        os.kill(first, signal.SIGSTOP)
        all_listen = asyncio.create_task(supervisor.wait_until_started())
        second = asyncio.create_task(one_listens(supervisor, {late, first}))
        await asyncio.wait({all_listen, second}, return_when=asyncio.FIRST_COMPLETED)
        assert not all_listen.done()
        os.kill(late, signal.SIGCONT)
        await all_listen
        assert late in pids(supervisor)


@pytest.mark.anyio
async def test_server_gives_up_if_all_front_ends_hang(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(frontend_supervisor, "LISTEN_SECONDS", 0.02)
    async with supervised(1) as (_, supervisor):
        with pytest.raises(ConfigError, match="3 front ends in a row did not listen; try again"):
            await supervisor.wait_until_started()
    assert caplog.messages.count("a front end does not listen 0.02 s after its start; killing it") == 3


@pytest.mark.anyio
async def test_messages_after_the_kill_are_ignored() -> None:
    calls: list[str] = []
    connection = FrontEndConnection(build_app(SETTINGS), lambda: calls.append("listening"))
    connection.kill("hangs")
    connection._receive(memoryview(encode(Listening())[HEADER.size :]))
    assert (calls, connection.is_listening) == ([], False)


@pytest.mark.anyio
async def test_front_end_that_applies_keys_too_late_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(frontend_supervisor, "APPLY_SECONDS", 1)
    monkeypatch.setattr(child_process, "PING_SECONDS", 60)
    async with supervised(2) as (app, supervisor):
        await supervisor.wait_until_started()
        before = pids(supervisor)
        os.kill(min(before), signal.SIGSTOP)
        await app.settings_listeners[0](SETTINGS)
        await wait_until_replaced(supervisor, min(before))
        assert pids(supervisor) & before == {max(before)}
    assert "a front end has not applied the configuration within 1 s; killing it" in caplog.messages


@pytest.mark.anyio
async def test_unexpected_error_of_the_supervisor_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("unexpected")

    monkeypatch.setattr(FrontEndConnection, "begin", refuse)
    async with supervised(1) as (_, supervisor):
        with pytest.raises(RuntimeError, match="unexpected"):
            await supervisor.wait_for_any(asyncio.Event())


class TestStuckFrontEnd:
    """A front end that got SIGSTOP stands for one whose event loop is stuck: it reads and answers nothing."""

    @pytest.fixture
    def pair(self, tmp_path: Path) -> Iterator[Running]:
        config = {"models": MODELS, "grace_seconds": 1}
        with serving(tmp_path, config, "--workers", "2") as running:
            yield running

    def test_ends_with_a_parent_that_was_killed(self, pair: Running) -> None:
        fronts = pair.fronts()
        os.kill(fronts[0], signal.SIGSTOP)
        pair.process.kill()
        pair.process.wait()
        assert eventually(lambda: all(map(has_ended, fronts)))

    def test_does_not_prevent_shutdown(self, pair: Running) -> None:
        os.kill(pair.fronts()[0], signal.SIGSTOP)
        assert pair.stop(PATIENCE) == 0

    def test_healthy_front_ends_are_kept_after_the_parent_was_suspended(self, pair: Running) -> None:
        fronts = pair.fronts()
        os.kill(pair.process.pid, signal.SIGSTOP)
        time.sleep(15)
        os.kill(pair.process.pid, signal.SIGCONT)
        with talking(pair) as client:
            deadline = time.monotonic() + 5
            while time.monotonic() < deadline:
                assert text_of(ask(client, COMPLETIONS)) == "hello"
                time.sleep(0.1)
        assert pair.fronts() == fronts
