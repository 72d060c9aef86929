"""Random LoRA adapters over the real model: applied to requests for their name only."""

import asyncio
from pathlib import Path

import pytest

from dragoman.core.engine import stream_events
from dragoman.core.errors import ConfigError
from dragoman.core.request import Logprobs
from dragoman.engines.llama.engine import LlamaEngine
from dragoman.engines.llama.options import AdapterOptions, LlamaOptions
from tests.engines.llama_fixtures import (
    FRANCE,
    SEA,
    assert_same,
    chat,
    collect,
    completion,
    runner_of,
    running_engine,
    short_reply,
)
from tests.engines.lora_files import write_adapter

pytestmark = pytest.mark.anyio


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "chance.gguf")


async def test_adapter_changes_replies_according_to_its_scale(model_path: Path, adapter: Path) -> None:
    file = str(adapter)
    adapters = {"strong": file, "zero": AdapterOptions(file, 0), "weak": AdapterOptions(file, 0.01)}
    async with running_engine(model_path, slots=1, context=128, adapters=adapters) as engine:
        assert [info.name for info in engine.models()] == ["smollm2", "strong", "zero", "weak"]
        assert len({(info.context, info.format) for info in engine.models()}) == 1
        replies = {}
        for name in ("", "smollm2", "strong", "zero", "weak"):
            request = completion(max_tokens=8, ignore_eos=True, logprobs=Logprobs(top=2), model=name)
            replies[name] = await collect(engine, request)
        assert replies[""].text == replies["smollm2"].text == replies["zero"].text
        assert replies[""].text.startswith(" Paris")
        assert_same([replies[""]], [replies["zero"]])
        assert replies["strong"].text != replies[""].text
        assert replies["weak"].logprobs[0].logprob != replies[""].logprobs[0].logprob
        assert (await collect(engine, chat("Say hello.", model="zero"))).text
        assert (await engine.render(chat("x", model="strong"))).tokens == (await engine.render(chat("x"))).tokens


async def test_prefixes_are_not_shared_between_adapters(model_path: Path, adapter: Path) -> None:
    async with running_engine(model_path, slots=2, context=128, adapters={"strong": str(adapter)}) as engine:
        for name in ("smollm2", "strong"):
            first = await collect(engine, short_reply(SEA, model=name))
            again = await collect(engine, short_reply(SEA, model=name))
            assert first.started.cached_tokens == 0, name
            assert again.started.cached_tokens >= 70
            assert_same([first], [again])
        together = await asyncio.gather(
            *(collect(engine, short_reply(SEA, model=name)) for name in ("smollm2", "strong", "smollm2", "strong"))
        )
        assert together[0].tokens == together[2].tokens
        assert together[1].tokens == together[3].tokens
        assert together[0].tokens != together[1].tokens


async def test_long_prompts_do_not_stall_replies_of_an_adapter(model_path: Path, adapter: Path) -> None:
    async with running_engine(model_path, slots=1, context=512, adapters={"strong": str(adapter)}) as engine:
        steps: list[int] = []
        runner_of(engine).alone.record = lambda rows, seconds: steps.append(rows)  # type: ignore[method-assign]
        writing = stream_events(engine, completion(FRANCE, max_tokens=300, ignore_eos=True, model="strong"))
        await anext(writing)
        await collect(engine, completion(SEA * 4, max_tokens=1))
        assert not steps, "a step ran at the pace of an idle engine"
        await writing.aclose()
        await collect(engine, completion(SEA[5:], max_tokens=1))
        assert steps


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("none", "adapter mine: no file at"),
        ("empty", "is not an adapter for this model"),
        ("architecture", "is not an adapter for this model: .*arch"),
        ("width", "is not an adapter for this model: .*shape"),
        ("model", "is not an adapter for this model: .*general.type"),
    ],
)
def test_invalid_adapter_files_are_refused_in_one_line(
    smollm2_path: Path, tmp_path: Path, wrong: str, message: str
) -> None:
    path = tmp_path / "x.gguf"
    if wrong == "empty":
        path.write_bytes(b"")
    elif wrong == "architecture":
        write_adapter(path, architecture="qwen2")
    elif wrong == "width":
        write_adapter(path, width=320)
    chosen = smollm2_path if wrong == "model" else path
    options = LlamaOptions(path=str(smollm2_path), slots=1, context=64, layout="as-is", adapters={"mine": str(chosen)})
    with pytest.raises(ConfigError, match=message) as caught:
        asyncio.run(LlamaEngine("smollm2", options).start())
    assert "\n" not in str(caught.value)


def test_embedding_model_refuses_adapters(minilm_path: Path, adapter: Path) -> None:
    options = LlamaOptions(path=str(minilm_path), adapters={"mine": str(adapter)})
    with pytest.raises(ConfigError, match="cannot have adapters"):
        asyncio.run(LlamaEngine("minilm", options).start())
