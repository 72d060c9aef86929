"""Damaged copies of a chosen layout: recreated, temporarily impossible to recreate, or different from before."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dragoman.engines.llama.tuning import weight_layout
from dragoman.engines.llama.tuning.weight_layout import is_layout_known, prepare_model_file
from tests.engines.layout_fixtures import Recorder, kill_trials, limit_file_size, read_choice, stored_files

pytestmark = pytest.mark.usefixtures("home")


def flip_bit(q8_copy: Path) -> None:
    stat = q8_copy.stat()
    with q8_copy.open("r+b") as file:
        file.seek(stat.st_size // 2)
        byte = file.read(1)[0]
        file.seek(stat.st_size // 2)
        file.write(bytes([byte ^ 1]))
    os.utime(q8_copy, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def truncate(q8_copy: Path) -> None:
    os.truncate(q8_copy, q8_copy.stat().st_size - 1)


def remove(q8_copy: Path) -> None:
    q8_copy.unlink()


def corrupt_record(q8_copy: Path) -> None:
    q8_copy.with_name("choice.json").write_bytes(b'{"circumstances": \xff')


@pytest.mark.parametrize("damage", [truncate, remove, corrupt_record])
def test_incomplete_copy_or_record_is_not_settled(small: Path, q8_copy: Path, damage: Callable[[Path], None]) -> None:
    damage(q8_copy)
    assert not is_layout_known(small)


@pytest.mark.parametrize("damage", [flip_bit, truncate, remove])
def test_damaged_copy_is_recreated_without_a_trial(
    small: Path, q8_copy: Path, home: Path, damage: Callable[[Path], None]
) -> None:
    content, record = q8_copy.read_bytes(), q8_copy.with_name("choice.json").read_bytes()
    damage(q8_copy)
    recorder = Recorder()
    assert prepare_model_file(small, recorder.say, recorder.bar) == q8_copy
    assert q8_copy.read_bytes() == content
    assert q8_copy.with_name("choice.json").read_bytes() == record
    assert recorder.lines == ["the Q8_0 copy of small.gguf is damaged or missing: making it again ..."]
    assert set(recorder.doing) == {"converting"}
    assert stored_files(home) == ["Q8_0.gguf", "choice.json", "lock"]


@pytest.mark.parametrize("problem", ["is nearly full", "File too large", "ended with code -9"])
def test_choice_survives_if_the_copy_cannot_be_recreated_now(
    small: Path, q8_copy: Path, home: Path, problem: str
) -> None:
    content, record = q8_copy.read_bytes(), q8_copy.with_name("choice.json").read_bytes()
    flip_bit(q8_copy)
    recorder = Recorder()
    with contextlib.ExitStack() as undo:
        if problem == "is nearly full":
            undo.enter_context(pytest.MonkeyPatch.context()).setattr(weight_layout, "MIN_FREE_DISK", 1 << 60)
        elif problem == "File too large":
            undo.enter_context(limit_file_size())
        assert prepare_model_file(small, recorder.say, kill_trials if "code" in problem else recorder.bar) == small
    assert recorder.lines[-1].startswith("small.gguf stays Q4_1: ")
    assert problem in recorder.lines[-1]
    assert not [line for line in recorder.lines if "trying" in line]
    assert stored_files(home) == ["choice.json", "lock"]
    assert q8_copy.with_name("choice.json").read_bytes() == record
    assert prepare_model_file(small) == q8_copy
    assert q8_copy.read_bytes() == content


@pytest.mark.usefixtures("accept_any_copy")
def test_trial_if_the_recreated_copy_differs(small: Path, q8_copy: Path) -> None:
    record = q8_copy.with_name("choice.json")
    digest = read_choice(q8_copy.parents[2]).tried
    assert digest is not None
    record.write_text(record.read_text().replace(digest.sha256, "0" * 64))
    recorder = Recorder()
    assert prepare_model_file(small, recorder.say, recorder.bar) == q8_copy
    assert "measuring" in recorder.doing
    assert len(recorder.lines) == 3
