"""What becomes of a layout that was chosen when its copy is damaged, and cannot be made again or becomes another."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dragoman.engines.llama.tuning import layout
from dragoman.engines.llama.tuning.layout import is_settled, prepared
from tests.engines.laying import Told, kept, kill_trials, read_choice, small_files

pytestmark = pytest.mark.usefixtures("home")


def flipped(made: Path) -> None:
    told = made.stat()
    with made.open("r+b") as file:
        file.seek(told.st_size // 2)
        byte = file.read(1)[0]
        file.seek(told.st_size // 2)
        file.write(bytes([byte ^ 1]))
    os.utime(made, ns=(told.st_atime_ns, told.st_mtime_ns))


def shortened(made: Path) -> None:
    os.truncate(made, made.stat().st_size - 1)


def removed(made: Path) -> None:
    made.unlink()


def garbled(made: Path) -> None:
    made.with_name("choice.json").write_bytes(b'{"circumstances": \xff')


@pytest.mark.parametrize("damage", [shortened, removed, garbled])
def test_what_is_not_whole_is_not_believed(small: Path, made: Path, damage: Callable[[Path], None]) -> None:
    damage(made)
    assert not is_settled(small)


@pytest.mark.parametrize("damage", [flipped, shortened, removed])
def test_a_damaged_copy_is_made_again_without_a_trial(
    small: Path, made: Path, home: Path, damage: Callable[[Path], None]
) -> None:
    whole, record = made.read_bytes(), made.with_name("choice.json").read_bytes()
    damage(made)
    told = Told()
    assert prepared(small, told.say, told.bar) == made
    assert made.read_bytes() == whole
    assert made.with_name("choice.json").read_bytes() == record
    assert told.lines == ["the copy of small.gguf as Q8_0 is damaged or gone: making it again ..."]
    assert set(told.doing) == {"converting"}
    assert kept(home) == ["Q8_0.gguf", "choice.json", "lock"]


@pytest.mark.parametrize("trouble", ["is nearly full", "File too large", "ended with code -9"])
def test_where_a_copy_cannot_be_made_again_just_now_nothing_is_forgotten(
    small: Path, made: Path, home: Path, trouble: str
) -> None:
    whole, record = made.read_bytes(), made.with_name("choice.json").read_bytes()
    flipped(made)
    told = Told()
    with contextlib.ExitStack() as undo:
        if trouble == "is nearly full":
            undo.enter_context(pytest.MonkeyPatch.context()).setattr(layout, "SPARE_DISK", 1 << 60)
        elif trouble == "File too large":
            undo.enter_context(small_files())
        assert prepared(small, told.say, kill_trials if "code" in trouble else told.bar) == small
    assert told.lines[-1].startswith("small.gguf stays Q4_1: ")
    assert trouble in told.lines[-1]
    assert not [line for line in told.lines if "trying it" in line]
    assert kept(home) == ["choice.json", "lock"]
    assert made.with_name("choice.json").read_bytes() == record
    assert prepared(small) == made
    assert made.read_bytes() == whole


@pytest.mark.usefixtures("taken")
def test_a_copy_that_becomes_another_is_tried(small: Path, made: Path) -> None:
    record = made.with_name("choice.json")
    digest = read_choice(made.parents[2]).tried
    assert digest is not None
    record.write_text(record.read_text().replace(digest.sha256, "0" * 64))
    told = Told()
    assert prepared(small, told.say, told.bar) == made
    assert "measuring" in told.doing
    assert len(told.lines) == 3
