"""Builds small GGUF files, valid and invalid ones."""

import struct
from pathlib import Path

HUGE = 1 << 40


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


def tensor(name: str, *sizes: int, kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def with_tensors(*tensors: bytes, alignment: int = 64, data: int = 256) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 2)
    head += pair("general.alignment", 4, struct.pack("<I", alignment)) + pair("name", 8, text("x"))
    head += b"".join(tensors)
    return head + bytes(-len(head) % 64) + bytes(data)


def sparse(path: Path, content: bytes) -> Path:
    """A file with this content and a terabyte of zeros, which take no space on the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.truncate(HUGE)
    return path


def header(pairs: int, *written: bytes, tensors: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, pairs) + b"".join(written)


def visible_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
