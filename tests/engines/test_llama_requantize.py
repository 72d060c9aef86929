"""The copy of a GGUF file with Q8_0 weights."""

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize, quantize

from dragoman.engines.llama.binding import LlamaModel
from dragoman.engines.llama.tuning.requantize import requantize
from dragoman.engines.llama.tuning.tuner import SLOW_TYPES
from dragoman.files.gguf import read_metadata

Q4_1, Q8_0 = GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0


@pytest.fixture(scope="module")
def made(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("made") / "made.gguf"
    parts: list[float] = []
    requantize(small, target, SLOW_TYPES, parts.append)
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


def test_metadata_is_unchanged_except_file_type(both: tuple[GGUFReader, GGUFReader], small: Path, made: Path) -> None:
    old, new = ({name: field.contents() for name, field in reader.fields.items()} for reader in both)
    assert new == old | {"general.file_type": 7}
    assert read_metadata(made) == read_metadata(small) | {"general.file_type": 7}


def test_tokenizer_is_unchanged(small: Path, made: Path) -> None:
    old, new = LlamaModel(small), LlamaModel(made)
    text = "Größe 12.5, <|im_start|>user\n  def f(x): return x\n🙂"
    for special in (False, True):
        assert new.tokenize(text, special) == old.tokenize(text, special)
    assert new.pieces == old.pieces
    assert new.chat_template == old.chat_template
    old.close()
    new.close()


def test_output_is_deterministic(small: Path, made: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.gguf"
    requantize(small, again, SLOW_TYPES, lambda done: None)
    assert again.read_bytes() == made.read_bytes()


def test_weights_are_mapped_from_the_file(made: Path) -> None:
    model = LlamaModel(made)
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs Linux")
    assert str(made) in maps.read_text()
    model.close()


def test_existing_file_is_not_overwritten(small: Path, made: Path) -> None:
    before = made.read_bytes()
    with pytest.raises(FileExistsError):
        requantize(small, made, SLOW_TYPES, lambda done: None)
    assert made.read_bytes() == before
