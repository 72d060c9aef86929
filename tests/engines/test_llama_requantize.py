"""The file with other weights: what changes in it, and what does not."""

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize, quantize

from dragoman.engines.llama.binding import Model
from dragoman.engines.llama.tuning.layout import SLOW
from dragoman.engines.llama.tuning.requantize import requantise
from dragoman.files.gguf import read_metadata

Q4_1, Q8_0 = GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0


@pytest.fixture(scope="module")
def made(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("made") / "made.gguf"
    parts: list[float] = []
    requantise(small, target, SLOW, parts.append)
    assert parts == sorted(parts)
    assert parts[-1] == 1
    return target


@pytest.fixture(scope="module")
def both(small: Path, made: Path) -> tuple[GGUFReader, GGUFReader]:
    return GGUFReader(small), GGUFReader(made)


def test_slow_weights_are_those_of_the_reference(both: tuple[GGUFReader, GGUFReader]) -> None:
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


def test_everything_else_is_said_as_before(both: tuple[GGUFReader, GGUFReader], small: Path, made: Path) -> None:
    old, new = ({name: field.contents() for name, field in reader.fields.items()} for reader in both)
    assert new == old | {"general.file_type": 7}
    assert read_metadata(made) == read_metadata(small) | {"general.file_type": 7}


def test_the_tokenizer_is_the_same(small: Path, made: Path) -> None:
    old, new = Model(small), Model(made)
    text = "Größe 12.5, <|im_start|>user\n  def f(x): return x\n🙂"
    for special in (False, True):
        assert new.tokenize(text, special) == old.tokenize(text, special)
    assert new.pieces == old.pieces
    assert new.chat_template == old.chat_template
    old.close()
    new.close()


def test_the_same_file_gives_the_same_bytes(small: Path, made: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.gguf"
    requantise(small, again, SLOW, lambda done: None)
    assert again.read_bytes() == made.read_bytes()


def test_the_weights_stay_in_the_file(made: Path) -> None:
    model = Model(made)
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("only Linux tells what is mapped")
    assert str(made) in maps.read_text()
    model.close()


def test_a_file_that_is_there_is_not_written_over(small: Path, made: Path) -> None:
    before = made.read_bytes()
    with pytest.raises(FileExistsError):
        requantise(small, made, SLOW, lambda done: None)
    assert made.read_bytes() == before
