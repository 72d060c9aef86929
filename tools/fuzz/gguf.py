"""Target `gguf`: damaged model files, through the reader of metadata, the search of folders, and a real load.

A file is read, or refused with a ConfigError. A load ends: with a model, with a refusal, or with the worker's death.
"""

import base64
import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random
from typing import Any

from dragoman.core.errors import ConfigError
from dragoman.files.discovery import Discovery
from dragoman.files.gguf import MAGIC, read_metadata, read_outline
from dragoman.ipc.framing import encode
from dragoman.ipc.messages import Start
from tools.fuzz import values
from tools.fuzz.cases import random_for
from tools.fuzz.shapes import Wrong

LOAD_SECONDS = 80.0
LOADS = 0.002
"""The share of the files that an engine loads, in a process of its own: it takes a second."""
SIZES = (0, 1, 2, 31, 255, 2**16, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
NAMES = (
    "general.architecture",
    "general.name",
    "general.alignment",
    "general.file_type",
    "general.type",
    "llama.block_count",
    "llama.context_length",
    "tokenizer.chat_template",
    "tokenizer.ggml.tokens",
    "\x00é",
)
WORDS = (b"llama", b"bert", b"clip", b"", b"{{ 7*7 }}", b"\xff\xfe", b"a" * 5000, b"\x00", b"adapter")


def _text(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def _value(random: Random, depth: int = 0) -> bytes:
    """A kind and a value of it."""
    kind = random.choice((0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 9, 10, 11, 12))
    if random.random() < 0.02:
        kind = random.choice((13, 255, 2**31, 2**32 - 1))
    if kind == 8:
        data = random.choice(
            (b"llama", b"bert", b"clip", b"", b"{{ 7*7 }}", b"\xff\xfe", b"a" * 5000, b"\x00", b"adapter")
        )
        return struct.pack("<I", kind) + _text(data)
    if kind == 9:
        count = random.choice((0, 1, 3))
        inner = _value(random, depth + 1) if depth < 3 else struct.pack("<IB", 0, 0)
        told = random.choice(SIZES) if random.random() < 0.1 else count
        return struct.pack("<I", kind) + inner[:4] + struct.pack("<Q", told) + inner[4:] * count
    size = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}.get(kind, 4)
    return struct.pack("<I", kind) + random.choice((bytes(size), b"\xff" * size, random.randbytes(size)))


def _file(random: Random) -> bytes:
    pairs = [_text(random.choice(NAMES).encode()) + _value(random) for _ in range(random.randint(0, 6))]
    if random.random() < 0.7:
        pairs.insert(0, _text(b"general.architecture") + struct.pack("<I", 8) + _text(b"llama"))
    tensors = []
    for at in range(random.randint(0, 3)):
        dimensions = random.choice((1, 2, 2, 4, 0, 5, 2**32 - 1) if random.random() < 0.2 else (1, 2))
        sizes = [random.choice(SIZES) if random.random() < 0.2 else 32 for _ in range(min(dimensions, 5))]
        head = _text(b"t%d" % at) + struct.pack("<I", dimensions) + b"".join(struct.pack("<Q", size) for size in sizes)
        offset = random.choice(SIZES) if random.random() < 0.1 else 128 * at
        tensors.append(head + struct.pack("<IQ", random.choice((0, 1, 2, 8, 12, 99)), offset))
    version = 3 if random.random() < 0.95 else random.choice((0, 1, 2, 4, 2**31))
    counts = [random.choice(SIZES) if random.random() < 0.05 else count for count in (len(tensors), len(pairs))]
    return (
        MAGIC + struct.pack("<IQQ", version, *counts) + b"".join(pairs + tensors) + bytes(random.choice((0, 64, 600)))
    )


def case(seed: str, number: int) -> Any:
    random = random_for("gguf", seed, number)
    data = _file(random)
    if random.random() < 0.5:
        data = values.damage(random, data)
    sparse = random.choice((2**20, 2**33, 2**40)) if random.random() < 0.05 else 0
    name = random.choice(("model.gguf", "a-00001-of-00001.gguf", "a-00001-of-00002.gguf", "x-Q4_K_M.gguf", "é \n.gguf"))
    return {
        "data": base64.b64encode(data).decode(),
        "sparse": sparse,
        "name": name,
        "load": random.random() < LOADS,
    }


def check(value: Any) -> str:
    with tempfile.TemporaryDirectory(prefix="dragoman-fuzz-") as folder:
        file = Path(folder) / value["name"]
        file.write_bytes(base64.b64decode(value["data"]))
        if value["sparse"]:
            os.truncate(file, value["sparse"])
        outcome = "read"
        for read in (read_metadata, read_outline):
            try:
                read(file)
            except ConfigError as error:
                if len(str(error)) > 2000 + len(folder):
                    raise Wrong(f"a message of {len(str(error))} characters") from error
                outcome = "refused"
        found = Discovery([Path(folder)])
        found.scan()
        for name in found.found:
            found.resolve(name)
        return _load(file) if value["load"] else outcome


def _load(file: Path) -> str:
    options = {"path": str(file), "context": 64, "slots": 1, "layout": "as-is"}
    command = [sys.executable, "-m", "dragoman.ipc.worker_main"]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )
    assert child.stdin is not None
    try:
        child.stdin.write(encode(Start("llama", "fuzz", options)))
        child.stdin.flush()
        # Its end comes when it has refused the file, or died of it.
        child.communicate(timeout=LOAD_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise Wrong(f"the load does not end within {LOAD_SECONDS:g} s") from error
    finally:
        child.kill()
        child.wait()
    return f"load {child.returncode}"
