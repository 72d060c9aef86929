"""The pytest plugin, in runs of pytest of its own."""

import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path

from dragoman.testing import plugin
from tests.support.pytest_runs import run_pytest

AGENT = """
import json

import anthropic
import openai
import pytest

from dragoman.testing import call, reply

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def ask(server, **fields):
    with openai.OpenAI(base_url=server.openai_url, api_key="none") as client:
        return client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hi."}], **fields)
"""
PASSING = """
def test_text(model_server):
    model_server.add("Hello.")
    assert ask(model_server).choices[0].message.content == "Hello."
    assert model_server.requests[0].text == "Hi."


async def test_async(model_server):
    model_server.add("Hello.")
    async with anthropic.AsyncAnthropic(base_url=model_server.url, api_key="none") as client:
        message = await client.messages.create(
            model="m", max_tokens=9, messages=[{"role": "user", "content": "Hi."}]
        )
    assert message.content[0].text == "Hello."


@pytest.mark.parametrize("number", range(5))
def test_servers_are_independent(model_server, number):
    model_server.add(str(number))
    assert ask(model_server).choices[0].message.content == str(number)
    assert len(model_server.requests) == 1
"""
FAILING = """
def test_swallows_the_refusal(model_server):
    model_server.add(reply(json={"city": 5}))
    with pytest.raises(openai.BadRequestError):
        ask(model_server, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}})


def test_ends_with_the_refusal(model_server):
    ask(model_server)


def test_fails_on_its_own(model_server):
    model_server.add("Hello.")
    assert ask(model_server).choices[0].message.content == "Bye."


def test_leaves_a_reply(model_server):
    model_server.add("Hello.")
    model_server.check_all_played()
"""
ASYNC = """
import asyncio
import inspect

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if inspect.iscoroutinefunction(pyfuncitem.obj):
        asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in ("model_server",)}))
        return True
"""


def test_tests_with_the_fixture(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(ASYNC)
    (tmp_path / "test_agent.py").write_text(AGENT + PASSING)
    # Warnings are errors there, as in the strictest projects.
    done = run_pytest(tmp_path, "-q", "-W", "error", "--strict-markers", "--strict-config")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "7 passed" in done.stdout
    assert not done.stderr


def test_refused_request_fails_the_test(tmp_path: Path) -> None:
    (tmp_path / "test_agent.py").write_text(AGENT + FAILING)
    done = run_pytest(tmp_path, "-q", "--tb=short")
    assert "4 failed" in done.stdout, done.stdout
    assert "error" not in done.stdout.splitlines()[-1]
    summary = done.stdout.partition("short test summary info")[2]
    assert "test_swallows_the_refusal - Failed: model server: request 'Hi.'" in summary
    assert "['city'] 5 is not of type 'string'" in done.stdout
    assert "the script has no reply for it; all its replies have been played" in done.stdout
    assert "test_fails_on_its_own - AssertionError" in summary
    assert "1 replies of the script were not played" in done.stdout


def test_fixture_of_the_same_name_wins(tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text(
        "import pytest\n\n\n@pytest.fixture\ndef model_server():\n    return 5\n\n\n"
        "def test_own(model_server):\n    assert model_server == 5\n"
    )
    assert run_pytest(tmp_path, "-q").returncode == 0


def test_other_runs_import_nothing(tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text(
        "import sys\n\n\ndef test_other():\n"
        "    loaded = {name for name in sys.modules if name.startswith('dragoman')}\n"
        "    known = {'dragoman', 'dragoman.core', 'dragoman.core.version'}\n"
        "    assert loaded <= {*known, 'dragoman.testing', 'dragoman.testing.plugin'}\n"
        "    assert not {'msgspec', 'httpx', 'uvloop', 'numpy'} & set(sys.modules)\n"
    )
    done = run_pytest(tmp_path, "-q")
    assert done.returncode == 0, done.stdout


def test_plugin_is_an_entry_point() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"dragoman": plugin.__name__}


def test_servers_work_without_pytest() -> None:
    code = "import sys, dragoman.testing as t\nwith t.serve_script(['x']): assert 'pytest' not in sys.modules"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
    assert importlib.util.find_spec("dragoman.testing") is not None
