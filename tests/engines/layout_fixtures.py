"""Fixtures for tuning tests: a small model with a slow weight layout, and a home folder with a record for it."""

import struct
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dragoman.engines.llama.tuning import requantize
from dragoman.engines.llama.tuning_record import Measurement, Trial, TuningKey, TuningRecord, copy_path, record_path
from dragoman.files.download import hash_file
from dragoman.files.gguf import Outline, Tensor, read_outline
from tests.support import gguf_files

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
        head += gguf_files.tensor(tensor.name, *tensor.sizes, kind=tensor.kind, offset=offset)
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


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAGOMAN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def q8_copy(small: Path, home: Path) -> Path:
    """The Q8_0 copy of the small model, with a record that chooses it and one thread."""
    copy = copy_path(small)
    copy.parent.mkdir(parents=True)
    requantize(small, copy, lambda done: None)
    chosen = Trial("Q8_0", 1, Measurement(200.0, 100.0, 200.0, memory=1 << 20, divergence=0.005))
    record = TuningRecord(TuningKey.of(small), chosen, (chosen,), copy.stat().st_size, hash_file(copy))
    record_path(small).write_bytes(msgspec.json.encode(record))
    return copy
