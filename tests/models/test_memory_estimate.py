"""What a model needs: expected from its file, then measured and remembered."""

import struct
from pathlib import Path

import pytest

from dragoman.config.model_spec import ModelSpec
from dragoman.core.errors import ConfigError
from dragoman.engines.llama import hardware
from dragoman.engines.llama.memory_fit import DEFAULT_MEMORY_SHARE
from dragoman.models import memory_estimate
from dragoman.models.memory_estimate import PROCESS_BYTES, expected, in_worker, remember
from tests.files.test_gguf import gguf, pair, text

NUMBERS = {"block_count": 10, "attention.head_count": 8, "attention.head_count_kv": 2, "embedding_length": 512}
NUMBERS |= {"context_length": 1000}
HEAD = gguf(
    pair("general.architecture", 8, text("llama")),
    *(pair(f"llama.{key}", 4, struct.pack("<I", value)) for key, value in NUMBERS.items()),
)
STATE = 2 * 10 * 2 * 64 * 2
"""Bytes for each token: keys and values of every layer and group, in half floats."""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAGOMAN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "m.gguf").write_bytes(HEAD + bytes(5000))
    return tmp_path / "m.gguf"


def test_before_it_was_loaded_its_file_and_its_state_count(file: Path) -> None:
    size = len(HEAD) + 5000
    assert expected(ModelSpec("m", "llama", str(file))) == PROCESS_BYTES + size + STATE * 1000 * 8
    small = ModelSpec("m", "llama", str(file), {"context": 100, "slots": 1, "cache_sequences": 0})
    assert expected(small) == PROCESS_BYTES + size + STATE * 100


def test_what_is_left_open_is_as_much_as_the_engine_would_take(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(HEAD) + 5000
    monkeypatch.setattr(hardware, "memory", lambda: STATE * 1000 * 6 / DEFAULT_MEMORY_SHARE)
    assert expected(ModelSpec("m", "llama", str(file))) == PROCESS_BYTES + size + STATE * 1000 * 6


def test_types_of_state_and_adapters_count(file: Path, tmp_path: Path) -> None:
    options = {"context": 100, "slots": 2, "cache_sequences": 1}
    before = PROCESS_BYTES + len(HEAD) + 5000
    exact = ModelSpec("m", "llama", str(file), {**options, "kv": "q8_0"})
    assert expected(exact) == before + STATE * 17 // 32 * 100 * 3
    (tmp_path / "a.gguf").write_bytes(bytes(700))
    entries = {"m-a": str(tmp_path / "a.gguf"), "m-b": {"path": str(tmp_path / "gone.gguf")}}
    adapted = ModelSpec("m", "llama", str(file), {**options, "adapters": entries}, adapters=("m-a", "m-b"))
    assert expected(adapted) == before + 700 + 3 * STATE * 100 * 3


def test_heads_wider_than_their_share_count(tmp_path: Path) -> None:
    widths = {"attention.key_length": 128, "attention.value_length": 96}
    pairs = [pair(f"llama.{key}", 4, struct.pack("<I", value)) for key, value in (NUMBERS | widths).items()]
    head = gguf(pair("general.architecture", 8, text("llama")), *pairs)
    (tmp_path / "m.gguf").write_bytes(head)
    spec = ModelSpec("m", "llama", str(tmp_path / "m.gguf"), {"context": 10, "slots": 1, "cache_sequences": 0})
    assert expected(spec) == PROCESS_BYTES + len(head) + 10 * 2 * (128 + 96) * 2 * 10


def test_all_parts_count(tmp_path: Path) -> None:
    for at in (1, 2):
        (tmp_path / f"m-0000{at}-of-00002.gguf").write_bytes(HEAD + bytes(1000))
    first = str(tmp_path / "m-00001-of-00002.gguf")
    need = expected(ModelSpec("m", "llama", first, {"context": 1, "slots": 1, "cache_sequences": 0}))
    assert need == PROCESS_BYTES + 2 * (len(HEAD) + 1000) + STATE


def test_what_was_measured_counts_until_the_file_or_the_options_change(file: Path) -> None:
    spec = ModelSpec("m", "llama", str(file))
    first = expected(spec)
    remember(spec, 12345)
    remember(spec, 999)
    assert expected(spec) == expected(ModelSpec("other name", "llama", str(file))) == 12345
    assert expected(ModelSpec("m", "llama", str(file), {"slots": 1})) < first
    file.write_bytes(HEAD)
    assert expected(spec) != 12345


def test_a_damaged_memory_is_no_memory(file: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ModelSpec("m", "llama", str(file))
    first = expected(spec)
    home.mkdir()
    for content in ("", "[]", '{"a": "b"}', "\0"):
        (home / "memory.json").write_text(content)
        assert expected(spec) == first
    remember(spec, 5)
    assert expected(spec) == 5
    monkeypatch.setattr(memory_estimate, "MOST_REMEMBERED", 1)
    remember(ModelSpec("m", "llama", str(file), {"slots": 9}), 7)
    assert expected(spec) == first


def test_models_of_the_server_s_own_process_need_nothing() -> None:
    assert expected(ModelSpec("s", "scripted")) == 0
    assert expected(ModelSpec("s", "scripted", None, {"crash_after": 5})) == PROCESS_BYTES
    assert not in_worker(ModelSpec("s", "scripted"))
    with pytest.raises(ConfigError, match=r"models\.s: "):
        in_worker(ModelSpec("s", "scripted", None, {"chunk": "many"}))


def test_a_file_that_cannot_be_read_is_for_the_engine_to_complain_of(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    assert expected(ModelSpec("m", "llama", str(tmp_path / "bad.gguf"))) == PROCESS_BYTES + 4
