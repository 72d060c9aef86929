"""Runs a real server in its own process."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx
import pytest
from tools.server import FRONT_END_MODULE, Server, plain_client, process_tree, run_server
from tools.server import command_of as command_of

from dragoman.files import sources
from dragoman.server.auth.admin_token import ADMIN_TOKEN_HEADER, find_admin_token


@dataclass
class Running(Server):
    event_log: Path

    @property
    def operator(self) -> dict[str, str]:
        """The header that the operator's routes need if the server has no keys."""
        token = find_admin_token("127.0.0.1", self.port)
        return {} if token is None else {ADMIN_TOKEN_HEADER: token}

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.event_log.read_text().splitlines()]

    def children(self) -> list[int]:
        return children_of(self.process.pid)

    def fronts(self) -> list[int]:
        """The processes that accept connections."""
        return self.front_ends()


def children_of(pid: int) -> list[int]:
    """All descendants of a process."""
    return process_tree(pid)[1:]


def fronts_of(pid: int) -> list[int]:
    return sorted(child for child in children_of(pid) if FRONT_END_MODULE in command_of(child))


def has_ended(pid: int) -> bool:
    """Whether a process has ended; a zombie counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


class Serving(Protocol):
    """The fixture `serving`: starts servers in the arrangement of the test."""

    def __call__(self, folder: Path, config: Mapping[str, Any], *flags: str) -> AbstractContextManager[Running]: ...


@contextmanager
def serving(folder: Path, config: Mapping[str, Any], *flags: str, workers: int = 1) -> Iterator[Running]:
    """`dragoman serve` with this configuration, ready for use until the end of the block."""
    with serving_at(folder, config, plain_client, *flags, workers=workers) as (running, _):
        yield running


def server_fixture(config: Mapping[str, Any], *flags: str) -> Any:
    """A fixture of the tests of a module: one server with this configuration, in the arrangement of the test."""

    @pytest.fixture(scope="module")
    def server(tmp_path_factory: pytest.TempPathFactory, serving: Serving) -> Iterator[Running]:
        with serving(tmp_path_factory.mktemp("server"), config, *flags) as running:
            yield running

    return server


@contextmanager
def serving_at(
    folder: Path, config: Mapping[str, Any], connect: Callable[[int], httpx.Client], *flags: str, workers: int = 1
) -> Iterator[tuple[Running, httpx.Client]]:
    """The same with a special client, for servers that a plain one cannot reach."""
    event_log = folder / "events.jsonl"
    flags = ("--workers", str(workers), "--event-log", str(event_log), *flags)
    # With several front ends, one may answer before all listen. The line "serving ..." comes when all do.
    with run_server(
        folder, config, *flags, env={"PYTHONWARNINGS": "default"}, connect=connect, logged="serving "
    ) as server:
        running = Running(server.process, server.port, server.log, event_log)
        try:
            with connect(server.port) as client:
                yield running, client
        finally:
            if running.is_alive:
                # A server that is killed leaves its token file.
                (sources.home_directory() / "run" / f"127.0.0.1_{server.port}.token").unlink(missing_ok=True)
