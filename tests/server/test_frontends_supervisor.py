"""Front ends begin, adopt a new configuration and end as their server wants, whatever has happened to them before."""

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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import dragoman.server.frontends.supervisor
from dragoman.config.settings import Settings
from dragoman.core.errors import ConfigError
from dragoman.ipc.link import Link
from dragoman.ipc.worker_messages import HEADER
from dragoman.server.factory import build_app
from dragoman.server.frontends import parent
from dragoman.server.frontends.messages import Listening, encode
from dragoman.server.frontends.parent import Desk
from dragoman.server.frontends.sockets import places
from dragoman.server.frontends.supervisor import Crew
from tests.server.test_frontends import each
from tests.server.test_jwt import SECRET, token
from tests.server.test_shutdown_and_logs import gone
from tests.support.serving import Running, command_of, serving
from tests.support.talking import CHAT, ask, eventually, refused, talking, text_of

MODELS: dict[str, Any] = {"echo": {"engine": "scripted"}}


def signed_with(folder: Path, secret: str) -> dict[str, Any]:
    """The configuration, and the file that it names."""
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


def another_came(running: Running, victim: int) -> bool:
    return eventually(lambda: len(running.fronts()) == 2 and victim not in running.fronts())


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("signed")
    with serving(folder, signed_with(folder, SECRET), "--workers", "2") as running:
        yield running


def test_one_that_dies_after_the_key_file_has_moved_comes_back(signed: Running) -> None:
    secrets = [f"{number} moved, {SECRET}" for number in range(2)]
    for secret in secrets:
        reload_with(signed, secret)
    for file in signed.log.parent.glob("*.key"):
        if file.read_text() != secrets[1]:
            file.unlink()
    victim = signed.fronts()[0]
    os.kill(victim, signal.SIGKILL)
    assert another_came(signed, victim)
    with each(signed, bearer(secrets[1])) as clients:
        assert [text_of(ask(client, CHAT)) for client in clients] == ["hello", "hello"]
    with talking(signed, bearer(secrets[0])) as client:
        refused(ask(client, CHAT), 401)


def test_one_that_cannot_adopt_new_keys_does_not_go_on_with_the_old_ones(signed: Running) -> None:
    victim = signed.fronts()[0]
    secrets = [f"{number} adopted, {SECRET}" for number in range(2)]
    reload_with(signed, secrets[0])
    # It can open nothing any more.
    resource.prlimit(victim, resource.RLIMIT_NOFILE, (0, 0))
    reload_with(signed, secrets[1])
    assert another_came(signed, victim)
    assert "a front end cannot take over the configuration: keys.jwt.key_file" in signed.log.read_text()
    for secret, status in zip(secrets, (401, 200), strict=True):
        with each(signed, bearer(secret)) as clients:
            assert [ask(client, CHAT).status_code for client in clients] == [status, status]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_second_signal_does_not_wait_for_new_requests(tmp_path: Path, workers: str) -> None:
    with serving(tmp_path, {"models": MODELS, "drain_seconds": 60}, "--workers", workers) as running:
        children = running.children()
        running.process.send_signal(signal.SIGINT)
        assert eventually(lambda: "new requests are taken for another 60 s" in running.log.read_text())
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(60) == 0
        assert all(gone(pid) for pid in children)
        assert "died" not in running.log.read_text()


def started(folder: Path, *flags: str, before: Callable[[], None] | None = None) -> "subprocess.Popen[bytes]":
    """A server with two front ends, and a process group of its own, from its very beginning."""
    file = folder / "dragoman.json"
    file.write_text(json.dumps({"models_dir": [], "models": MODELS}))
    command = [sys.executable, "-m", "dragoman", "serve", "--config", str(file), "--workers", "2", "--port", "0"]
    with (folder / "log").open("wb") as log:
        return subprocess.Popen([*command, *flags], stdout=log, stderr=log, start_new_session=True, preexec_fn=before)


def fronts_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for task in tasks for child in task.read_text().split()]
    return [child for child in children if b"frontends.process" in command_of(child)]


def test_a_signal_for_the_whole_group_while_they_start(tmp_path: Path) -> None:
    process = started(tmp_path)
    # They are there, and have not come to anything yet.
    assert eventually(lambda: len(fronts_of(process.pid)) == 2)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(60) == 0
    assert "a front end" not in (tmp_path / "log").read_text()


def test_where_there_are_no_files_left_to_open_for_them(tmp_path: Path) -> None:
    def short() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))

    process = started(tmp_path, "--workers", "16", before=short)
    assert process.wait(60) == 2
    told = (tmp_path / "log").read_text().splitlines()[-1]
    assert told.startswith("dragoman: ")
    assert told.endswith("Too many open files; allow more (ulimit -n), or start fewer (--workers)")


@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_port_is_told_where_any_would_do(tmp_path: Path, workers: str) -> None:
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


def test_one_that_is_just_being_started_need_not_adopt_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = Link.connect

    async def scenario() -> None:
        settings = Settings(port=0, models_dir=())
        app = build_app(settings)
        crew = Crew(app, places(settings, 1))

        async def connect_while_reloading(link: Link, end: socket.socket) -> None:
            await connect(link, end)
            await app.followers[0](settings)

        monkeypatch.setattr(Link, "connect", connect_while_reloading)
        async with asyncio.timeout(60):
            await crew.started()
            await app.followers[0](settings)
            await crew.stop(0)
        await app.stop()

    monkeypatch.setattr(dragoman.server.frontends.supervisor, "ADOPT_SECONDS", 60)
    asyncio.run(scenario())


async def replaced(crew: Crew, victim: int) -> None:
    """Until another listens in its place."""
    while victim in {process.pid for process in crew._processes} or crew._listening < len(crew._places):  # noqa: ASYNC110
        await asyncio.sleep(0.05)


async def stopped(crew: Crew, others: set[int]) -> int:
    """A front end that has just been started, and comes to nothing."""
    while not (new := {process.pid for process in crew._processes} - others):  # noqa: ASYNC110 (one comes)
        await asyncio.sleep(0.001)
    os.kill(min(new), signal.SIGSTOP)
    return min(new)


def test_one_that_hangs_is_replaced_and_one_that_answers_is_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(parent, "KNOCK_SECONDS", 0.6)

    async def scenario() -> None:
        settings = Settings(port=0, models_dir=())
        app = build_app(settings)
        crew = Crew(app, places(settings, 2))
        async with asyncio.timeout(60):
            await crew.started()
            before = {process.pid for process in crew._processes}
            await asyncio.sleep(4)
            assert {process.pid for process in crew._processes} == before
            os.kill(min(before), signal.SIGSTOP)
            await replaced(crew, min(before))
            now = {process.pid for process in crew._processes}
            assert (len(now), now & before) == (2, {max(before)})
            await crew.stop(0)
        await app.stop()

    asyncio.run(scenario())
    said = [message for message in caplog.messages if "not answered" in message]
    assert said == ["a front end has not answered for 3 s; ending it"]


def test_one_that_hangs_before_it_listens_is_replaced_at_the_first_start_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begin, seconds = Desk.begin, itertools.cycle((1, 60))

    def begin_with(self: Desk, number: int, settings: Settings) -> None:
        """This test stops every other front end; the others get time to start."""
        monkeypatch.setattr(parent, "LISTEN_SECONDS", next(seconds))
        begin(self, number, settings)

    monkeypatch.setattr(Desk, "begin", begin_with)

    async def scenario() -> None:
        settings = Settings(port=0, models_dir=())
        app = build_app(settings)
        crew = Crew(app, places(settings, 1))
        async with asyncio.timeout(60):
            first = await stopped(crew, set())
            await crew.started()
            second = {process.pid for process in crew._processes}
            assert first not in second
            os.kill(min(second), signal.SIGKILL)
            third = await stopped(crew, second)
            await replaced(crew, third)
            await crew.stop(0)
        await app.stop()

    asyncio.run(scenario())
    assert caplog.messages.count("a front end does not listen, 1 s after its start; ending it") == 2


def test_one_that_hangs_while_another_does_not_listen_yet_is_replaced_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parent, "KNOCK_SECONDS", 0.6)

    async def one_listens(crew: Crew, others: set[int]) -> int:
        """The one that does, and that was not there before."""
        while crew._listening < 1 or len(new := {process.pid for process in crew._processes} - others) != 1:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        return new.pop()

    async def scenario() -> None:
        settings = Settings(port=0, models_dir=())
        app = build_app(settings)
        crew = Crew(app, places(settings, 2))
        async with asyncio.timeout(60):
            late = await stopped(crew, set())
            first = await one_listens(crew, {late})
            os.kill(first, signal.SIGSTOP)
            all_listen = asyncio.create_task(crew.started())
            second = asyncio.create_task(one_listens(crew, {late, first}))
            await asyncio.wait({all_listen, second}, return_when=asyncio.FIRST_COMPLETED)
            assert not all_listen.done()
            os.kill(late, signal.SIGCONT)
            await all_listen
            assert late in {process.pid for process in crew._processes}
            await crew.stop(0)
        await app.stop()

    asyncio.run(scenario())


def test_where_all_of_them_hang_the_server_gives_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(parent, "LISTEN_SECONDS", 0.02)

    async def scenario() -> None:
        settings = Settings(port=0, models_dir=())
        app = build_app(settings)
        crew = Crew(app, places(settings, 1))
        async with asyncio.timeout(60):
            with pytest.raises(ConfigError, match="3 front ends in a row did not listen; try again"):
                await crew.started()
            await crew.stop(0)
        await app.stop()

    asyncio.run(scenario())
    assert caplog.messages.count("a front end does not listen, 0.02 s after its start; ending it") == 3


def test_what_one_that_has_been_ended_still_says_does_not_count() -> None:
    async def scenario() -> None:
        told: list[str] = []
        one = Desk(
            build_app(Settings(models_dir=())), lambda: None, lambda: told.append("listens"), lambda: told.append("end")
        )
        one.end("hangs")
        one.end("hangs still")
        one._take(memoryview(encode(Listening())[HEADER.size :]))
        assert (told, one.is_listening) == (["end"], False)

    asyncio.run(scenario())


def test_one_that_does_not_adopt_new_keys_in_time_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dragoman.server.frontends.supervisor, "ADOPT_SECONDS", 1)
    monkeypatch.setattr(parent, "KNOCK_SECONDS", 60)

    async def scenario() -> None:
        settings = Settings(port=0, models_dir=())
        app = build_app(settings)
        crew = Crew(app, places(settings, 2))
        async with asyncio.timeout(60):
            await crew.started()
            before = {process.pid for process in crew._processes}
            os.kill(min(before), signal.SIGSTOP)
            await app.followers[0](settings)
            await replaced(crew, min(before))
            assert {process.pid for process in crew._processes} & before == {max(before)}
            await crew.stop(0)
        await app.stop()

    asyncio.run(scenario())
    assert "a front end has not taken over the configuration within 1 s; ending it" in caplog.messages


def test_a_place_that_nobody_mans_any_more_is_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("nobody expected this")

    async def scenario() -> None:
        settings = Settings(port=0, models_dir=())
        app = build_app(settings)
        crew = Crew(app, places(settings, 1))
        with pytest.raises(RuntimeError, match="nobody expected this"):
            await crew.until(asyncio.Event())
        await crew.stop(0)
        await app.stop()

    monkeypatch.setattr(Desk, "begin", refuse)
    asyncio.run(scenario())
