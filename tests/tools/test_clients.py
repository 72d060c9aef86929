"""`make clients`, with small programs in the place of the clients."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from clients import packages
from clients.client import ANSWER, PROOF, URL, Client
from clients.client_run import Home, Run, find_problem
from clients.run import client_tests
from clients.scripted_server import configure, end

from dragoman.config.loading import Flags, load_settings
from tests.support.requests import eventually
from tests.support.workers import alive

DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
SHOW = "import os, sys; print(os.environ['HOME'], os.getcwd(), os.environ['BASE'], sys.argv[1])"
LEAVE = "import subprocess; print(subprocess.Popen(['sleep', '60'], stdout=-3, stderr=-3).pid)"
CLIENTS = [test.client for test in client_tests()]
CLIENT = Client("small", "small", "chat", "small", (), (), {"BASE": f"{URL}/v1"}, answers=2, refused=frozenset({400}))


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path, CLIENT, "http://127.0.0.1:9999")


def test_a_server_that_does_not_go_is_killed() -> None:
    process = subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout:
        process.stdout.readline()
    end(process, patience=0.2)
    assert process.returncode == -signal.SIGKILL


def test_a_client_has_a_home_a_folder_and_the_address_of_the_server(home: Home, tmp_path: Path) -> None:
    run = home.run([sys.executable, "-c", SHOW, f"--url={URL}"])
    addresses = ["http://127.0.0.1:9999/v1", "--url=http://127.0.0.1:9999"]
    assert run.output.split() == [str(tmp_path / "home"), str(tmp_path / "work"), *addresses]


def test_a_client_that_does_not_end_is_killed(home: Home) -> None:
    run = home.run([sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(60)"], limit=1)
    assert (run.status, run.output) == (None, "begun\n")
    assert find_problem(run, None, CLIENT, ()) == "not done after 120 s"


def test_what_a_client_leaves_behind_ends_with_it(home: Home) -> None:
    run = home.run([sys.executable, "-c", LEAVE])
    assert run.status == 0
    assert eventually(lambda: not alive(int(run.output)))


@pytest.mark.parametrize(
    ("run", "written", "answers", "problem"),
    [
        (Run(0, f"{ANSWER}\n{ANSWER}", ""), PROOF, [(200, ""), (400, "no_threads"), (499, "x")], ""),
        (Run(0, f"{ANSWER}\n{ANSWER}", ""), f"{PROOF}\n", [], ""),
        (Run(1, f"{ANSWER}\n{ANSWER}", ""), PROOF, [], "ended with status 1"),
        (Run(0, f"{ANSWER}\n{ANSWER}", ""), None, [], "the tool did not run"),
        (Run(0, f"{ANSWER}\n{ANSWER}", ""), "proof-%d", [], "the tool wrote 'proof-%d'"),
        (Run(0, ANSWER, ""), PROOF, [], "the answer was not printed"),
        (Run(0, f"{ANSWER}\n{ANSWER}", ""), PROOF, [(101, "")], "a WebSocket was used"),
        (Run(0, f"{ANSWER}\n{ANSWER}", ""), PROOF, [(404, "not_found")], "requests were answered 404 not_found"),
        (Run(0, f"{ANSWER}\n{ANSWER}", ""), PROOF, [(200, "died")], "requests were answered 200 died"),
    ],
)
def test_what_a_client_must_have_done(
    run: Run, written: str | None, answers: list[tuple[int, str]], problem: str
) -> None:
    assert find_problem(run, written, CLIENT, answers) == problem


@pytest.mark.parametrize("client", CLIENTS, ids=[client.name for client in CLIENTS])
def test_a_client_is_declared_with_what_is_there(client: Client) -> None:
    pinned = json.loads((packages.HERE / "package.json").read_text())["dependencies"]
    assert client.package in pinned or packages.is_python(client.package)
    assert all((packages.HERE / "settings" / source).is_file() for source in client.files.values())


def test_the_scripts_of_the_clients_are_valid(tmp_path: Path) -> None:
    file = tmp_path / "dragoman.json"
    file.write_text(json.dumps(configure(CLIENTS)))
    settings = load_settings(str(file), Flags(), {})
    assert {model.name for model in settings.models} == {client.model for client in CLIENTS}
