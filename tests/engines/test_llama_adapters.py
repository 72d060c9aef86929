"""Adapters of chance over the real model: heard where they are asked for, and nowhere else."""

import asyncio
from pathlib import Path

import pytest

from dragoman.core.errors import ConfigError
from dragoman.core.request import Logprobs
from dragoman.engines.llama.adapters import AdapterOptions
from dragoman.engines.llama.engine import LlamaEngine
from dragoman.engines.llama.options import LlamaOptions
from dragoman.engines.llama.pace import Pace
from dragoman.engines.llama.runner import ALONE_SECONDS, LEAST_CHUNK
from tests.engines.adapters import write_adapter
from tests.engines.running import FRANCE, Run, chat, collect, completion
from tests.engines.test_llama_reuse import SEA, asked, assert_same


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "chance.gguf")


def test_an_adapter_is_heard_as_strong_as_it_is_meant(with_engine: Run, adapter: Path) -> None:
    async def test(engine: LlamaEngine) -> None:
        assert [info.name for info in engine.models()] == ["smollm2", "loud", "mute", "faint"]
        assert len({(info.context, info.format) for info in engine.models()}) == 1
        replies = {}
        for name in ("", "smollm2", "loud", "mute", "faint"):
            told = completion(max_tokens=8, ignore_eos=True, logprobs=Logprobs(top=2), model=name)
            replies[name] = await collect(engine, told)
        assert replies[""].text == replies["smollm2"].text == replies["mute"].text
        assert replies[""].text.startswith(" Paris")
        assert_same([replies[""]], [replies["mute"]])
        assert replies["loud"].text != replies[""].text
        assert replies["faint"].logprobs[0].logprob != replies[""].logprobs[0].logprob
        assert (await collect(engine, chat("Say hello.", model="mute"))).text
        assert (await engine.render(chat("x", model="loud"))).tokens == (await engine.render(chat("x"))).tokens

    given = {"loud": str(adapter), "mute": AdapterOptions(str(adapter), 0), "faint": AdapterOptions(str(adapter), 0.01)}
    with_engine(test, slots=1, context=128, adapters=given)


def test_nobody_takes_what_was_computed_with_other_weights(with_engine: Run, adapter: Path) -> None:
    async def test(engine: LlamaEngine) -> None:
        for name in ("smollm2", "loud"):
            first = await collect(engine, asked(SEA, model=name))
            again = await collect(engine, asked(SEA, model=name))
            assert first.started.cached_tokens == 0, name
            assert again.started.cached_tokens >= 70
            assert_same([first], [again])
        together = await asyncio.gather(
            *(collect(engine, asked(SEA, model=name)) for name in ("smollm2", "loud", "smollm2", "loud"))
        )
        assert together[0].tokens == together[2].tokens
        assert together[1].tokens == together[3].tokens
        assert together[0].tokens != together[1].tokens

    with_engine(test, slots=2, context=128, adapters={"loud": str(adapter)})


class NotingPace(Pace):
    def __init__(self, steps: list[int]) -> None:
        super().__init__(ALONE_SECONDS, least=LEAST_CHUNK, most=512)
        self.steps = steps

    def took(self, rows: int, seconds: float) -> None:
        self.steps.append(rows)


def test_long_prompts_of_the_model_do_not_stall_those_of_an_adapter(with_engine: Run, adapter: Path) -> None:
    async def test(engine: LlamaEngine) -> None:
        assert engine.loaded is not None
        steps: list[int] = []
        engine.loaded.runner.alone = NotingPace(steps)
        writing = engine.generate(completion(FRANCE, max_tokens=300, ignore_eos=True, model="loud"))
        await anext(writing)
        await collect(engine, completion(SEA * 4, max_tokens=1))
        assert not steps, "a step was as long as if nobody waited"
        await writing.aclose()
        await collect(engine, completion(SEA[5:], max_tokens=1))
        assert steps

    with_engine(test, slots=1, context=512, adapters={"loud": str(adapter)})


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("none", "there is no file of the adapter mine at"),
        ("empty", "is not an adapter for this model"),
        ("architecture", "is not an adapter for this model: .*arch"),
        ("width", "is not an adapter for this model: .*shape"),
        ("model", "is not an adapter for this model: .*general.type"),
    ],
)
def test_files_that_are_no_adapters_are_refused_in_one_line(
    smollm2_path: Path, tmp_path: Path, wrong: str, words: str
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
    with pytest.raises(ConfigError, match=words) as caught:
        asyncio.run(LlamaEngine("smollm2", options).start())
    assert "\n" not in str(caught.value)


def test_a_sentence_model_takes_none(minilm_path: Path, adapter: Path) -> None:
    options = LlamaOptions(path=str(minilm_path), adapters={"mine": str(adapter)})
    with pytest.raises(ConfigError, match="takes no adapters"):
        asyncio.run(LlamaEngine("minilm", options).start())
