"""The beginning of a GGUF file, whole and broken."""

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.errors import ConfigError
from dragoman.gguf import Tensor, read_metadata, read_outline


def text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def gguf(*pairs: bytes, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, 0, len(pairs)) + b"".join(pairs)


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def array(kind: int, length: int, values: bytes) -> bytes:
    return struct.pack("<IQ", kind, length) + values


WHOLE = gguf(
    pair("general.architecture", 8, text("llama")),
    pair("tokens", 9, array(8, 2, text("a") + text("bé"))),
    pair("scores", 9, array(6, 3, bytes(12))),
    pair("llama.context_length", 4, struct.pack("<I", 4096)),
    pair("bos", 7, b"\x01"),
    pair("base", 6, struct.pack("<f", 0.5)),
    pair("tokenizer.chat_template", 8, text("{{ é }}")),
)


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
    ("content", "words"),
    [
        (b"", "cut off"),
        (b"GGUF", "cut off"),
        (b"nothing of the kind", "does not begin with GGUF"),
        (gguf(version=77), "version 77 is unknown"),
        (gguf(pair("a", 8, struct.pack("<Q", 2**63))), "cut off"),
        (gguf(pair("a", 9, array(4, 2**62, b""))), "cut off"),
        (gguf(pair("a", 9, array(8, 2**62, text("x")))), "cut off"),
        (gguf(pair("a", 13, b"")), "unknown kind 13"),
        (gguf(pair("a", 9, array(9, 1, b""))), "unknown kind 9"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**62), "cut off"),
    ],
)
def test_what_is_not_one(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"m.gguf is not a GGUF file: .*{words}"):
        read_metadata(file)


@given(cut=st.integers(0, len(WHOLE) - 1))
def test_cut_anywhere(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    file = tmp_path_factory.getbasetemp() / "cut.gguf"
    file.write_bytes(WHOLE[:cut])
    with pytest.raises(ConfigError, match="cut off"):
        read_metadata(file)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*: No such file"):
        read_metadata(tmp_path / "none.gguf")


def test_a_real_one(smollm2_path: Path) -> None:
    found = read_metadata(smollm2_path)
    assert (found["general.architecture"], found["llama.context_length"]) == ("llama", 8192)
    assert "<|im_start|>" in str(found["tokenizer.chat_template"])


def tensor(name: str, *sizes: int, kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def with_tensors(*tensors: bytes, alignment: int = 64, data: int = 256) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 2)
    head += pair("general.alignment", 4, struct.pack("<I", alignment)) + pair("name", 8, text("x"))
    head += b"".join(tensors)
    return head + bytes(-len(head) % 64) + bytes(data)


def test_where_everything_is(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    content = with_tensors(tensor("a", 32, 2, kind=3), tensor("b", 4, offset=64))
    file.write_bytes(content)
    outline = read_outline(file)
    assert outline.tensors == (Tensor("a", (32, 2), 3, 0), Tensor("b", (4,), 0, 64))
    assert [(tensor.elements, tensor.bytes) for tensor in outline.tensors] == [(64, 40), (4, 16)]
    assert (outline.alignment, outline.data_start) == (64, len(content) - 256)
    assert content[outline.places["general.alignment"] :][:4] == struct.pack("<I", 64)
    assert content[outline.pairs_end :].startswith(text("a"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (with_tensors(tensor("a", 32, offset=192)), "cut off"),
        (with_tensors(tensor("a", 2**62, 2**62)), "cut off"),
        (with_tensors(tensor("a", 4), data=0), "cut off"),
        (with_tensors(tensor("a", *[1] * 5)), "the tensor a has 5 dimensions"),
        (with_tensors(tensor("a")), "the tensor a has 0 dimensions"),
        (with_tensors(tensor("a", 4), alignment=48), "its alignment is 48"),
        (with_tensors(tensor("a", 4), alignment=0), "its alignment is 0"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**62, 0), "cut off"),
    ],
)
def test_tensors_that_cannot_be(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"m.gguf is not a GGUF file: .*{words}"):
        read_outline(file)
