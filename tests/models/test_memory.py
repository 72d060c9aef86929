"""Memory of models: estimates, measurements, and decisions from both."""

import asyncio
import os
import re
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from dragoman.config.model_spec import ModelSpec
from dragoman.config.settings import Limits, Settings
from dragoman.core.engine import Engine, Output
from dragoman.core.errors import ConfigError, ModelFailed
from dragoman.core.request import GenerationRequest
from dragoman.engines.llama import hardware
from dragoman.engines.llama.options import DEFAULT_MEMORY_SHARE
from dragoman.engines.llama.tuning_record import Trial, TuningKey, TuningRecord, copy_path, record_path
from dragoman.models import Catalog, memory
from dragoman.models.engine_loader import OnEngineLost
from dragoman.models.memory import PROCESS_BYTES, expected_memory, remember_memory, resident_memory, session_memory
from tests.support.gguf_files import gguf, pair, text

NUMBERS = {"block_count": 10, "attention.head_count": 8, "attention.head_count_kv": 2, "embedding_length": 512}
NUMBERS |= {"context_length": 1000}
HEAD = gguf(
    pair("general.architecture", 8, text("llama")),
    *(pair(f"llama.{key}", 4, struct.pack("<I", value)) for key, value in NUMBERS.items()),
)
KV_BYTES = 2 * 10 * 2 * 64 * 2
"""Bytes per token: keys and values of every layer and group, in half floats."""
SESSION_MEMORY = "dragoman.models.engine_loader.session_memory"
SETTINGS = Settings(models=(ModelSpec("m", "scripted"),), models_dir=(), memory=1000)
MEBI = 2**20
FAMILY = """
import mmap, os, sys
shared = mmap.mmap(-1, 64 << 20)
shared.write(b"x" * (64 << 20))
parent, child = os.pipe(), os.pipe()
for _ in range(int(sys.argv[1])):
    if not os.fork():
        shared.seek(0)
        shared.read()
        own = b"y" * (32 << 20)
        os.write(child[1], b"!")
        os.read(parent[0], 1)
        os._exit(0)
    os.read(child[0], 1)
print("there", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Store measurements in a temporary folder; forget the last list of sessions."""
    memory._read_sessions.cache_clear()
    monkeypatch.setenv("DRAGOMAN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "m.gguf").write_bytes(HEAD + bytes(5000))
    return tmp_path / "m.gguf"


def test_estimate_from_file_and_kv_cache(file: Path) -> None:
    size = len(HEAD) + 5000
    assert expected_memory(ModelSpec("m", "llama", str(file))) == PROCESS_BYTES + size + KV_BYTES * 1000 * 8
    small = ModelSpec("m", "llama", str(file), {"context": 100, "slots": 1, "cache_sequences": 0})
    assert expected_memory(small) == PROCESS_BYTES + size + KV_BYTES * 100


def test_estimate_uses_the_size_of_a_tuned_copy(file: Path) -> None:
    copy = copy_path(file)
    copy.parent.mkdir(parents=True)
    copy.write_bytes(HEAD + bytes(9000))
    record = TuningRecord(TuningKey.of(file), Trial("Q8_0", 1), (), copy.stat().st_size)
    record_path(file).write_bytes(msgspec.json.encode(record))
    options = {"context": 100, "slots": 1, "cache_sequences": 0}
    before = PROCESS_BYTES + len(HEAD) + KV_BYTES * 100
    assert expected_memory(ModelSpec("m", "llama", str(file), options)) == before + 9000
    assert expected_memory(ModelSpec("m", "llama", str(file), {**options, "layout": "as-is"})) == before + 5000


def test_estimate_without_options_follows_the_engine(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(HEAD) + 5000
    monkeypatch.setattr(hardware, "memory", lambda: KV_BYTES * 1000 * 6 / DEFAULT_MEMORY_SHARE)
    assert expected_memory(ModelSpec("m", "llama", str(file))) == PROCESS_BYTES + size + KV_BYTES * 1000 * 6


def test_estimate_with_kv_type_and_adapters(file: Path, tmp_path: Path) -> None:
    options = {"context": 100, "slots": 2, "cache_sequences": 1}
    before = PROCESS_BYTES + len(HEAD) + 5000
    exact = ModelSpec("m", "llama", str(file), {**options, "kv": "q8_0"})
    assert expected_memory(exact) == before + KV_BYTES * 17 // 32 * 100 * 3
    (tmp_path / "a.gguf").write_bytes(bytes(700))
    entries = {"m-a": str(tmp_path / "a.gguf"), "m-b": {"path": str(tmp_path / "gone.gguf")}}
    adapted = ModelSpec("m", "llama", str(file), {**options, "adapters": entries}, adapters=("m-a", "m-b"))
    assert expected_memory(adapted) == before + 700 + 3 * KV_BYTES * 100 * 3


def test_estimate_with_explicit_head_sizes(tmp_path: Path) -> None:
    widths = {"attention.key_length": 128, "attention.value_length": 96}
    pairs = [pair(f"llama.{key}", 4, struct.pack("<I", value)) for key, value in (NUMBERS | widths).items()]
    head = gguf(pair("general.architecture", 8, text("llama")), *pairs)
    (tmp_path / "m.gguf").write_bytes(head)
    spec = ModelSpec("m", "llama", str(tmp_path / "m.gguf"), {"context": 10, "slots": 1, "cache_sequences": 0})
    assert expected_memory(spec) == PROCESS_BYTES + len(head) + 10 * 2 * (128 + 96) * 2 * 10


def test_estimate_of_a_split_file(tmp_path: Path) -> None:
    for at in (1, 2):
        (tmp_path / f"m-0000{at}-of-00002.gguf").write_bytes(HEAD + bytes(1000))
    first = str(tmp_path / "m-00001-of-00002.gguf")
    need = expected_memory(ModelSpec("m", "llama", first, {"context": 1, "slots": 1, "cache_sequences": 0}))
    assert need == PROCESS_BYTES + 2 * (len(HEAD) + 1000) + KV_BYTES


def test_measurement_is_used_until_file_or_options_change(file: Path) -> None:
    spec = ModelSpec("m", "llama", str(file))
    first = expected_memory(spec)
    remember_memory(spec, 12345)
    remember_memory(spec, 999)
    assert expected_memory(spec) == expected_memory(ModelSpec("other name", "llama", str(file))) == 12345
    assert expected_memory(ModelSpec("m", "llama", str(file), {"slots": 1})) < first
    file.write_bytes(HEAD)
    assert expected_memory(spec) != 12345


def test_damaged_measurement_file_is_ignored(file: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ModelSpec("m", "llama", str(file))
    first = expected_memory(spec)
    home.mkdir()
    for content in ("", "[]", '{"a": "b"}', "\0"):
        (home / "memory.json").write_text(content)
        assert expected_memory(spec) == first
    remember_memory(spec, 5)
    assert expected_memory(spec) == 5
    monkeypatch.setattr(memory, "MAX_REMEMBERED", 1)
    remember_memory(ModelSpec("m", "llama", str(file), {"slots": 9}), 7)
    assert expected_memory(spec) == first


def test_in_process_models_need_no_memory() -> None:
    assert expected_memory(ModelSpec("s", "scripted")) == 0
    assert expected_memory(ModelSpec("s", "scripted", None, {"crash_after": 5})) == PROCESS_BYTES
    with pytest.raises(ConfigError, match="chunk: expected `int`"):
        expected_memory(ModelSpec("s", "scripted", None, {"chunk": "many"}))


def test_unreadable_file_is_estimated_by_size(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    assert expected_memory(ModelSpec("m", "llama", str(tmp_path / "bad.gguf"))) == PROCESS_BYTES + 4


async def test_largest_measurement_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter([100, 0, 300, 200])
    monkeypatch.setattr(SESSION_MEMORY, lambda pid: next(sizes))
    catalog = Catalog(SETTINGS)
    host = catalog.resolve("m").host
    await host.ready()
    seen = [catalog.lifecycle.residency_of(host).current_memory()]
    for _ in range(3):
        await host.measure()
        seen.append(catalog.lifecycle.residency_of(host).current_memory())
    assert seen == [100, 100, 300, 300]
    await catalog.stop()


async def test_model_grown_beyond_the_budget_is_loaded_again_after_a_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = 600
    monkeypatch.setattr(SESSION_MEMORY, lambda pid: size)
    for _ in range(2):
        catalog = Catalog(SETTINGS)
        host = catalog.resolve("m").host
        for _ in range(2):
            size = 600
            await host.ready()
            size = 1100
            await host.measure()
            assert catalog.lifecycle.residency_of(host).admits
            catalog.lifecycle.request_unload(host)
            async with asyncio.timeout(60):
                while host.state != "cold":  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        async with asyncio.timeout(60):
            while memory.expected_memory(SETTINGS.models[0]) != 1000:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await catalog.stop()


class Plain(Engine):
    def generate(self, request: GenerationRequest) -> Iterator[Output]:
        yield "here"


async def test_engine_lost_during_measurement_fails_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    callbacks: list[OnEngineLost] = []
    has_gone = threading.Event()

    async def engine_factory(spec: ModelSpec, limits: Limits, on_lost: OnEngineLost) -> Engine:
        callbacks.append(on_lost)
        return Plain()

    loop = asyncio.get_running_loop()

    def lose() -> None:
        callbacks[-1]("it died too often")
        has_gone.set()

    def measure(pid: int | None) -> int:
        if not has_gone.is_set():
            loop.call_soon_threadsafe(lose)
            has_gone.wait(60)
        return 100

    monkeypatch.setattr(SESSION_MEMORY, measure)
    catalog = Catalog(SETTINGS, engine_factory=engine_factory)
    host = catalog.resolve("m").host
    with pytest.raises(ModelFailed):
        await host.ready()
    assert (host.state, host.failure) == ("failed", "it died too often")
    assert isinstance(await host.ready(), Plain)
    assert (host.state, host.failure) == ("ready", None)
    await catalog.stop()


@contextmanager
def family(children: int) -> Iterator[int]:
    """Start a process with 64 MiB and children that share it and have 32 MiB of their own."""
    with subprocess.Popen(
        [sys.executable, "-c", FAMILY, str(children)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"there\n"
            yield process.pid
        finally:
            os.killpg(process.pid, 9)


def test_resident_memory() -> None:
    assert 5 * MEBI < resident_memory(os.getpid()) < 2**34
    assert resident_memory(None) == resident_memory(2**30) == 0


def test_single_process_counts_its_resident_memory() -> None:
    with family(0) as pid:
        assert session_memory(pid) == resident_memory(pid) > 64 * MEBI
    assert session_memory(None) == session_memory(2**30) == 0


def test_shared_pages_of_a_session_count_once() -> None:
    with family(3) as pid:
        assert (64 + 3 * 32) * MEBI < session_memory(pid) < (64 + 3 * 32 + 40) * MEBI


def test_without_pss_each_process_counts_fully(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "PSS", re.compile("nothing like it"))
    with family(2) as pid:
        assert session_memory(pid) > (3 * 64 + 2 * 32) * MEBI
