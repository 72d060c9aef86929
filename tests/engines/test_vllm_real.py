"""The vllm engine with the real vLLM and SmolLM2 on the CPU: `make test-vllm`."""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from dragoman.core.errors import BadRequest, ConfigError, EngineDied
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
from tests.engines.fake_vllm_engine import child_processes, start_engine
from tests.engines.vllm_model import CPU_ARGS, WITH_VLLM, smollm2_folder
from tests.support.generation import collect

pytestmark = [
    pytest.mark.skipif(not WITH_VLLM, reason="run by make test-vllm"),
    pytest.mark.timeout(600),
    pytest.mark.anyio,
]

GREEDY = Sampling(temperature=0)
FRANCE = "What is the capital of France?"
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def engine(smollm2_path: Path) -> AsyncIterator[WorkerEngine]:
    async with start_engine(path=str(smollm2_folder(smollm2_path)), context=1024, args=CPU_ARGS) as engine:
        yield engine


def is_engine(process: int) -> bool:
    """Whether it is the engine process and not Python's resource tracker."""
    directory = Path(f"/proc/{process}")
    return "EngineCore" in directory.joinpath("comm").read_text() + directory.joinpath("cmdline").read_text()


def chat(text: str, **fields: Any) -> GenerationRequest:
    messages = (Message("user", (Text(text),)),)
    return GenerationRequest(**{"messages": messages, "sampling": GREEDY, "max_tokens": 40, **fields})


async def test_format_is_detected(engine: WorkerEngine) -> None:
    assert [info.format for info in engine.models()] == ["hermes"]


async def test_reply_is_correct(engine: WorkerEngine) -> None:
    reply = await collect(engine, chat(FRANCE))
    assert "Paris" in reply.text
    assert reply.finished.reason == "stop"


async def test_repeated_prompt_uses_prefix_cache(engine: WorkerEngine) -> None:
    request = chat("Tell me about the sea. " * 20, max_tokens=2)
    await collect(engine, request)
    started = (await collect(engine, request)).started
    assert 0 < started.cached_tokens < started.prompt_tokens


@pytest.mark.parametrize(
    ("constraint", "fits"),
    [
        (JsonSchema(CITY), lambda text: "city" in json.loads(text)),
        (Regex("[A-Z][a-z]{3,8}!"), lambda text: text.endswith("!") and 5 <= len(text) <= 10),
        (OneOf(("Rome", "Paris")), lambda text: text in ("Rome", "Paris")),
        (Grammar('start: "I say " ("yes" | "no")'), lambda text: text in ("I say yes", "I say no")),
    ],
    ids=["schema", "regex", "choice", "grammar"],
)
async def test_constrained_replies(engine: WorkerEngine, constraint: Any, fits: Callable[[str], bool]) -> None:
    reply = await collect(engine, chat(FRANCE, constraint=constraint, max_tokens=100))
    assert fits(reply.text)
    assert reply.finished.reason == "stop"


async def test_required_tool_call(engine: WorkerEngine) -> None:
    tool = Tool("get_weather", "The weather in a city", CITY)
    request = chat("Weather in Paris?", tools=(tool,), tool_choice=ToolChoice("named", "get_weather"), max_tokens=100)
    text = (await collect(engine, request)).text
    assert "get_weather" in text
    assert "city" in text


async def test_logprobs_of_prompt_and_reply(engine: WorkerEngine) -> None:
    text = "The capital of France is"
    reply = await collect(
        engine,
        GenerationRequest(prompts=(text,), sampling=GREEDY, logprobs=Logprobs(3, prompt=3), echo=True, max_tokens=3),
    )
    first, *others = reply.started.prompt_logprobs
    assert b"".join(entry.text for entry in (first, *others)).decode() == text
    assert first.logprob is None
    assert all(entry.logprob is not None and entry.logprob < 0 for entry in others)
    (entry,) = reply.deltas[0].logprobs
    assert entry.text.decode() == reply.deltas[0].text
    assert len(entry.top) == 3
    assert entry.top[0].token == entry.token


async def test_seeds_biases_and_stop_tokens(engine: WorkerEngine) -> None:
    seeded = chat("Tell me a story.", sampling=Sampling(temperature=1, seed=7), max_tokens=12)
    assert (await collect(engine, seeded)).text == (await collect(engine, seeded)).text
    (paris,) = await engine.tokenize(" Paris", False)
    biased = chat(FRANCE, sampling=Sampling(temperature=0, logit_bias={paris: -100}))
    assert "Paris" not in (await collect(engine, biased)).text
    stopped = await collect(engine, chat(FRANCE, stop_token_ids=(paris,)))
    assert "Paris" not in stopped.text
    assert stopped.finished.reason == "stop"


@pytest.mark.parametrize(
    "wrong",
    [{"logprobs": Logprobs(21)}, {"sampling": Sampling(temperature=3)}, {"sampling": Sampling(presence_penalty=3)}],
)
async def test_request_rejected_by_vllm_is_bad_request(engine: WorkerEngine, wrong: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        await collect(engine, chat("Hello", **wrong))
    assert (await collect(engine, chat("Hello"))).text


async def test_killed_engine_process_fails_requests_and_restarts(engine: WorkerEngine) -> None:
    readers = [asyncio.create_task(collect(engine, chat("Tell me a story.", max_tokens=900))) for _ in range(16)]
    await asyncio.sleep(3)
    assert engine.pid is not None
    for process in filter(is_engine, child_processes(engine.pid)):
        os.kill(process, signal.SIGKILL)
    begun = time.monotonic()
    ends = await asyncio.gather(*readers, return_exceptions=True)
    assert time.monotonic() - begun < 2
    assert {type(end) for end in ends} == {EngineDied}
    assert (await collect(engine, chat("Hello"))).text


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"no_such_argument": 1}, "no_such_argument"),
        ({"dtype": "float1"}, "args.dtype: .*, not 'float1'$"),
        ({"max-num-seqs": 0}, "args.max-num-seqs: Input should be .*, not 0; "),
        ({"max_model_len": 10**9}, "max_model_len"),
        (
            {**CPU_ARGS, "kv_cache_memory_bytes": 100_000, "max_model_len": 512},
            "the server's log has the output of vLLM's processes",
        ),
    ],
)
async def test_invalid_engine_arguments(smollm2_path: Path, args: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        async with start_engine(path=str(smollm2_folder(smollm2_path)), args=args):
            pass
