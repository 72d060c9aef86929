"""Fixtures for layout tests: a small model made of the first layers of the real one, and home directories."""

import contextlib
import os
import resource
import shutil
import signal
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dragoman.engines.llama.tuning import layout
from dragoman.engines.llama.tuning.layout import Choice, prepared
from dragoman.files.gguf import Outline, Tensor, read_outline

LAYERS = 4


def cut(original: Path, target: Path, layers: int = LAYERS, missing: str = "") -> Path:
    """Write the model with only its first layers, and without the tensor `missing`."""
    outline = read_outline(original)
    data = np.memmap(original, dtype=np.uint8, mode="r")
    kept = [tensor for tensor in outline.tensors if _layer(tensor) < layers and tensor.name != missing]
    head = bytearray(data[: outline.pairs_end].tobytes())
    struct.pack_into("<Q", head, 8, len(kept))
    struct.pack_into("<I", head, outline.places["llama.block_count"], layers)
    offset = 0
    for tensor in kept:
        name = tensor.name.encode()
        head += struct.pack("<Q", len(name)) + name + struct.pack("<I", len(tensor.sizes))
        head += struct.pack(f"<{len(tensor.sizes)}QIQ", *tensor.sizes, tensor.kind, offset)
        offset += _padded(tensor.bytes, outline)
    head += bytes(-len(head) % outline.alignment)
    with target.open("wb") as file:
        file.write(head)
        for tensor in kept:
            start = outline.data_start + tensor.offset
            file.write(data[start : start + tensor.bytes].tobytes().ljust(_padded(tensor.bytes, outline), b"\0"))
    return target


def _layer(tensor: Tensor) -> int:
    return int(tensor.name.split(".")[1]) if tensor.name.startswith("blk.") else -1


def _padded(size: int, outline: Outline) -> int:
    return -(-size // outline.alignment) * outline.alignment


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Path:
    return cut(smollm2_path, tmp_path_factory.mktemp("small") / "small.gguf")


@pytest.fixture(scope="session")
def tried(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home directory in which the trial has chosen Q8_0 for the small model."""
    home = tmp_path_factory.mktemp("tried")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAGOMAN_HOME", str(home))
        always(patch)
        assert prepared(small).name == "Q8_0.gguf"
    return home


def always(patch: pytest.MonkeyPatch) -> None:
    """Make every trial succeed."""
    patch.setattr(layout, "LEAST_CORES", 0)
    patch.setattr(layout, "LEAST_GAIN", 0)
    patch.setattr(layout, "LEAST_SPEED", 0)
    patch.setattr(layout, "MOST_DIVERGENCE", 1e9)
    patch.setattr(layout, "LEAST_AGREEMENT", 0)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAGOMAN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> None:
    always(monkeypatch)


@pytest.fixture
def made(tried: Path, home: Path) -> Path:
    """The Q8_0 copy of the small model in the home directory of the test."""
    shutil.copytree(tried, home)
    (path,) = home.glob("layouts/*/Q8_0.gguf")
    return path


class Told:
    """Records the progress messages of a preparation."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.parts: list[float] = []
        self.doing: list[str] = []

    def say(self, words: str) -> None:
        self.lines.append(words)

    def bar(self, doing: str, done: float) -> None:
        self.doing.append(doing)
        self.parts.append(done)


def kept(home: Path) -> list[str]:
    return sorted(path.name for path in (home / "layouts").glob("*/*")) if (home / "layouts").is_dir() else []


def read_choice(home: Path) -> Choice:
    (record,) = (home / "layouts").glob("*/choice.json")
    return msgspec.json.decode(record.read_bytes(), type=Choice)


def trials() -> Iterator[int]:
    """The trial processes started by this process."""
    for task in Path("/proc/self/task").glob("*/children"):
        for child in task.read_text().split():
            if b"llama.trial" in Path(f"/proc/{child}/cmdline").read_bytes():
                yield int(child)


def kill_trials(doing: str, done: float) -> None:
    for trial in trials():
        os.kill(trial, signal.SIGKILL)


@contextlib.contextmanager
def small_files() -> Iterator[None]:
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
