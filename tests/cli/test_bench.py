"""`dragoman bench`, run as a command against a real server."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tools.ports import free_port

from tests.cli.test_cli import environment, refused, run
from tests.support.server_process import Running, serving


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    long = [{"output": "word" * 400}]
    config = {
        "models": {
            "long": {"engine": "scripted", "replies": long},
            "slow": {"engine": "scripted", "replies": long, "tokens_per_second": 20},
            "curt": {"engine": "scripted", "replies": [{"output": "Certainly."}]},
            "one": {"engine": "scripted", "replies": long, "tokens_per_second": 10, "slots": 1},
            "failing": {"engine": "scripted", "replies": long, "fail_after": 3},
            "small": {"engine": "scripted", "context": 60},
        },
        "api_keys": ["secret"],
        "limits": {"queue": 1},
    }
    with serving(tmp_path_factory.mktemp("bench"), config) as running:
        yield running


def bench(folder: Path, server: Running, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return run(folder, "bench", "--url", server.url, *arguments, environ={"OPENAI_API_KEY": "secret"})


def test_sweep_writes_text_json_and_svg(tmp_path: Path, server: Running) -> None:
    done = bench(
        tmp_path,
        server,
        *("--concurrency", "1,3", "--requests", "6", "--prompt", "200", "--output", "20", "--shared", "0.5"),
        *("--seed", "7", "--plot", "out.svg", "--json", "out.json"),
    )
    assert done.returncode == 0, done.stderr
    heading, head, *rows = done.stdout.splitlines()
    assert heading.startswith(f"long at {server.url}: prompt of ")
    assert heading.endswith("50% shared, reply of 20, seed 7")
    assert head.split()[:3] == ["CONCURRENCY", "REQUESTS", "ERRORS"]
    assert [row.split()[:3] for row in rows[:2]] == [["1", "6", "0"], ["3", "6", "0"]]
    raw = json.loads((tmp_path / "out.json").read_text())
    assert raw["plan"]["concurrency"] == [1, 3]
    for level in raw["levels"]:
        assert level["figures"]["prompt_tokens"] == pytest.approx(200, rel=0.03)
        assert level["figures"]["output_tokens"] == 20
        assert len(level["samples"]) == 6
        seconds = level["figures"]["seconds"]
        assert level["figures"]["output_tokens_per_second"] == pytest.approx(120 / seconds)
    picture = ElementTree.fromstring((tmp_path / "out.svg").read_text())
    assert len(list(picture.iter("{http://www.w3.org/2000/svg}circle"))) == 6


def test_note_about_short_replies(tmp_path: Path, server: Running) -> None:
    done = bench(tmp_path, server, "--model", "curt", "--concurrency", "1", "--output", "50")
    assert done.returncode == 0
    assert "note: replies were shorter than requested: 3 tokens on average" in done.stdout


def test_note_about_rejected_fields(tmp_path: Path) -> None:
    config = {"models": {"m": {"engine": "scripted"}}, "strict": True}
    with serving(tmp_path, config) as running:
        done = run(tmp_path, "bench", "--url", f"{running.url}/v1", "--concurrency", "1", "--requests", "1")
    assert done.returncode == 0, done.stderr
    assert "note: the server rejects ignore_eos and min_tokens; requests were sent without" in done.stdout


def test_errors_are_counted_by_message(tmp_path: Path, server: Running) -> None:
    done = bench(tmp_path, server, "--model", "one", "--concurrency", "6", "--requests", "6", "--output", "20")
    assert done.returncode == 1
    crowded = done.stdout.splitlines()[2].split()
    assert crowded[:3] == ["6", "6", "4"]
    assert "\nerror at 6, 4 times: 503 " in done.stdout


def interrupt(folder: Path, server: Running, line: str, *arguments: str) -> tuple[str, str]:
    """Press Ctrl-C after this line of progress, and return what is printed after it."""
    command = [sys.executable, "-m", "dragoman", "bench", "--url", server.url, "--api-key", "secret", "--model", "slow"]
    environ, pipe = environment(folder), subprocess.PIPE
    with subprocess.Popen([*command, *arguments], env=environ, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stderr is not None
        while process.stderr.readline() != f"{line}\n":
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        output, rest = process.communicate(timeout=60)
    assert process.returncode == 130
    return output, rest


def test_ctrl_c_prints_finished_levels(tmp_path: Path, server: Running) -> None:
    plan = ("--concurrency", "2,1", "--requests", "2", "--prompt", "100", "--output", "20")
    output, rest = interrupt(tmp_path, server, "2 requests, 1 at once", *plan)
    assert (rest, output.splitlines()[2].split()[:3]) == ("", ["2", "2", "0"])


def test_ctrl_c_during_warm_up(tmp_path: Path, server: Running) -> None:
    printed = interrupt(tmp_path, server, "warming up slow", "--output", "300")
    assert printed == ("", "stopped before anything was measured\n")


def test_model_with_small_context(tmp_path: Path, server: Running) -> None:
    done = bench(tmp_path, server, "--model", "small", "--prompt", "52", "--seed", "7", "--concurrency", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("small at ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--url", "127.0.0.1:8000"], "expected an address such as http://127.0.0.1:8000"),
        (["--url", "http://127.0.0.1:99999"], "expected an address"),
        (["--url", "http://a b"], "--url http://a b: no answer: "),
        (["--url", "http://127.0.0.1:{port}"], "--url http://127.0.0.1:{port}: no answer: "),
        (["--url", "http://127.0.0.1:{port}", "--model", "m"], "--url http://127.0.0.1:{port}: no answer: "),
        (["--concurrency", "1,x"], "--concurrency 1,x: expected numbers such as 1,4,16"),
        (["--concurrency", "1,4,1600000"], "--concurrency 1,4,1600000: at most 10,000 requests at once"),
        (["--concurrency", "0"], "--concurrency 0: expected numbers"),
        (["--concurrency", "8", "--requests", "4"], "--requests 4: too few for 8 at once"),
        (["--shared", "2"], "--shared 2.0: expected a share from 0 to 1"),
        (["--prompt", "0"], "--prompt 0: expected at least 1"),
        (["--output", "-1"], "--output -1: expected at least 1"),
        (["--timeout", "0"], "--timeout 0.0: expected more than 0 seconds"),
        (["--plot", "none/out.svg"], "--plot none/out.svg: directory none not found"),
        (["--plot", "folder.svg"], "--plot folder.svg: is a directory; give the name of a file"),
        (["--json", "folder.svg"], "--json folder.svg: is a directory; give the name of a file"),
        (["--plot", "out.png"], "--plot out.png: the plot is an SVG; give a name that ends in .svg"),
        (["--plot", "out.svg", "--json", "./out.svg"], "--plot and --json are the same file, out.svg; give two names"),
    ],
)
def test_errors_in_flags_are_one_line(tmp_path: Path, arguments: list[str], words: str) -> None:
    (tmp_path / "folder.svg").mkdir()
    port = free_port()
    formatted = [argument.format(port=port) for argument in arguments]
    done = run(tmp_path, "bench", *formatted)
    assert words.format(port=port) in refused(done)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "nope"], "dragoman: --model nope: the server answered 404 "),
        (["--model", "failing"], "the script fails after 3 tokens"),
        (["--prompt", "5", "--seed", "7"], "--prompt 5: the shortest prompt has "),
        (["--model", "small", "--prompt", "100"], "dragoman: the server answered 400 "),
    ],
)
def test_server_errors_before_the_measurement(
    tmp_path: Path, server: Running, arguments: list[str], words: str
) -> None:
    done = bench(tmp_path, server, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr.splitlines()[-1]


def test_missing_api_key(tmp_path: Path, server: Running) -> None:
    words = refused(run(tmp_path, "bench", "--url", server.url))
    assert words.endswith("; give --api-key")
