"""The vllm engine with the real vLLM and SmolLM2 on the CPU: `make test-vllm`."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dragoman.core.errors import BadRequest, ConfigError, EngineDied
from dragoman.core.events import Finished, Started, TextDelta
from dragoman.core.request import (
    GenerationRequest,
    Grammar,
    JsonSchema,
    Logprobs,
    Message,
    OneOf,
    Regex,
    Sampling,
    Text,
    Tool,
    ToolChoice,
)
from dragoman.ipc.worker_engine import WorkerEngine
from tests.engines.fake_vllm_engine import events, helpers_of, text_of
from tests.engines.vllm_model import CPU_ARGS, WITH_VLLM, smollm2_folder

pytestmark = [pytest.mark.skipif(not WITH_VLLM, reason="run by make test-vllm"), pytest.mark.timeout(600)]

GREEDY = Sampling(temperature=0)


class Served:
    def __init__(self, engine: WorkerEngine, runner: asyncio.Runner) -> None:
        self.engine = engine
        self.runner = runner

    def run_test(self, test: Callable[[WorkerEngine], Awaitable[None]]) -> None:
        async def limited() -> None:
            async with asyncio.timeout(300):
                await test(self.engine)

        self.runner.run(limited())


@pytest.fixture(scope="module")
def served(smollm2_path: Path) -> Iterator[Served]:
    folder = smollm2_folder(smollm2_path)
    with asyncio.Runner() as runner:
        engine = WorkerEngine("vllm", "smollm2", {"path": str(folder), "context": 1024, "args": CPU_ARGS})
        runner.run(engine.start())
        yield Served(engine, runner)
        runner.run(engine.stop())


def is_engine(process: int) -> bool:
    """Whether it is the engine process and not Python's resource tracker."""
    directory = Path(f"/proc/{process}")
    return "EngineCore" in directory.joinpath("comm").read_text() + directory.joinpath("cmdline").read_text()


def chat(text: str, **fields: Any) -> GenerationRequest:
    messages = (Message("user", (Text(text),)),)
    return GenerationRequest(**{"messages": messages, "sampling": GREEDY, "max_tokens": 40, **fields})


def test_format_is_detected(served: Served) -> None:
    assert [info.format for info in served.engine.models()] == ["hermes"]


def test_reply_is_correct(served: Served) -> None:
    async def test(engine: WorkerEngine) -> None:
        said = await events(engine, chat("What is the capital of France?"))
        assert "Paris" in text_of(said)
        assert isinstance(said[-1], Finished)
        assert said[-1].reason == "stop"

    served.run_test(test)


def test_repeated_prompt_uses_prefix_cache(served: Served) -> None:
    async def test(engine: WorkerEngine) -> None:
        request = chat("Tell me about the sea. " * 20, max_tokens=2)
        await events(engine, request)
        started = (await events(engine, request))[0]
        assert isinstance(started, Started)
        assert 0 < started.cached_tokens < started.prompt_tokens

    served.run_test(test)


@pytest.mark.parametrize(
    ("constraint", "fits"),
    [
        (
            JsonSchema(
                {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
            ),
            lambda text: "city" in json.loads(text),
        ),
        (Regex("[A-Z][a-z]{3,8}!"), lambda text: text.endswith("!") and 5 <= len(text) <= 10),
        (OneOf(("Rome", "Paris")), lambda text: text in ("Rome", "Paris")),
        (Grammar('start: "I say " ("yes" | "no")'), lambda text: text in ("I say yes", "I say no")),
    ],
    ids=["schema", "regex", "choice", "grammar"],
)
def test_constrained_replies(served: Served, constraint: Any, fits: Callable[[str], bool]) -> None:
    async def test(engine: WorkerEngine) -> None:
        said = await events(engine, chat("What is the capital of France?", constraint=constraint, max_tokens=100))
        assert fits(text_of(said))
        assert isinstance(said[-1], Finished)
        assert said[-1].reason == "stop"

    served.run_test(test)


def test_required_tool_call(served: Served) -> None:
    async def test(engine: WorkerEngine) -> None:
        schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
        tool = Tool("get_weather", "The weather in a city", schema)
        request = chat(
            "Weather in Paris?", tools=(tool,), tool_choice=ToolChoice("named", "get_weather"), max_tokens=100
        )
        text = text_of(await events(engine, request))
        assert "get_weather" in text
        assert "city" in text

    served.run_test(test)


def test_logprobs_of_prompt_and_reply(served: Served) -> None:
    async def test(engine: WorkerEngine) -> None:
        request = GenerationRequest(
            prompts=("The capital of France is",),
            sampling=GREEDY,
            logprobs=Logprobs(3, prompt=3),
            echo=True,
            max_tokens=3,
        )
        started, first, *_ = await events(engine, request)
        assert isinstance(started, Started)
        assert isinstance(first, TextDelta)
        assert b"".join(entry.text for entry in started.prompt_logprobs) == b"The capital of France is"
        assert started.prompt_logprobs[0].logprob is None
        assert all(entry.logprob is not None and entry.logprob < 0 for entry in started.prompt_logprobs[1:])
        (entry,) = first.logprobs
        assert entry.text.decode() == first.text
        assert len(entry.top) == 3
        assert entry.top[0].token == entry.token

    served.run_test(test)


def test_seeds_biases_and_stop_tokens(served: Served) -> None:
    async def test(engine: WorkerEngine) -> None:
        seeded = chat("Tell me a story.", sampling=Sampling(temperature=1, seed=7), max_tokens=12)
        assert text_of(await events(engine, seeded)) == text_of(await events(engine, seeded))
        (paris,) = await engine.tokenize(" Paris", False)
        biased = chat("What is the capital of France?", sampling=Sampling(temperature=0, logit_bias={paris: -100}))
        assert "Paris" not in text_of(await events(engine, biased))
        stopped = await events(engine, chat("What is the capital of France?", stop_token_ids=(paris,)))
        assert "Paris" not in text_of(stopped)
        assert isinstance(stopped[-1], Finished)
        assert stopped[-1].reason == "stop"

    served.run_test(test)


@pytest.mark.parametrize(
    "wrong",
    [{"logprobs": Logprobs(21)}, {"sampling": Sampling(temperature=3)}, {"sampling": Sampling(presence_penalty=3)}],
)
def test_request_rejected_by_vllm_is_bad_request(served: Served, wrong: dict[str, Any]) -> None:
    async def test(engine: WorkerEngine) -> None:
        with pytest.raises(BadRequest):
            await events(engine, chat("Hello", **wrong))
        assert text_of(await events(engine, chat("Hello")))

    served.run_test(test)


def test_killed_engine_process_fails_requests_and_restarts(served: Served) -> None:
    async def test(engine: WorkerEngine) -> None:
        readers = [asyncio.create_task(events(engine, chat("Tell me a story.", max_tokens=900))) for _ in range(16)]
        await asyncio.sleep(3)
        assert engine.pid is not None
        for process in filter(is_engine, helpers_of(engine.pid)):
            os.kill(process, signal.SIGKILL)
        begun = time.monotonic()
        ends = await asyncio.gather(*readers, return_exceptions=True)
        assert time.monotonic() - begun < 2
        assert {type(end) for end in ends} == {EngineDied}
        assert text_of(await events(engine, chat("Hello")))

    served.run_test(test)


def test_invalid_engine_arguments(smollm2_path: Path) -> None:
    async def main(args: dict[str, Any], words: str) -> None:
        engine = WorkerEngine("vllm", "m", {"path": str(smollm2_folder(smollm2_path)), "args": args})
        try:
            with pytest.raises(ConfigError, match=words):
                await engine.start()
        finally:
            await engine.stop()

    asyncio.run(main({"no_such_argument": 1}, "no_such_argument"))
    asyncio.run(main({"dtype": "float1"}, "args.dtype: .*, not 'float1'$"))
    asyncio.run(main({"max-num-seqs": 0}, "args.max-num-seqs: Input should be .*, not 0; "))
    asyncio.run(main({"max_model_len": 10**9}, "max_model_len"))
    starved = {**CPU_ARGS, "kv_cache_memory_bytes": 100_000, "max_model_len": 512}
    asyncio.run(main(starved, "the server's log has the output of vLLM's processes"))
