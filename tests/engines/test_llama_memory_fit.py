"""The memory that texts take: what is chosen, and what the types in which it is kept cost in bytes and in exactness."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from dragoman.config.loading import Flags, load_settings
from dragoman.core.errors import ConfigError
from dragoman.core.request import Logprobs
from dragoman.engines.llama import hardware
from dragoman.engines.llama.binding import Context, Model
from dragoman.engines.llama.engine import LlamaEngine
from dragoman.engines.llama.kv_size import Kv, Shape
from dragoman.engines.llama.memory_fit import LEAST_DEFAULT_CONTEXT, Room, room
from dragoman.engines.llama.options import LlamaOptions
from dragoman.engines.llama.warnings import doubts
from tests.engines.running import Run, collect, completion

HALF = 23040
"""Bytes of a token's state: 30 layers, a key and a value of 192 half floats each."""
EIGHTH = 12240
SEA = (
    "The sea was calm that morning, and the old man went down to his boat with bread, water and a long line. His "
    "daughter had mended the sail in winter; the mast came from a wreck near the lighthouse. Forty years ago he had "
    "crossed the bay in a storm, with three goats and a priest aboard, and since then nobody in town doubted him."
)
MEAN_TOLERANCE, TOLERANCE = 0.1, 0.5
"""Of the log probabilities of SEA's tokens; measured 0.066 and 0.324."""


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> Iterator[Model]:
    loaded = Model(smollm2_path)
    yield loaded
    loaded.close()


@pytest.mark.parametrize(
    ("memory", "kv", "kept"),
    [
        (2**62, "f16", 4),
        (4 * 6 * 64 * HALF, "f16", 2),
        (4 * 3 * 64 * HALF, "f16", 0),
        (4 * 3 * 64 * HALF, "q8_0", 1),
        (4 * 6 * 64 * HALF, "q8_0", 4),
    ],
)
def test_the_cache_is_as_large_as_the_memory_allows(
    model: Model, monkeypatch: pytest.MonkeyPatch, memory: int, kv: Kv, kept: int
) -> None:
    monkeypatch.setattr(hardware, "memory", lambda: memory)
    assert room(model, 4, 64, None, kv) == Room(64, 4, kept)
    assert room(model, 4, 64, 3, kv).cached == 3


def test_the_state_of_a_token(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Shape(layers=30, heads=9, groups=3, width=576).token_bytes("f16") == HALF
    # Where a head is wider than its share of a token's vector, the file says so.
    told = {"llama.attention.key_length": "128", "llama.attention.value_length": "96"}
    monkeypatch.setattr(model, "metadata", {**model.metadata, **told})
    assert model.state_bytes("f16") == Shape(30, 9, 3, 576, key=128, value=96).token_bytes("f16") == 30 * 3 * 224 * 2


def test_a_context_is_as_long_as_the_memory_allows(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (model.state_bytes("f16"), model.state_bytes("q8_0")) == (HALF, EIGHTH)
    monkeypatch.setattr(hardware, "memory", lambda: 4 * 4 * 5000 * HALF)
    assert room(model, 4, None, None, "f16").length == LEAST_DEFAULT_CONTEXT
    assert room(model, 4, None, None, "q8_0").length == model.trained_context
    with pytest.raises(ConfigError, match="lower context or slots or cache_sequences"):
        room(model, 4, 8192, 20, "f16")
    assert room(model, 4, 8192, 4, "q8_0").sequences == 8


def test_the_memory_that_a_context_takes_is_the_one_that_was_foreseen(model: Model) -> None:
    def taken(kv: Kv) -> int:
        before = _resident()
        context = Context(model, sequences=4, length=4096, rows=8, outputs=4, threads=1, kv=kv)
        after = _resident()
        context.close()
        return after - before

    taken("f16")
    half, eighth = taken("f16"), taken("q8_0")
    assert half - eighth == pytest.approx(4 * 4096 * (HALF - EIGHTH), rel=0.1)
    assert eighth < 0.65 * half


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def test_replies_are_close_whatever_the_type(with_engine: Run) -> None:
    found: list[list[float]] = []

    async def test(engine: LlamaEngine) -> None:
        asked = completion(SEA, max_tokens=8, ignore_eos=True, logprobs=Logprobs(prompt=True))
        answer = await collect(engine, asked)
        found.append([logprob.logprob or 0.0 for logprob in answer.started.prompt_logprobs])
        assert (await collect(engine, completion())).text.startswith(" Paris")
        # What was computed before is as good as what is computed now, in this type too.
        again = await collect(engine, completion(SEA, max_tokens=8, ignore_eos=True))
        assert again.started.cached_tokens > 70

    for kv in ("f16", "q8_0"):
        with_engine(test, slots=1, context=256, kv=kv)
    differences = [abs(one - other) for one, other in zip(*found, strict=True)]
    assert 0 < sum(differences) / len(differences) < MEAN_TOLERANCE
    assert max(differences) < TOLERANCE


def test_eight_bits_need_flash_attention(tmp_path: Path) -> None:
    file = tmp_path / "dragoman.yaml"
    file.write_text("models:\n  m:\n    path: ./m.gguf\n    kv: q8_0\n    flash_attention: false\n")
    with pytest.raises(ConfigError, match=r"dragoman.yaml:4: models\.m\.kv: q8_0 needs flash attention"):
        load_settings(str(file), Flags(), {})
    with pytest.raises(msgspec.ValidationError, match="kv"):
        msgspec.convert({"path": "x", "kv": "q4_0"}, LlamaOptions)


def test_more_texts_than_llama_keeps_are_told_in_their_line(tmp_path: Path) -> None:
    file = tmp_path / "dragoman.yaml"
    file.write_text("models:\n  m:\n    path: ./m.gguf\n    slots: 200\n    cache_sequences: 57\n")
    with pytest.raises(
        ConfigError, match=r"dragoman.yaml:5: models\.m\.cache_sequences: 57 and 200 slots are more than"
    ):
        load_settings(str(file), Flags(), {})
    file.write_text("models:\n  m:\n    path: ./m.gguf\n    slots: 200\n    cache_sequences: 56\n")
    assert load_settings(str(file), Flags(), {}).models[0].options["cache_sequences"] == 56


def test_slots_that_the_memory_is_too_small_for_are_doubted(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = LlamaOptions(path=str(smollm2_path), slots=256)
    monkeypatch.setattr(hardware, "memory", lambda: 1e12)
    assert list(doubts(options)) == []
    monkeypatch.setattr(hardware, "memory", lambda: 1e9)
    ((key, words),) = doubts(options)
    assert key == "slots"
    assert "and there are 1: lower context or slots" in words
