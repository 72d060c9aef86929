"""`dragoman tune` with real trials of a small model, and the record that it leaves for the server."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize, quantize

from dragoman.cli import main
from dragoman.core.errors import ConfigError
from dragoman.engines.llama import hardware, tuning
from dragoman.engines.llama.engine import LlamaEngine
from dragoman.engines.llama.options import LlamaOptions
from dragoman.engines.llama.tuning import choose, requantize, thread_counts, tune
from dragoman.engines.llama.tuning_record import Measurement, Trial, read_record, record_path
from tests.engines.layout_fixtures import cut_model

pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture
def one_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try only one number of threads."""
    monkeypatch.setattr(hardware, "cpus", lambda: 1)


def accept_any_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "MIN_COPY_SPEEDUP", 0)
    monkeypatch.setattr(tuning, "MIN_RELATIVE_SPEED", 0)
    monkeypatch.setattr(tuning, "MAX_DIVERGENCE", 1e9)


def mapped_files() -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.rpartition("/")[2] for line in lines if line.endswith(".gguf")})


def load(path: Path, layout: Literal["auto", "as-is"] | None = None, threads: int | None = None) -> list[str]:
    """Load the model in an engine and return the names of the model files that it maps into memory."""

    async def run() -> list[str]:
        engine = LlamaEngine("small", LlamaOptions(str(path), context=64, slots=1, layout=layout, threads=threads))
        await engine.start()
        found = mapped_files()
        await engine.stop()
        return found

    return asyncio.run(run())


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("one_cpu")
def test_tuned_model_is_served_from_the_chosen_copy(
    small: Path, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    accept_any_copy(monkeypatch)
    before = small.read_bytes()
    assert main(["tune", str(small)]) == 0
    output = capsys.readouterr()
    head, as_is, copy = (line.split() for line in output.out.splitlines())
    assert head == ["LAYOUT", "THREADS", "PROMPT", "ONE", "EIGHT", "MEMORY", "DIVERGENCE"]
    assert (as_is[:2], as_is[-1]) == (["as-is", "1"], "0.0000")
    assert (copy[:2], copy[-1]) == (["Q8_0", "1"], "chosen")
    assert f"recorded in {record_path(small)}" in output.err
    record = read_record(small)
    assert record is not None
    assert record.chosen == record.trials[1]
    for trial in record.trials:
        assert trial.measured is not None
        assert min(trial.measured.prompt, trial.measured.one, trial.measured.eight) > 0
        assert trial.measured.memory > small.stat().st_size
    assert record.chosen.measured is not None
    assert 0 < record.chosen.measured.divergence < 0.1
    assert small.read_bytes() == before
    assert sorted(path.suffix for path in (home / "tuning").iterdir()) == [".gguf", ".json"]
    assert load(small) == [record.file.name]


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("one_cpu", "q8_copy")
def test_slower_copy_is_removed(small: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "MIN_COPY_SPEEDUP", 1000)
    steps: list[tuple[str, float]] = []
    record = tune(small, lambda doing, done: steps.append((doing, done)))
    assert (record.chosen.layout, record.file) == ("as-is", small)
    assert read_record(small) == record
    assert [path.suffix for path in (home / "tuning").iterdir()] == [".json"]
    assert list(dict.fromkeys(doing for doing, _ in steps)) == [
        "converting to Q8_0",
        "measuring as-is, 1 threads",
        "measuring Q8_0, 1 threads",
    ]
    assert [done for _, done in steps] == sorted(done for _, done in steps)


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("one_cpu")
def test_failed_candidate_is_not_chosen(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accept_any_copy(monkeypatch)
    monkeypatch.setattr(tuning, "requantize", lambda source, target, *_: target.write_bytes(b"GGUF"))
    record = tune(small)
    assert record.chosen.layout == "as-is"
    assert record.trials[1].measured is None
    assert "Q8_0.gguf" in record.trials[1].error


@pytest.mark.parametrize("problem", ["missing tensor", "time limit", "crash"])
@pytest.mark.usefixtures("one_cpu")
def test_model_that_cannot_be_measured(
    smollm2_path: Path, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    path = cut_model(smollm2_path, tmp_path / "lame.gguf", missing="blk.1.ffn_up.weight")
    expected = "blk.1.ffn_up.weight"
    if problem == "time limit":
        monkeypatch.setattr(tuning, "TRIAL_SECONDS", 0.01)
        expected = "it took more than 0 seconds"
    elif problem == "crash":
        (tmp_path / "sitecustomize.py").write_text("import os\nos.abort()\n")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        expected = "the process ended with code -6"
    with pytest.raises(ConfigError, match=expected):
        tune(path)
    assert not list((home / "tuning").iterdir())


def test_refused_models(minilm_path: Path, tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("models: {echo: {engine: scripted}}\n")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    for model in (str(minilm_path), str(tmp_path / "broken.gguf"), str(tmp_path / "none.gguf"), "echo"):
        assert main(["tune", "--config", str(tmp_path / "config.yaml"), model]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("dragoman: ")]
    messages = ["creates embeddings", "broken.gguf", "no file", "the engine scripted"]
    assert all(message in line for line, message in zip(lines, messages, strict=True))
    assert not home.exists()


def test_unwritable_home(small: Path, home: Path) -> None:
    home.mkdir()
    (home / "tuning").write_text("not a folder")
    with pytest.raises(ConfigError, match="cannot write to "):
        tune(small)


def test_ctrl_c_leaves_no_files(small: Path, home: Path) -> None:
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "dragoman", "tune", str(small)]
    # Ctrl-C reaches every process of the group.
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs, start_new_session=True)
    os.close(theirs)
    seen, deadline = b"", time.monotonic() + 60
    while b"measuring as-is" not in seen and time.monotonic() < deadline:
        seen += os.read(ours, 4096)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=60) == 130
    os.close(ours)
    assert b"\r\x1b[K[#" in seen
    assert b"% converting to Q8_0" in seen
    assert not list((home / "tuning").iterdir())


def test_record_is_used(small: Path, q8_copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "dragoman.engine")
    assert load(small) == load(small, "auto") == [q8_copy.name]
    assert load(small, threads=2) == [q8_copy.name]
    lines = [record.getMessage() for record in caplog.records if "tuned" in record.getMessage()]
    assert [line.rpartition(", ")[2] for line in lines] == ["1 threads", "1 threads", "2 threads"]


@pytest.mark.usefixtures("q8_copy")
def test_layout_as_is_ignores_the_record(small: Path) -> None:
    assert load(small, "as-is") == ["small.gguf"]


def test_loading_neither_measures_nor_writes(small: Path, home: Path) -> None:
    assert load(small) == load(small, "auto") == ["small.gguf"]
    assert not home.exists()


def flip_bit(copy: Path) -> None:
    data = bytearray(copy.read_bytes())
    data[len(data) // 2] ^= 1
    copy.write_bytes(data)


def claim_no_threads(copy: Path) -> None:
    record = copy.with_suffix(".json")
    record.write_text(record.read_text().replace('"threads":1', '"threads":0'))


@pytest.mark.parametrize(
    "damage",
    [
        flip_bit,
        lambda copy: os.truncate(copy, copy.stat().st_size - 1),
        Path.unlink,
        lambda copy: copy.with_suffix(".json").write_bytes(b'{"key": \xff'),
        claim_no_threads,
    ],
    ids=["bit flipped", "truncated", "removed", "record corrupted", "no threads"],
)
def test_damaged_record_or_copy_is_ignored(
    small: Path, q8_copy: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], object]
) -> None:
    damage(q8_copy)
    assert load(small) == ["small.gguf"]
    (line,) = [record.getMessage() for record in caplog.records if "ignored" in record.getMessage()]
    assert line.startswith(f"{record_path(small)} is ignored: ")
    assert line.endswith(f"run `dragoman tune` again for {small}")


@pytest.mark.usefixtures("q8_copy")
def test_record_of_another_file_or_cpu_is_ignored(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stat = small.stat()
    os.utime(small, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    try:
        assert read_record(small) is None
    finally:
        os.utime(small, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert "the model file has changed" in caplog.text
    assert read_record(small) is not None
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Abacus 9\n")
    monkeypatch.setattr(hardware, "CPUINFO", tmp_path / "cpuinfo")
    assert hardware.processor() == "Abacus 9"
    assert read_record(small) is None
    assert "it was made on another CPU" in caplog.text


AS_IS = Trial("as-is", 4, Measurement(100, 100, 100, 0))


@pytest.mark.parametrize(
    ("other", "is_chosen"),
    [
        (Trial("Q8_0", 4, Measurement(200, 100, 150, 0, 0.005)), True),
        (Trial("Q8_0", 4, Measurement(130, 91, 130, 0, 0.005)), True),
        (Trial("Q8_0", 4, Measurement(110, 100, 110, 0, 0.005)), False),
        (Trial("Q8_0", 4, Measurement(200, 80, 150, 0, 0.005)), False),
        (Trial("Q8_0", 4, Measurement(200, 100, 150, 0, 0.03)), False),
        (Trial("Q8_0", 4, error="it took more than 600 seconds"), False),
        (Trial("as-is", 8, Measurement(110, 100, 110, 0)), True),
        (Trial("as-is", 8, Measurement(104, 104, 104, 0)), False),
        (Trial("as-is", 8, Measurement(200, 80, 150, 0)), False),
    ],
)
def test_choice(other: Trial, is_chosen: bool) -> None:
    assert choose([AS_IS, other]) == (other if is_chosen else AS_IS)


@pytest.mark.parametrize(
    ("cpus", "cores", "counts"),
    [(1, 1, [1]), (4, 4, [4, 2]), (8, 4, [4, 8]), (3, 64, [3, 2]), (64, 32, [32, 64, 16]), (12, 8, [8, 12, 6])],
)
def test_thread_counts(monkeypatch: pytest.MonkeyPatch, cpus: int, cores: int, counts: list[int]) -> None:
    monkeypatch.setattr(hardware, "cpus", lambda: cpus)
    monkeypatch.setattr(hardware, "cores", lambda: cores)
    assert thread_counts() == counts


# The copy with Q8_0 weights.

Q4_1, Q8_0 = GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0


@pytest.fixture(scope="module")
def made(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("made") / "made.gguf"
    parts: list[float] = []
    requantize(small, target, parts.append)
    assert parts == sorted(parts)
    assert parts[-1] == 1
    return target


@pytest.fixture(scope="module")
def both(small: Path, made: Path) -> tuple[GGUFReader, GGUFReader]:
    return GGUFReader(small), GGUFReader(made)


def test_slow_tensors_match_the_reference_quantization(both: tuple[GGUFReader, GGUFReader]) -> None:
    slow = 0
    for old, new in zip(both[0].tensors, both[1].tensors, strict=True):
        assert (old.name, list(old.shape)) == (new.name, list(new.shape))
        if old.tensor_type != Q4_1:
            assert new.tensor_type == old.tensor_type
            assert new.data.tobytes() == old.data.tobytes()
            continue
        slow += 1
        assert new.tensor_type == Q8_0
        weights = dequantize(old.data, Q4_1)
        assert np.array_equal(new.data, quantize(weights, Q8_0))
        error = np.abs(dequantize(new.data, Q8_0) - weights).max() / np.abs(weights).max()
        assert error < 0.005
    assert slow == 7 * 4


def test_metadata_is_unchanged_except_file_type(both: tuple[GGUFReader, GGUFReader]) -> None:
    old, new = ({name: field.contents() for name, field in reader.fields.items()} for reader in both)
    assert new == old | {"general.file_type": 7}
