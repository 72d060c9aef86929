"""What vLLM's processes print while they start, and what is taken from it."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.engines.vllm.captured_stderr import Overheard, overhearing

PRINTED = b"""\
(Worker pid=12) WARNING 01-02 03:04:05 [utils.py:597] Failed to make it. Exception: could not make a primitive.
(Worker_TP0 pid=12) ERROR 01-02 03:04:05 [multiproc_executor.py:953]     raise ValueError(
(Worker_TP0 pid=12) ERROR 01-02 03:04:05 [multiproc_executor.py:953] torch.OutOfMemoryError: CUDA out of memory. A\xff
(EngineCore pid=11) ERROR 01-02 03:04:05 [core.py:1510] Exception: It failed. See stack trace for root cause.
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


@given(st.lists(st.integers(0, len(PRINTED))))
def test_the_reason_is_found_however_it_is_cut(cuts: list[int]) -> None:
    source, sink = os.pipe()
    away = os.open(os.devnull, os.O_WRONLY)
    overheard = Overheard(source, away)
    for begin, end in pairwise(sorted({0, *cuts, len(PRINTED)})):
        os.write(sink, PRINTED[begin:end])
    os.close(sink)
    overheard.wait()
    assert overheard.reason == "torch.OutOfMemoryError: CUDA out of memory. A\N{REPLACEMENT CHARACTER}"


def test_what_is_printed_is_passed_on_also_later(capfd: pytest.CaptureFixture[str]) -> None:
    say = "import sys; print('begun', flush=True); sys.stdin.read(); sys.exit('ValueError: late')"
    with overhearing() as overheard:
        late = subprocess.Popen([sys.executable, "-c", say], stdin=subprocess.PIPE)
        os.write(1, b"meanwhile\n")
    os.write(2, b"afterwards\n")
    late.communicate(b"")
    overheard.wait()
    assert sorted(capfd.readouterr().err.split("\n")) == ["", "ValueError: late", "afterwards", "begun", "meanwhile"]
    assert overheard.reason == "ValueError: late"


def heard(target: int, text: bytes) -> Overheard:
    source, sink = os.pipe()
    overheard = Overheard(source, target)
    with os.fdopen(sink, "wb") as printing:
        printing.write(text)
    overheard.wait()
    assert not overheard._thread.is_alive()
    for closed in (source, target):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(closed)
    return overheard


def test_it_goes_on_where_nobody_takes_what_it_passes_on() -> None:
    away, target = os.pipe()
    os.close(away)
    assert heard(target, b"x\n" * 200_000 + b"ValueError: late\n").reason == "ValueError: late"


def test_what_cannot_be_taken_at_once_is_passed_on_later() -> None:
    text = b"x\n" * 200_000 + b"ValueError: late\n"
    out, target = os.pipe()
    os.set_blocking(target, False)
    with ThreadPoolExecutor(1) as reading, os.fdopen(out, "rb") as taken:
        arrived = reading.submit(taken.read)
        assert heard(target, text).reason == "ValueError: late"
        assert arrived.result() == text


@pytest.mark.parametrize("blocking", [False, True])
def test_who_has_stopped_to_read_does_not_stop_it(monkeypatch: pytest.MonkeyPatch, blocking: bool) -> None:
    monkeypatch.setattr("dragoman.engines.vllm.captured_stderr.TAKING", 0.05)
    out, target = os.pipe()
    os.set_blocking(target, blocking)
    try:
        assert heard(target, b"x\n" * 75_000 + b"ValueError: late\n").reason == "ValueError: late"
    finally:
        os.close(out)
