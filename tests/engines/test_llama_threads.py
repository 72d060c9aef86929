"""The choice of the number of threads, with simulated machines and with a simulated number of CPUs."""

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.engines.llama import hardware
from dragoman.engines.llama.engine import LlamaEngine
from dragoman.engines.llama.options import LlamaOptions
from dragoman.engines.llama.tuning import threads
from dragoman.engines.llama.tuning.threads import CLEARLY, TIE, ThreadCounts, candidates, fastest, shortest_times
from tests.engines.llama_fixtures import collect, completion


@pytest.mark.parametrize(
    ("cpus", "cores", "tried"),
    [(4, 4, [4, 2]), (8, 4, [8, 4]), (3, 3, [3, 2]), (16, 8, [16, 8]), (64, 32, [64, 32, 16]), (12, 8, [12, 8, 6])],
)
def test_candidates(cpus: int, cores: int, tried: list[int]) -> None:
    assert candidates(cpus, cores) == tried


@pytest.mark.parametrize(
    ("seconds", "cpus", "best"),
    [
        ({8: 1.0, 4: 0.8}, 8, 4),
        ({8: 0.8, 4: 1.0}, 8, 8),
        ({8: 1.0, 4: 0.96}, 8, 8),
        ({64: 1.0, 32: 0.9, 16: 0.85}, 64, 32),
        ({64: 1.0, 32: 0.9, 16: 0.6}, 64, 16),
        ({64: 1.0, 32: 0.98, 16: 0.9}, 64, 64),
    ],
)
def test_fastest_prefers_more_threads_in_a_tie(seconds: dict[int, float], cpus: int, best: int) -> None:
    assert fastest(seconds, cpus) == best


@given(cpus=st.integers(3, 256), per_core=st.sampled_from([1, 2]), data=st.data())
def test_choice_is_never_much_slower_than_the_best(cpus: int, per_core: int, data: st.DataObject) -> None:
    tried = candidates(cpus, cpus // per_core)
    assert tried[0] == cpus
    assert all(1 <= count <= cpus for count in tried)
    seconds = {count: data.draw(st.floats(0.001, 10)) for count in tried}
    best = fastest(seconds, cpus)
    usual = min(took for count, took in seconds.items() if 2 * count >= cpus)
    assert seconds[best] <= (1 + TIE) * usual
    assert 2 * best >= cpus or seconds[best] < (1 - CLEARLY) * usual


class Machine:
    """A simulated clock that advances with each run, plus noise from other load."""

    def __init__(self, cost: Callable[[int], float], noise: list[float]) -> None:
        self.cost = cost
        self.noise = noise
        self.now = 0.0
        self.runs = 0

    def run(self, count: int) -> None:
        self.now += self.cost(count) + self.noise[self.runs % len(self.noise)]
        self.runs += 1


def test_disturbed_runs_are_ignored() -> None:
    machine = Machine(lambda count: 0.004 if count == 8 else 0.006, [0.5, 0.0, 0.001, 0.02, 0.0])
    counts = shortest_times([16, 8], machine.run, lambda: machine.now)
    assert counts == {16: pytest.approx(0.006), 8: pytest.approx(0.004)}
    assert fastest(counts, 16) == 8


def test_slow_model_is_measured_once() -> None:
    machine = Machine(lambda count: 3.0, [0.0])
    shortest_times([8, 4], machine.run, lambda: machine.now)
    assert machine.runs == 2


def test_measured_once_and_stored(
    smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DRAGOMAN_HOME", str(tmp_path))
    monkeypatch.setattr(hardware, "cpus", lambda: 4)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    caplog.set_level(logging.INFO, "dragoman.engine")

    async def start() -> None:
        engine = LlamaEngine("smollm2", LlamaOptions(path=str(smollm2_path), slots=1, context=64, layout="as-is"))
        await engine.start()
        try:
            assert (await collect(engine, completion())).text.startswith(" Paris")
        finally:
            await engine.stop()

    def lines() -> list[str]:
        return [record.getMessage() for record in caplog.records if "threads" in record.getMessage()]

    asyncio.run(start())
    assert len(lines()) == 1
    assert "on 4 CPUs" in lines()[0]
    (file,) = (tmp_path / "threads").iterdir()
    counts = threads._load(file)
    assert counts is not None
    assert {counts.single, counts.many} <= {2, 4}
    asyncio.run(start())
    assert len(lines()) == 1
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 0.0, 0.0))
    asyncio.run(start())
    assert len(lines()) == 1
    file.unlink()
    asyncio.run(start())
    assert "too busy" in lines()[1]
    assert not file.exists()
    file.write_text("{}")
    assert threads._load(file) is None
    file.write_text('{"single": 0, "many": 1}')
    assert threads._load(file) is None


def test_no_measurement_on_two_cpus(smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAGOMAN_HOME", str(tmp_path))
    monkeypatch.setattr(hardware, "cpus", lambda: 2)
    monkeypatch.setattr(threads, "_measure", lambda *_: pytest.fail("measured"))

    async def start() -> None:
        engine = LlamaEngine("smollm2", LlamaOptions(path=str(smollm2_path), slots=1, context=64, layout="as-is"))
        await engine.start()
        await engine.stop()

    asyncio.run(start())
    assert not list(tmp_path.iterdir())


def test_unwritable_home_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    threads._save(tmp_path / "file" / "x.json", ThreadCounts(1, 1))
    assert "cannot be stored" in caplog.text
