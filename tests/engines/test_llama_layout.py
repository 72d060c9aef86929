"""Choice of the weight layout, with real trials of a small model. Thresholds are set so that a trial ends as needed."""

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
from dragoman.engines.llama.tuning import weight_layout
from dragoman.engines.llama.tuning.trial_messages import Quality, Speed, TrialResult
from dragoman.engines.llama.tuning.weight_layout import (
    Layout,
    chosen_layout,
    is_layout_known,
    prepare_model_file,
    rejection_reason,
)
from tests.engines.layout_fixtures import (
    Recorder,
    accept_all,
    cut_model,
    kill_trials,
    limit_file_size,
    read_choice,
    stored_files,
)

SAME = Speed(100, 100, 100)
CLOSE = Quality(500, 0.005, 0.97)


pytestmark = pytest.mark.usefixtures("home")


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("accept_any_copy")
def test_trial_of_the_real_model(smollm2_path: Path, home: Path) -> None:
    recorder = Recorder()
    before = smollm2_path.read_bytes()
    path = prepare_model_file(smollm2_path, recorder.say, recorder.bar)
    assert path.name == "Q8_0.gguf"
    assert smollm2_path.read_bytes() == before
    choice = read_choice(home)
    assert choice.tried is not None
    assert choice.tried.quality.tokens > 400
    assert choice.tried.quality.divergence < 0.015
    assert choice.tried.quality.agreement > 0.92
    assert choice.tried.before.minimum > 0
    first, last = recorder.lines
    assert first == f"{smollm2_path.name} is Q4_1, which may be slow here: trying Q8_0 once ..."
    assert "KL divergence 0.0" in last
    assert "same most likely token 9" in last
    assert recorder.parts == sorted(recorder.parts)
    assert list(dict.fromkeys(recorder.doing)) == ["converting", "measuring", "comparing"]


def test_choice_is_remembered(small: Path, q8_copy: Path, home: Path) -> None:
    recorder = Recorder()
    assert is_layout_known(small)
    assert chosen_layout(small) == "Q8_0 for Q4_1"
    assert prepare_model_file(small, recorder.say, recorder.bar) == q8_copy
    assert (recorder.lines, recorder.parts) == ([], [])
    assert stored_files(home) == ["Q8_0.gguf", "choice.json", "lock"]


def test_record_of_a_choice(small: Path, q8_copy: Path) -> None:
    record = json.loads(q8_copy.with_name("choice.json").read_text())
    assert record["circumstances"]["processor"]["name"] == hardware.processor().name
    assert record["circumstances"]["original"]["path"] == str(small)
    assert set(record["tried"]) == {"type", "sha256", "share", "before", "after", "quality"}


def test_new_trial_on_another_processor_rejects_slower_copy(
    small: Path, q8_copy: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("model name\t: Abacus 9\nflags\t\t: fpu avx2 fma\n")
    monkeypatch.setattr(hardware, "CPUINFO", cpuinfo)
    assert hardware.processor() == hardware.Processor("Abacus 9", ("avx2", "fma"))
    assert not is_layout_known(small)
    monkeypatch.setattr(weight_layout, "MIN_CPU_SHARE", 0)
    monkeypatch.setattr(weight_layout, "MIN_SPEEDUP", 1000)
    recorder = Recorder()
    assert prepare_model_file(small, recorder.say) == small
    assert f"{small.name} stays Q4_1: as Q8_0 it is not clearly faster (speed of prompts " in recorder.lines[-1]
    assert stored_files(home) == ["choice.json", "lock"]
    assert chosen_layout(small) == "as-is"
    again = Recorder()
    assert prepare_model_file(small, again.say) == small
    assert again.lines == []


def test_no_choice_is_stored_on_a_busy_machine(small: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_layout, "MIN_CPU_SHARE", 2)
    recorder = Recorder()
    assert prepare_model_file(small, recorder.say) == small
    assert "too busy to measure its speed; loading the model in 30 minutes or later tries" in recorder.lines[-1]
    assert stored_files(home) == ["busy", "lock"]
    again = Recorder()
    assert prepare_model_file(small, again.say) == small
    (line,) = again.lines
    assert line.startswith("small.gguf stays Q4_1: the machine was too busy for a trial; remove ")
    assert not is_layout_known(small)


def test_new_trial_after_the_busy_delay(small: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_layout, "MIN_CPU_SHARE", 2)
    prepare_model_file(small)
    (busy,) = home.glob("layouts/*/busy")
    before = time.time() - weight_layout.BUSY_SECONDS
    os.utime(busy, (before, before))
    accept_all(monkeypatch)
    assert prepare_model_file(small).name == "Q8_0.gguf"
    assert stored_files(home) == ["Q8_0.gguf", "choice.json", "lock"]


@pytest.mark.usefixtures("q8_copy")
def test_changed_file_needs_a_new_trial(small: Path) -> None:
    stat = small.stat()
    os.utime(small, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    try:
        assert not is_layout_known(small)
    finally:
        os.utime(small, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert is_layout_known(small)


def mapped_model_files() -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.rpartition("/")[2] for line in lines if line.endswith(".gguf")})


def loaded_from(small: Path, chosen: Layout) -> list[str]:
    """Return the names of the model files that an engine maps into memory."""

    async def main() -> list[str]:
        engine = LlamaEngine("small", LlamaOptions(str(small), context=64, slots=1, layout=chosen))
        await engine.start()
        found = mapped_model_files()
        await engine.stop()
        return found

    return asyncio.run(main())


@pytest.mark.usefixtures("q8_copy")
def test_engine_loads_the_chosen_file(small: Path) -> None:
    assert loaded_from(small, "auto") == ["Q8_0.gguf"]


def test_engine_loads_the_original_with_layout_as_is(small: Path, home: Path) -> None:
    assert loaded_from(small, "as-is") == ["small.gguf"]
    assert not home.exists()


def test_no_trial_for_fast_layouts_and_invalid_files(minilm_path: Path, tmp_path: Path, home: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    for path in (minilm_path, broken, tmp_path / "none.gguf"):
        recorder = Recorder()
        assert prepare_model_file(path, recorder.say) == path
        assert recorder.lines == []
    assert not home.exists()


def test_no_trial_for_a_truncated_file(small: Path, tmp_path: Path, home: Path) -> None:
    path = tmp_path / "half.gguf"
    path.write_bytes(small.read_bytes()[:-100_000])
    assert prepare_model_file(path) == path
    assert not home.exists()


@pytest.mark.parametrize(
    ("rule", "value", "message"),
    [
        ("MAX_GROWTH", 1.0, "as Q8_0 it would be 1.2 times as large"),
        ("MAX_MEMORY_SHARE", 1e-6, "more than half of the memory"),
        ("MIN_FREE_DISK", 1 << 60, "is nearly full"),
    ],
)
def test_no_trial_if_the_copy_would_be_too_large(
    small: Path, home: Path, monkeypatch: pytest.MonkeyPatch, rule: str, value: float, message: str
) -> None:
    monkeypatch.setattr(weight_layout, rule, value)
    recorder = Recorder()
    assert prepare_model_file(small, recorder.say) == small
    (line,) = recorder.lines
    assert line.startswith("small.gguf stays Q4_1: ")
    assert message in line
    assert stored_files(home) == ["lock"]


def test_unwritable_home_uses_the_original(small: Path, home: Path) -> None:
    home.mkdir()
    (home / "layouts").write_text("not a folder")
    recorder = Recorder()
    assert prepare_model_file(small, recorder.say) == small
    (line,) = recorder.lines
    assert line.startswith("small.gguf is used as it is: cannot write to ")


def test_disk_full_during_a_trial(small: Path, home: Path) -> None:
    recorder = Recorder()
    with limit_file_size():
        assert prepare_model_file(small, recorder.say) == small
    assert recorder.lines[1:] == ["small.gguf stays Q4_1: File too large"]
    assert stored_files(home) == ["lock"]
    assert not is_layout_known(small)


def test_killed_trial_is_recorded(small: Path, home: Path) -> None:
    recorder = Recorder()
    assert prepare_model_file(small, recorder.say, kill_trials) == small
    assert "could not be tried as Q8_0: the process ended with code -9; remove " in recorder.lines[-1]
    assert stored_files(home) == ["choice.json", "lock"]


def test_model_that_cannot_be_loaded_is_recorded(smollm2_path: Path, tmp_path: Path, home: Path) -> None:
    path = cut_model(smollm2_path, tmp_path / "lame.gguf", missing="blk.1.ffn_up.weight")
    recorder = Recorder()
    assert prepare_model_file(path, recorder.say) == path
    assert "blk.1.ffn_up.weight" in recorder.lines[-1]
    assert stored_files(home) == ["choice.json", "lock"]


def pull(small: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "dragoman", "pull", str(small)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_processes_run_one_trial(small: Path, home: Path) -> None:
    first, second = pull(small), pull(small)
    output = [process.communicate(timeout=100) for process in (first, second)]
    assert [out for out, _ in output] == [f"{small}\n"] * 2
    lines = [line for _, message in output for line in message.splitlines()]
    trials = [line for line in lines if "trying Q8_0 once" in line]
    assert len(trials) == 1
    assert not [name for name in stored_files(home) if name.startswith(".")]


def wait_for_trial(home: Path) -> Path:
    """Wait for a trial to begin writing and return its folder."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if found := list((home / "layouts").glob("*/.trying-*/Q8_0.gguf")):
            return found[0].parent
        time.sleep(0.01)
    raise AssertionError("no trial has begun")


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9), (signal.SIGTERM, -15)])
def test_interrupted_trial_leaves_no_files(small: Path, home: Path, sent: signal.Signals, code: int) -> None:
    process = pull(small)
    folder = wait_for_trial(home)
    process.send_signal(sent)
    _, output = process.communicate(timeout=60)
    assert process.returncode == code
    assert output.count("\n") == 1
    deadline = time.monotonic() + 30
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert stored_files(home) == ["lock"]


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_server_exit_during_a_trial_leaves_no_files(small: Path, home: Path, sent: signal.Signals) -> None:
    command = [sys.executable, "-m", "dragoman", "serve", "--model", f"m={small}", "--port", str(free_port())]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        folder = wait_for_trial(home)
        server.send_signal(sent)
        server.wait(timeout=60)
    deadline = time.monotonic() + 30
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert stored_files(home) == ["lock"]


def test_progress_bar_on_a_terminal_and_ctrl_c(small: Path, home: Path) -> None:
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "dragoman", "pull", str(small)]
    # Ctrl-C reaches every process of the group.
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs, start_new_session=True)
    os.close(theirs)
    folder = wait_for_trial(home)
    seen = b""
    while b"#" not in seen:
        seen += os.read(ours, 4096)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=60) == 130
    os.close(ours)
    assert b"\r[" in seen
    assert b"% converting" in seen
    assert not folder.exists()
    assert stored_files(home) == ["lock"]


@pytest.mark.parametrize(
    ("after", "quality", "message"),
    [
        (Speed(200, 100, 150), CLOSE, None),
        (Speed(130, 91, 130), CLOSE, None),
        (Speed(110, 100, 110), CLOSE, "not clearly faster"),
        (Speed(200, 80, 150), CLOSE, "not clearly faster"),
        (Speed(200, 100, 150), Quality(500, 0.03, 0.97), "different tokens"),
        (Speed(200, 100, 150), Quality(500, 0.005, 0.89), "different tokens"),
    ],
)
def test_rejection_reason(after: Speed, quality: Quality, message: str | None) -> None:
    found = rejection_reason(TrialResult("", 1.0, SAME, after, quality))
    assert (found is None) == (message is None)
    assert (message or "") in (found or "")
