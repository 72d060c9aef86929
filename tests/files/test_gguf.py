"""Reading valid, truncated and malformed GGUF headers."""

import os
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.core.errors import ConfigError
from dragoman.files.gguf import Tensor, read_metadata, read_outline
from tests.support.gguf_files import HUGE, WHOLE, array, gguf, header, pair, sparse, tensor, text, with_tensors


def test_numbers_and_texts(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(WHOLE + b"tensors follow")
    assert read_metadata(file) == {
        "general.architecture": "llama",
        "llama.context_length": 4096,
        "bos": True,
        "base": 0.5,
        "tokenizer.chat_template": "{{ é }}",
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cut off"),
        (b"GGUF", "cut off"),
        (b"nothing of the kind", "does not begin with GGUF"),
        (gguf(version=77), "version 77 is unknown"),
        (gguf(pair("a", 8, struct.pack("<Q", 2**63))), "a text of 9223372036854775808 bytes"),
        (gguf(pair("a", 9, array(4, 2**62, b""))), "cut off"),
        (gguf(pair("a", 9, array(8, 2**62, text("x")))), "more than 2000000 texts"),
        (gguf(pair("a", 13, b"")), "unknown kind 13"),
        (gguf(pair("a", 9, array(9, 1, b""))), "unknown kind 9"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**62), "has 4611686018427387904 pairs"),
        (with_tensors(tensor("a", 32, offset=192)), "cut off"),
        (with_tensors(tensor("a", 2**62, 2**62)), "cut off"),
        (with_tensors(tensor("a", 4), data=0), "cut off"),
        (with_tensors(tensor("a", *[1] * 5)), "the tensor a has 5 dimensions"),
        (with_tensors(tensor("a")), "the tensor a has 0 dimensions"),
        (with_tensors(tensor("a", 4), alignment=48), "its alignment is 48"),
        (with_tensors(tensor("a", 4), alignment=0), "its alignment is 0"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**62, 0), "has 4611686018427387904 tensors"),
        (gguf(pair("general.alignment", 8, text("a" * 5000))), r"its alignment is a{100}$"),
    ],
)
def test_malformed_files(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"m.gguf is not a GGUF file: .*{message}"):
        read_outline(file)


@given(cut=st.integers(0, len(WHOLE) - 1))
def test_truncated_at_any_byte(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    file = tmp_path_factory.getbasetemp() / "cut.gguf"
    file.write_bytes(WHOLE[:cut])
    with pytest.raises(ConfigError, match="cut off"):
        read_metadata(file)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*: No such file"):
        read_metadata(tmp_path / "none.gguf")


def test_metadata_of_a_real_model(smollm2_path: Path) -> None:
    found = read_metadata(smollm2_path)
    assert (found["general.architecture"], found["llama.context_length"]) == ("llama", 8192)
    assert "<|im_start|>" in str(found["tokenizer.chat_template"])


def test_outline(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    content = with_tensors(tensor("a", 32, 2, kind=3), tensor("b", 4, offset=64))
    file.write_bytes(content)
    outline = read_outline(file)
    assert outline.tensors == (Tensor("a", (32, 2), 3, 0), Tensor("b", (4,), 0, 64))
    assert [(tensor.elements, tensor.bytes) for tensor in outline.tensors] == [(64, 40), (4, 16)]
    assert (outline.alignment, outline.data_start) == (64, len(content) - 256)
    assert content[outline.places["general.alignment"] :][:4] == struct.pack("<I", 64)
    assert content[outline.pairs_end :].startswith(text("a"))


COUNTS_READS = pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs /proc/self/io of Linux")


@COUNTS_READS
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (header(HUGE), "pairs of metadata, more than 10000"),
        (header(0, tensors=HUGE), "tensors, more than 100000"),
        (header(1, pair("a", 8, struct.pack("<Q", HUGE // 2))), "a text of 549755813888 bytes, more than 1048576"),
        (header(1, struct.pack("<Q", HUGE // 2)), "a text of 549755813888 bytes, more than 65535"),
        (header(1, pair("a", 9, array(8, HUGE // 16, b""))), "more than 2000000 texts"),
        (header(2, *[pair("a", 9, array(8, 1_500_000, bytes(12_000_000)))] * 2), "more than 2000000 texts"),
        (header(1, pair("a", 9, array(0, HUGE // 2, b""))), "header has more than 64 MiB"),
        (header(1, pair("a", 9, array(8, 2, struct.pack("<Q", HUGE // 4)))), "header has more than 64 MiB"),
        (header(99, *[pair("a", 8, text("x" * 1_000_000))] * 68), "header has more than 64 MiB"),
    ],
)
def test_a_huge_sparse_file_is_refused_after_a_bounded_read(tmp_path: Path, content: bytes, message: str) -> None:
    file = sparse(tmp_path / "m.gguf", content)
    for read in (read_metadata, read_outline):
        before = bytes_read()
        with pytest.raises(ConfigError, match=f"m.gguf is not a GGUF file: .*{message}"):
            read(file)
        assert bytes_read() - before < 70 << 20


def bytes_read() -> int:
    """Bytes that this process has read so far."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["rchar"])


@COUNTS_READS
def test_reading_stops_when_the_requested_keys_are_found(tmp_path: Path) -> None:
    vocabulary = pair("tokens", 9, array(8, 500_000, text("token") * 500_000))
    file = tmp_path / "m.gguf"
    file.write_bytes(gguf(pair("general.architecture", 8, text("llama")), vocabulary))
    before = bytes_read()
    assert read_metadata(file, ("general.architecture",)) == {"general.architecture": "llama"}
    assert bytes_read() - before < 200_000
    assert read_metadata(file, ("general.architecture", "none")) == {"general.architecture": "llama"}


def test_special_files_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "folder.gguf").mkdir()
    (tmp_path / "zero.gguf").symlink_to("/dev/zero")
    for name in ("pipe", "folder", "zero"):
        with pytest.raises(ConfigError, match=r"not a regular file|Is a directory"):
            read_metadata(tmp_path / f"{name}.gguf")
