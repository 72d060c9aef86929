"""Fixtures for layout tests: a small model with a slow weight layout, and home folders with and without a choice."""

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

from dragoman.engines.llama.tuning import weight_layout
from dragoman.engines.llama.tuning.weight_layout import LayoutChoice, prepare_model_file
from dragoman.files.gguf import Outline, Tensor, read_outline

LAYERS = 4


def cut_model(original: Path, target: Path, layers: int = LAYERS, missing: str = "") -> Path:
    """Write a model with only the first layers, without the `missing` tensor."""
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
    return cut_model(smollm2_path, tmp_path_factory.mktemp("small") / "small.gguf")


@pytest.fixture(scope="session")
def tried_home(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home folder in which the Q8_0 copy of the small model was chosen."""
    home = tmp_path_factory.mktemp("tried")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAGOMAN_HOME", str(home))
        accept_all(patch)
        assert prepare_model_file(small).name == "Q8_0.gguf"
    return home


def accept_all(patch: pytest.MonkeyPatch) -> None:
    """Accept every copy."""
    patch.setattr(weight_layout, "MIN_CPU_SHARE", 0)
    patch.setattr(weight_layout, "MIN_SPEEDUP", 0)
    patch.setattr(weight_layout, "MIN_RELATIVE_SPEED", 0)
    patch.setattr(weight_layout, "MAX_DIVERGENCE", 1e9)
    patch.setattr(weight_layout, "MIN_AGREEMENT", 0)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAGOMAN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def accept_any_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    accept_all(monkeypatch)


@pytest.fixture
def q8_copy(tried_home: Path, home: Path) -> Path:
    """The Q8_0 copy of the small model, in a home folder of the test's own."""
    shutil.copytree(tried_home, home)
    (path,) = home.glob("layouts/*/Q8_0.gguf")
    return path


class Recorder:
    """Records lines and progress while a file is prepared."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.parts: list[float] = []
        self.doing: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)

    def bar(self, doing: str, done: float) -> None:
        self.doing.append(doing)
        self.parts.append(done)


def stored_files(home: Path) -> list[str]:
    return sorted(path.name for path in (home / "layouts").glob("*/*")) if (home / "layouts").is_dir() else []


def read_choice(home: Path) -> LayoutChoice:
    (record,) = (home / "layouts").glob("*/choice.json")
    return msgspec.json.decode(record.read_bytes(), type=LayoutChoice)


def trials() -> Iterator[int]:
    """Yield the trial processes among the children of this process."""
    for task in Path("/proc/self/task").glob("*/children"):
        for child in task.read_text().split():
            if b"tuning.trial_process" in Path(f"/proc/{child}/cmdline").read_bytes():
                yield int(child)


def kill_trials(doing: str, done: float) -> None:
    for trial in trials():
        os.kill(trial, signal.SIGKILL)


@contextlib.contextmanager
def limit_file_size() -> Iterator[None]:
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
