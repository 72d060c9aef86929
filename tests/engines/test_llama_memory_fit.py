"""The size of the KV cache: defaults, limits, warnings, and the cost and accuracy of its types."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from dragoman.config.loading import Flags, load_settings
from dragoman.core.errors import ConfigError
from dragoman.core.request import Logprobs
from dragoman.engines.llama import hardware
from dragoman.engines.llama.binding import Context, ContextParams, LlamaModel
from dragoman.engines.llama.library import Kv
from dragoman.engines.llama.options import (
    MIN_DEFAULT_CONTEXT,
    ContextSize,
    LlamaOptions,
    expected_kv_bytes,
    find_warnings,
    fit_context,
)
from dragoman.files.gguf import Value
from tests.engines.llama_fixtures import SEA, collect, completion, running_engine

pytestmark = pytest.mark.anyio

HALF = 23040
"""Bytes per token: 30 layers, a key and a value of 192 half floats each."""
EIGHTH = 12240

MAX_MEAN_DIFFERENCE, MAX_DIFFERENCE = 0.1, 0.5
"""Limits for the log probabilities of SEA's tokens. Measured: 0.066 and 0.324."""


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> Iterator[LlamaModel]:
    loaded = LlamaModel(smollm2_path)
    yield loaded
    loaded.close()


def fit(model: LlamaModel, context: int | None, cached: int | None, kv: Kv, slots: int = 4) -> ContextSize:
    return fit_context(model, LlamaOptions("x", slots=slots, context=context, cache_sequences=cached, kv=kv))


@pytest.mark.parametrize(
    ("memory", "kv", "cached"),
    [
        (2**62, "f16", 4),
        (4 * 6 * 64 * HALF, "f16", 2),
        (4 * 3 * 64 * HALF, "f16", 0),
        (4 * 3 * 64 * HALF, "q8_0", 1),
        (4 * 6 * 64 * HALF, "q8_0", 4),
    ],
)
def test_default_cache_sequences_fit_the_memory(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch, memory: int, kv: Kv, cached: int
) -> None:
    monkeypatch.setattr(hardware, "memory", lambda: memory)
    assert fit(model, 64, None, kv) == ContextSize(64, 4, cached)
    assert fit(model, 64, 3, kv).cached == 3


def test_file_sets_the_widths_of_keys_and_values(model: LlamaModel, monkeypatch: pytest.MonkeyPatch) -> None:
    widths = {"llama.attention.key_length": "128", "llama.attention.value_length": "96"}
    monkeypatch.setattr(model, "metadata", {**model.metadata, **widths})
    monkeypatch.setattr(hardware, "memory", lambda: 4 * 6 * 64 * (30 * 3 * (128 + 96) * 2))
    assert fit(model, 64, None, "f16").cached == 2


def test_default_context_fits_the_memory(model: LlamaModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "memory", lambda: 4 * 4 * 5000 * HALF)
    assert fit(model, None, None, "f16").length == MIN_DEFAULT_CONTEXT
    assert fit(model, None, None, "q8_0").length == model.trained_context
    with pytest.raises(ConfigError, match="lower context or slots or cache_sequences"):
        fit(model, 8192, 20, "f16")
    assert fit(model, 8192, 4, "q8_0").sequences == 8


def test_context_takes_the_expected_memory(model: LlamaModel) -> None:
    def allocated(kv: Kv) -> int:
        before = _resident()
        context = Context(model, ContextParams(sequences=4, length=4096, rows=8, outputs=4, threads=1, kv=kv))
        after = _resident()
        context.close()
        return after - before

    allocated("f16")
    half, eighth = allocated("f16"), allocated("q8_0")
    assert half - eighth == pytest.approx(4 * 4096 * (HALF - EIGHTH), rel=0.1)
    assert eighth < 0.65 * half


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def test_logprobs_are_close_for_all_kv_types(model_path: Path) -> None:
    found: list[list[float]] = []
    for kv in ("f16", "q8_0"):
        async with running_engine(model_path, slots=1, context=256, kv=kv) as engine:
            request = completion(SEA, max_tokens=8, ignore_eos=True, logprobs=Logprobs(prompt=0))
            answer = await collect(engine, request)
            found.append([logprob.logprob or 0.0 for logprob in answer.started.prompt_logprobs])
            assert (await collect(engine, completion())).text.startswith(" Paris")
            # Cached prefixes work with this type too.
            again = await collect(engine, completion(SEA, max_tokens=8, ignore_eos=True))
            assert again.started.cached_tokens > 70
    differences = [abs(one - other) for one, other in zip(*found, strict=True)]
    assert 0 < sum(differences) / len(differences) < MAX_MEAN_DIFFERENCE
    assert max(differences) < MAX_DIFFERENCE


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv": "q8_0", "flash_attention": False}, r"4: models\.m\.kv: q8_0 needs flash attention"),
        ({"cache_sequences": 57, "slots": 200}, r"4: models\.m\.cache_sequences: 57 and 200 slots are more than"),
        ({"kv": "q4_0"}, r"4: models\.m\.kv: "),
    ],
)
def test_contradicting_options_are_reported_with_their_line(
    tmp_path: Path, options: dict[str, object], message: str
) -> None:
    file = tmp_path / "dragoman.yaml"
    lines = [f"    {key}: {json.dumps(value)}\n" for key, value in options.items()]
    file.write_text("models:\n  m:\n    path: ./m.gguf\n" + "".join(lines))
    with pytest.raises(ConfigError, match=rf"dragoman\.yaml:{message}"):
        load_settings(str(file), Flags(), {})


def test_largest_number_of_sequences() -> None:
    assert LlamaOptions("x", slots=200, cache_sequences=56).cache_sequences == 56


def test_warning_if_the_slots_exceed_the_memory(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = LlamaOptions(path=str(smollm2_path), slots=256)
    monkeypatch.setattr(hardware, "memory", lambda: 1e12)
    assert list(find_warnings(options)) == []
    monkeypatch.setattr(hardware, "memory", lambda: 1e9)
    ((key, message),) = find_warnings(options)
    assert key == "slots"
    assert "but the machine has 1 GB: lower context or slots" in message


def test_memory_of_a_file_without_a_context_length() -> None:
    numbers = {"block_count": 2, "attention.head_count": 2, "embedding_length": 8}
    metadata: dict[str, Value] = {"general.architecture": "x", **{f"x.{key}": value for key, value in numbers.items()}}
    assert expected_kv_bytes(metadata, LlamaOptions("x", slots=1, cache_sequences=0)) == 2 * 2 * 8 * 2
