"""Which file is loaded: trials with a small model are real, and what decides is set so that they end as they should."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tools.ports import free_port

from dragoman.engines.llama import hardware
from dragoman.engines.llama.engine import LlamaEngine
from dragoman.engines.llama.options import LlamaOptions
from dragoman.engines.llama.tuning import layout
from dragoman.engines.llama.tuning.layout import Layout, in_use, is_settled, prepared, why_not
from dragoman.engines.llama.tuning.messages import Quality, Speed, Tried
from tests.engines.laying import Told, always, cut, kept, kill_trials, read_choice, small_files

SAME = Speed(100, 100, 100)
CLOSE = Quality(500, 0.005, 0.97)


pytestmark = pytest.mark.usefixtures("home")


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("taken")
def test_the_real_model(smollm2_path: Path, home: Path) -> None:
    told = Told()
    before = smollm2_path.read_bytes()
    path = prepared(smollm2_path, told.say, told.bar)
    assert path.name == "Q8_0.gguf"
    assert smollm2_path.read_bytes() == before
    choice = read_choice(home)
    assert choice.tried is not None
    assert choice.tried.quality.tokens > 400
    assert choice.tried.quality.divergence < 0.015
    assert choice.tried.quality.agreement > 0.92
    assert choice.tried.before.least > 0
    begun, ended = told.lines
    assert begun == f"{smollm2_path.name} is Q4_1, which may be slow here: trying it as Q8_0, once ..."
    assert "KL divergence 0.0" in ended
    assert "same first choice 9" in ended
    assert told.parts == sorted(told.parts)
    assert list(dict.fromkeys(told.doing)) == ["converting", "measuring", "comparing"]


def test_a_choice_is_remembered(small: Path, made: Path, home: Path) -> None:
    told = Told()
    assert is_settled(small)
    assert in_use(small) == "Q8_0 for Q4_1"
    assert prepared(small, told.say, told.bar) == made
    assert (told.lines, told.parts) == ([], [])
    assert kept(home) == ["Q8_0.gguf", "choice.json", "lock"]


def test_the_record_tells_what_was_found(small: Path, made: Path) -> None:
    told = json.loads(made.with_name("choice.json").read_text())
    assert told["circumstances"]["processor"]["name"] == hardware.processor().name
    assert told["circumstances"]["original"]["path"] == str(small)
    assert set(told["tried"]) == {"type", "sha256", "share", "before", "after", "quality"}


def test_another_machine_tries_again_and_does_not_use_what_is_not_faster(
    small: Path, made: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "cpuinfo"
    other.write_text("model name\t: Abacus 9\nflags\t\t: fpu avx2 fma\n")
    monkeypatch.setattr(hardware, "PROCESSORS", other)
    assert hardware.processor() == hardware.Processor("Abacus 9", ("avx2", "fma"))
    assert not is_settled(small)
    monkeypatch.setattr(layout, "LEAST_CORES", 0)
    monkeypatch.setattr(layout, "LEAST_GAIN", 1000)
    told = Told()
    assert prepared(small, told.say) == small
    assert f"{small.name} stays Q4_1: as Q8_0 it is not clearly faster (prompts " in told.lines[-1]
    assert kept(home) == ["choice.json", "lock"]
    assert in_use(small) == "as-is"
    again = Told()
    assert prepared(small, again.say) == small
    assert again.lines == []


def test_what_a_busy_machine_finds_is_not_kept(small: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "LEAST_CORES", 2)
    told = Told()
    assert prepared(small, told.say) == small
    assert "too busy to measure anything; a load in 30 minutes or later tries again" in told.lines[-1]
    assert kept(home) == ["busy", "lock"]
    again = Told()
    assert prepared(small, again.say) == small
    (line,) = again.lines
    assert line.startswith("small.gguf stays Q4_1: the machine was too busy to try it; remove ")
    assert not is_settled(small)


def test_after_a_while_a_busy_machine_is_tried_again(small: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "LEAST_CORES", 2)
    prepared(small)
    (busy,) = home.glob("layouts/*/busy")
    before = time.time() - layout.BUSY_SECONDS
    os.utime(busy, (before, before))
    always(monkeypatch)
    assert prepared(small).name == "Q8_0.gguf"
    assert kept(home) == ["Q8_0.gguf", "choice.json", "lock"]


@pytest.mark.usefixtures("made")
def test_another_file_under_the_same_name_is_not_the_one_that_was_tried(small: Path) -> None:
    told = small.stat()
    os.utime(small, ns=(told.st_atime_ns, told.st_mtime_ns + 1))
    try:
        assert not is_settled(small)
    finally:
        os.utime(small, ns=(told.st_atime_ns, told.st_mtime_ns))
    assert is_settled(small)


def mapped() -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.rpartition("/")[2] for line in lines if line.endswith(".gguf")})


def loaded_from(small: Path, chosen: Layout) -> list[str]:
    """The model files that an engine has mapped."""

    async def main() -> list[str]:
        engine = LlamaEngine("small", LlamaOptions(str(small), context=64, slots=1, layout=chosen))
        await engine.start()
        found = mapped()
        await engine.stop()
        return found

    return asyncio.run(main())


@pytest.mark.usefixtures("made")
def test_the_engine_loads_what_was_chosen(small: Path) -> None:
    assert loaded_from(small, "auto") == ["Q8_0.gguf"]


def test_the_engine_loads_the_original(small: Path, home: Path) -> None:
    assert loaded_from(small, "as-is") == ["small.gguf"]
    assert not home.exists()


def test_what_is_fast_already_is_left_alone(minilm_path: Path, tmp_path: Path, home: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    for path in (minilm_path, broken, tmp_path / "none.gguf"):
        told = Told()
        assert prepared(path, told.say) == path
        assert told.lines == []
    assert not home.exists()


def test_a_file_that_is_cut_off_is_left_alone(small: Path, tmp_path: Path, home: Path) -> None:
    path = tmp_path / "half.gguf"
    path.write_bytes(small.read_bytes()[:-100_000])
    assert prepared(path) == path
    assert not home.exists()


@pytest.mark.parametrize(
    ("rule", "value", "words"),
    [
        ("MOST_GROWTH", 1.0, "as Q8_0 it would be 1.2 times as large"),
        ("MOST_MEMORY", 1e-6, "more than half of the memory"),
        ("SPARE_DISK", 1 << 60, "is nearly full"),
    ],
)
def test_where_there_is_no_room(
    small: Path, home: Path, monkeypatch: pytest.MonkeyPatch, rule: str, value: float, words: str
) -> None:
    monkeypatch.setattr(layout, rule, value)
    told = Told()
    assert prepared(small, told.say) == small
    (line,) = told.lines
    assert line.startswith("small.gguf stays Q4_1: ")
    assert words in line
    assert kept(home) == ["lock"]


def test_a_home_that_cannot_be_written(small: Path, home: Path) -> None:
    home.mkdir()
    (home / "layouts").write_text("not a folder")
    told = Told()
    assert prepared(small, told.say) == small
    (line,) = told.lines
    assert line.startswith("small.gguf stays as it is: nothing can be kept under ")


def test_a_disk_that_becomes_full(small: Path, home: Path) -> None:
    told = Told()
    with small_files():
        assert prepared(small, told.say) == small
    assert told.lines[1:] == ["small.gguf stays Q4_1: File too large"]
    assert kept(home) == ["lock"]
    assert not is_settled(small)


def test_a_trial_that_dies(small: Path, home: Path) -> None:
    told = Told()
    assert prepared(small, told.say, kill_trials) == small
    assert "could not be tried as Q8_0: the process ended with code -9; remove " in told.lines[-1]
    assert kept(home) == ["choice.json", "lock"]


def test_a_model_that_cannot_run(smollm2_path: Path, tmp_path: Path, home: Path) -> None:
    path = cut(smollm2_path, tmp_path / "lame.gguf", missing="blk.1.ffn_up.weight")
    told = Told()
    assert prepared(path, told.say) == path
    assert "blk.1.ffn_up.weight" in told.lines[-1]
    assert kept(home) == ["choice.json", "lock"]


def pull(small: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "dragoman", "pull", str(small)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_at_once_try_once(small: Path, home: Path) -> None:
    first, second = pull(small), pull(small)
    said = [process.communicate(timeout=100) for process in (first, second)]
    assert [out for out, _ in said] == [f"{small}\n"] * 2
    lines = [line for _, words in said for line in words.splitlines()]
    trials = [line for line in lines if "trying it as Q8_0, once" in line]
    assert len(trials) == 1
    assert not [name for name in kept(home) if name.startswith(".")]


def trying(home: Path) -> Path:
    """The folder of a trial that has begun to write."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if found := list((home / "layouts").glob("*/.trying-*/Q8_0.gguf")):
            return found[0].parent
        time.sleep(0.01)
    raise AssertionError("no trial has begun")


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9), (signal.SIGTERM, -15)])
def test_an_interrupted_trial_leaves_nothing(small: Path, home: Path, sent: signal.Signals, code: int) -> None:
    process = pull(small)
    folder = trying(home)
    process.send_signal(sent)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code
    assert said.count("\n") == 1
    deadline = time.monotonic() + 30
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert kept(home) == ["lock"]


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_that_ends_during_a_trial_leaves_nothing(small: Path, home: Path, sent: signal.Signals) -> None:
    command = [sys.executable, "-m", "dragoman", "serve", "--model", f"m={small}", "--port", str(free_port())]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        folder = trying(home)
        server.send_signal(sent)
        server.wait(timeout=60)
    deadline = time.monotonic() + 30
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert kept(home) == ["lock"]


def test_a_terminal_has_a_bar_and_ctrl_c_ends_it(small: Path, home: Path) -> None:
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "dragoman", "pull", str(small)]
    # Ctrl-C reaches every process of the group.
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs, start_new_session=True)
    os.close(theirs)
    folder = trying(home)
    seen = b""
    while b"#" not in seen:
        seen += os.read(ours, 4096)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=60) == 130
    os.close(ours)
    assert b"\r[" in seen
    assert b"% converting" in seen
    assert not folder.exists()
    assert kept(home) == ["lock"]


@pytest.mark.parametrize(
    ("after", "quality", "words"),
    [
        (Speed(200, 100, 150), CLOSE, None),
        (Speed(130, 91, 130), CLOSE, None),
        (Speed(110, 100, 110), CLOSE, "not clearly faster"),
        (Speed(200, 80, 150), CLOSE, "not clearly faster"),
        (Speed(200, 100, 150), Quality(500, 0.03, 0.97), "other things"),
        (Speed(200, 100, 150), Quality(500, 0.005, 0.89), "other things"),
    ],
)
def test_what_decides(after: Speed, quality: Quality, words: str | None) -> None:
    found = why_not(Tried("", 1.0, SAME, after, quality))
    assert (found is None) == (words is None)
    assert (words or "") in (found or "")
