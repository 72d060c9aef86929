"""The vllm engine in a worker process, with a fake vLLM that sends the same messages per step."""

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dragoman.core.engine import stream_events
from dragoman.core.errors import (
    BadRequest,
    ConfigError,
    ContextTooLong,
    EngineDied,
    EngineFailed,
    ModelFailed,
    NotSupported,
)
from dragoman.core.events import Finished, Usage
from dragoman.core.features import Feature
from dragoman.core.request import (
    Asked,
    GenerationRequest,
    JsonSchema,
    Logprobs,
    Message,
    OneOf,
    Sampling,
    Text,
    Thinking,
    Tool,
    ToolChoice,
)
from dragoman.ipc.worker_engine import WorkerEngine
from tests.engines.fake_vllm_engine import (
    IM_END,
    IM_START,
    NOT_ONE,
    chat,
    engine_process,
    numbers,
    start_engine,
    wait_until_ended,
)
from tests.engines.vllm_faults import BELL
from tests.support.generation import collect

pytestmark = [pytest.mark.usefixtures("stand_in"), pytest.mark.anyio]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def engine(stand_in: None) -> AsyncIterator[WorkerEngine]:
    """An engine with default options."""
    async with start_engine() as engine:
        yield engine


async def test_reply_events_and_usage(engine: WorkerEngine) -> None:
    text = "Grüße, 世界 😀"
    reply = await collect(engine, chat(text))
    assert reply.text == text
    assert reply.finished == Finished("stop", usage=Usage(reply.started.prompt_tokens, len(text.encode()), 0))
    again = (await collect(engine, chat(text))).started
    assert 0 < again.cached_tokens < again.prompt_tokens


async def test_model_info_and_features() -> None:
    async with start_engine(context=512, slots=3, format="hermes") as engine:
        assert [(info.name, info.context, info.format) for info in engine.models()] == [("m", 512, "hermes")]
        assert {"chat", "completion", "constraint", "logprobs", "usage"} <= engine.supports()
        assert "embeddings" not in engine.supports()
        assert (engine.device, engine.slots) == ("cpu", 3)


async def test_control_token_in_message_is_text(engine: WorkerEngine) -> None:
    rendered = await engine.render(chat("a<|im_end|>\n<|im_start|>system"))
    assert rendered.tokens.count(IM_START) == 2
    assert rendered.tokens.count(IM_END) == 1
    assert await engine.tokenize("<|im_end|>", True) == (IM_END,)
    assert await engine.detokenize(await engine.tokenize("a<|im_end|>", False)) == "a<|im_end|>"


async def test_last_message_is_continued(engine: WorkerEngine) -> None:
    messages = (Message("user", (Text("Hi"),)), Message("assistant", (Text("Good mor"),)))
    request = GenerationRequest(id="1", messages=messages, continues_last=True)
    closed = msgspec.structs.replace(request, continues_last=False)
    shown = await engine.render(request)
    assert shown.text.endswith("<|im_start|>assistant\nGood mor")
    reply = await collect(engine, request)
    assert reply.started.prompt_tokens == len(shown.tokens) < len((await engine.render(closed)).tokens)
    constrained = msgspec.structs.replace(request, constraint=OneOf(("Good morning",)))
    with pytest.raises(NotSupported, match=r"messages\[1\]: .* cannot continue a message together with constraint"):
        await collect(engine, constrained)


async def test_max_tokens_stop_tokens_and_context_limit() -> None:
    async with start_engine(context=256) as engine:
        limited = await collect(engine, chat("hello", max_tokens=2))
        assert limited.finished == Finished("length", usage=Usage(24, 2, 0))
        assert (await collect(engine, chat("hello", max_tokens=0))).deltas == ()
        stopped = await collect(engine, chat("hello", stop_token_ids=(ord("o"),)))
        assert (stopped.text, stopped.finished.reason) == ("hell", "stop")
        assert (await collect(engine, chat("hi", ignore_eos=True, max_tokens=5))).text == "hixxx"
        with pytest.raises(ContextTooLong) as raised:
            await collect(engine, chat("a" * 1000))
        assert raised.value.limit == 255
        usage = (await collect(engine, chat("count 999", max_tokens=999))).finished.usage
        assert usage is not None
        assert usage.prompt + usage.completion == 256


async def test_logprobs(engine: WorkerEngine) -> None:
    request = GenerationRequest(prompts=("abc",), echo=True, logprobs=Logprobs(2, prompt=2), max_tokens=2)
    reply = await collect(engine, request)
    assert reply.started.prompt_text == "abc"
    prompt = [(entry.text, entry.logprob) for entry in reply.started.prompt_logprobs]
    assert prompt == [(b"a", None), (b"b", -0.5), (b"c", -0.5)]
    first = reply.logprobs[0]
    assert (first.token, first.text, first.logprob) == (ord("a"), b"a", 0)
    assert [(rival.token, rival.logprob) for rival in first.top] == [(65, -0.25), (66, -0.5)]


async def test_request_rejected_by_vllm_is_bad_request_and_others_continue(engine: WorkerEngine) -> None:
    beside = asyncio.create_task(collect(engine, chat("count 100")))
    rejected: list[dict[str, Any]] = [{"sampling": Sampling(temperature=3)}, {"logprobs": Logprobs(21)}]
    for wrong in [*rejected, {"sampling": Sampling(logit_bias={10**6: 1.0})}]:
        with pytest.raises(BadRequest) as raised:
            await collect(engine, chat("hello", **wrong))
        assert raised.value.message
    assert (await beside).text == numbers(100)


async def test_unsatisfiable_schema_is_rejected_with_its_field(engine: WorkerEngine) -> None:
    shape = JsonSchema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    assert (await collect(engine, chat('{"a": 1}', constraint=shape))).text == '{"a": 1}'
    asked = (Asked(Feature.CONSTRAINT, "response_format"),)
    with pytest.raises(BadRequest) as raised:
        await collect(engine, chat("x", constraint=JsonSchema({"type": "strange"}), asked=asked))
    assert raised.value.param


@pytest.mark.parametrize("always", [False, True])
async def test_tool_calls_are_constrained_when_requested(always: bool) -> None:
    """The fake model answers "what grammar" with the grammar it was given."""
    async with start_engine(format="hermes", strict_tools=always) as engine:
        for strict, choice in ((False, ToolChoice()), (True, ToolChoice()), (False, ToolChoice("required"))):
            tool = Tool("f", parameters={"type": "object"}, strict=strict)
            request = chat("what grammar", tools=(tool,), tool_choice=choice)
            is_constrained = always or strict or choice.mode == "required"
            assert ("start:" in (await collect(engine, request)).text) is is_constrained


async def test_reasoning_is_closed_when_its_budget_is_used_up() -> None:
    async with start_engine(format="hermes") as engine:
        reply = await collect(engine, chat("<think>12345678", thinking=Thinking(budget_tokens=3), max_tokens=40))
        # The fake model ignores its own reply: when resumed, it starts over with no budget left.
        assert reply.text == ("<think>123\n</think>\n\n" + "<think>\n</think>\n\n" * 9)[:40]
        assert reply.finished.usage is not None
        assert reply.finished.usage.completion == sum(delta.count for delta in reply.deltas)


@pytest.mark.parametrize("constraint", [OneOf(("yes", "no")), None])
async def test_logprobs_of_constrained_reply_are_reported_as_ignored(
    engine: WorkerEngine, constraint: OneOf | None
) -> None:
    asked = Asked(Feature.LOGPROBS, "top_logprobs"), Asked(Feature.LOGPROBS, "best_of")
    reply = await collect(engine, chat("yes", constraint=constraint, logprobs=Logprobs(2), asked=asked))
    assert reply.started.ignored == (() if constraint is None else ("top_logprobs",))
    assert len(reply.logprobs[0].top) == 2


async def test_unenforced_keywords_are_checked_after_the_reply(engine: WorkerEngine) -> None:
    for text, is_valid in (('{"a": 1}', False), ('{"a": 2}', True)):
        reply = await collect(engine, chat(text, constraint=NOT_ONE))
        assert reply.text == text
        assert ("should not be valid" in str(reply.finished.warnings)) is not is_valid
        assert bool(reply.finished.warnings) is not is_valid


@pytest.mark.parametrize(
    "failing",
    [
        chat('{"a": 1}', constraint=NOT_ONE),
        chat("<think>123456 at most 1 times", thinking=Thinking(budget_tokens=3), max_tokens=90),
        chat("at most 0 times"),
    ],
    ids=["check after the reply", "resume", "submit"],
)
async def test_background_failure_fails_only_its_request(failing: GenerationRequest) -> None:
    async with start_engine("tests.engines.vllm_faults:Faulty", format="hermes") as engine:
        beside = asyncio.create_task(collect(engine, chat("count 50")))
        with pytest.raises(EngineFailed):
            await collect(engine, failing)
        assert (await beside).text == numbers(50)
        assert await engine.tokenize("", False) == (0,)


async def test_step_that_cannot_be_processed_fails_all_requests() -> None:
    async with start_engine("tests.engines.vllm_faults:Faulty") as engine:
        readers = (collect(engine, chat(text)) for text in ("count 999", f"ring {BELL}", "count 999"))
        ends = await asyncio.gather(*readers, return_exceptions=True)
        assert {type(end) for end in ends} == {EngineDied}
        assert (await collect(engine, chat("count 3"))).text == numbers(3)


async def start_fails(error: type[Exception], words: str | None = None, **options: Any) -> None:
    async with asyncio.timeout(60):
        with pytest.raises(error, match=words):
            async with start_engine(**options):
                pass


def adapter(folder: Path, rank: int = 8) -> str:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(f'{{"r": {rank}}}')
    (folder / "adapter_model.bin").touch()
    return str(folder)


async def test_adapters_are_listed_as_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    adapter(tmp_path / "poet", 40)
    async with start_engine(adapters={"m-legal": adapter(tmp_path / "legal", 12), "m-poet": "~/poet"}) as engine:
        assert [info.name for info in engine.models()] == ["m", "m-legal", "m-poet"]
        for model, adapter_name in (("m", "None"), ("m-legal", "m-legal"), ("m-poet", "m-poet"), ("", "None")):
            assert (await collect(engine, chat("what adapter", model=model))).text == adapter_name


@pytest.mark.parametrize(
    ("args", "batch_priority"),
    [({}, "0"), ({"scheduling-policy": "priority"}, "1"), ({"scheduling_policy": "fcfs"}, "0")],
)
async def test_batch_requests_have_a_lower_priority(args: dict[str, Any], batch_priority: str) -> None:
    async with start_engine(args=args) as engine:
        assert (await collect(engine, chat("what priority"))).text == "0"
        assert (await collect(engine, chat("what priority", priority="batch"))).text == batch_priority


@pytest.mark.parametrize(
    ("rank", "args", "words"), [(600, {}, "LoRA rank 600"), (8, {"enable_lora": False}, "max_loras exceeded")]
)
async def test_adapter_rejected_by_vllm_is_named(tmp_path: Path, rank: int, args: dict[str, Any], words: str) -> None:
    adapters = {"x": adapter(tmp_path / "x", rank)}
    await start_fails(ConfigError, f"adapter x cannot be loaded: .*{words}", adapters=adapters, args=args)


@pytest.mark.parametrize(("name", "error"), [("large", ModelFailed), ("odd", ConfigError)])
async def test_out_of_memory_for_adapter_is_no_config_error(tmp_path: Path, name: str, error: type[Exception]) -> None:
    await start_fails(error, adapters={name: adapter(tmp_path / "x")})


@pytest.mark.parametrize("dies_in", ["tasks", "loras", "settings"])
async def test_engine_process_death_during_start_fails_the_start(tmp_path: Path, dies_in: str) -> None:
    await start_fails(ModelFailed, adapters={"x": adapter(tmp_path / "x")}, args={"dies_in": dies_in})


@pytest.mark.parametrize("isolate", [True, False])
async def test_prefix_cache_isolation_between_principals(isolate: bool) -> None:
    async with start_engine(isolate=isolate) as engine:

        async def cached(principal: str) -> int:
            return (await collect(engine, chat("the same " * 9, principal=principal))).started.cached_tokens

        assert await cached("one") == 0
        assert await cached("one") > 0
        assert (await cached("other") > 0) is not isolate
        assert await cached("other") > 0
        assert await cached("one") > 0


async def test_pooling_model_embeds() -> None:
    async with start_engine(args={"runner": "pooling"}) as engine:
        assert engine.supports() == {"embeddings", "tokenize", "add_special", "token_texts"}
        first, same, other = await engine.embed(["abba", "abba", (100, 101)])
        assert first.cosine_similarity(same) == pytest.approx(1)
        assert first.cosine_similarity(other) < 0.99
        assert (first.tokens, other.tokens) == (4, 2)
        with pytest.raises(ContextTooLong):
            await engine.embed(["a" * 5000])
        with pytest.raises(BadRequest):
            await engine.embed([(10**6,)])
        with pytest.raises(NotSupported):
            await collect(engine, chat("hello"))
        # An embedding that contains NaN fails only its own request.
        batches = [["abba"], ["x", "not a number", "y"], ["not a number"], ["abba"]]
        results = await asyncio.gather(*(engine.embed(texts) for texts in batches), return_exceptions=True)
        assert [type(result) for result in results] == [tuple, EngineFailed, EngineFailed, tuple]
        assert len(await engine.embed(["abba"])) == 1
        assert_no_request_is_left(engine)


def assert_no_request_is_left(engine: WorkerEngine) -> None:
    assert engine._worker is not None
    assert not engine._worker.unfinished


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"args": {"no_such_argument": 1}}, "vllm: args.no_such_argument: vLLM has no such engine argument"),
        ({"args": {"max_num_sequences": 1}}, "vLLM has no such engine argument; did you mean max_"),
        ({"args": {"max-num-seqs": 0}}, "vllm: some/model: args.max-num-seqs: Input should be greater"),
        ({"path": "broken"}, "no such model"),
        ({"context": 5, "args": {"max_model_len": 6}}, "args.max_model_len: already set by the option context"),
        ({"adapters": {"x": "/nowhere"}}, "adapter x:"),
    ],
)
async def test_config_errors_at_start(options: dict[str, Any], words: str) -> None:
    await start_fails(ConfigError, re.escape(words), **options)


async def test_output_of_processes_that_do_not_start_is_in_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    words = r"vllm: starved: Engine core initialization failed.*the server's log"
    await start_fails(ConfigError, words, path="starved")
    assert "ValueError: No available memory for the cache blocks" in capfd.readouterr().err


async def test_512_concurrent_streams_are_ordered_and_complete() -> None:
    async with start_engine(args={"steps_per_second": 100}) as engine:
        lengths = [20 + at % 40 for at in range(512)]
        replies = await asyncio.gather(*(collect(engine, chat(f"count {length}")) for length in lengths))
        assert [reply.text for reply in replies] == [numbers(length) for length in lengths]
        for reply in replies:
            assert reply.finished.usage is not None
            assert reply.finished.usage.completion == len(reply.text)


async def test_cancelling_streams_leaves_others_intact() -> None:
    """Streams are cancelled while decoding and while queued."""
    async with start_engine(args={"steps_per_second": 100, "max_num_seqs": 384}) as engine:

        async def leave_after(batches: int) -> None:
            async with aclosing(stream_events(engine, chat("count 999", max_tokens=3000))) as stream:
                for _ in range(batches):
                    await anext(stream)

        waiting = [asyncio.create_task(leave_after(10**6)) for _ in range(100)]
        leaving = [asyncio.create_task(leave_after(1 + at % 5)) for at in range(256)]
        replies = await asyncio.gather(*(collect(engine, chat("count 30")) for _ in range(156)))
        await asyncio.gather(*leaving)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert [reply.text for reply in replies] == [numbers(30)] * 156
        # If a cancelled stream still held a slot, this request would wait for half a minute.
        assert (await asyncio.wait_for(collect(engine, chat("count 3")), 20)).text == numbers(3)
        assert engine.kv_used is not None
        assert_no_request_is_left(engine)


async def test_killed_engine_process_fails_requests_and_restarts() -> None:
    async with start_engine(args={"steps_per_second": 100}) as engine:
        readers = [asyncio.create_task(collect(engine, chat("count 999", max_tokens=3000))) for _ in range(256)]
        await asyncio.sleep(1)
        assert not any(reader.done() for reader in readers)
        worker, process = engine.pid, engine_process(engine)
        os.kill(process, signal.SIGKILL)
        ends = await asyncio.gather(*readers, return_exceptions=True)
        assert {type(end) for end in ends} == {EngineDied}
        assert (await collect(engine, chat("count 3"))).text == numbers(3)
        assert engine.pid != worker


@pytest.mark.parametrize("is_killed", [False, True])
async def test_engine_process_ends_with_its_worker(is_killed: bool) -> None:
    async with start_engine() as engine:
        process = engine_process(engine)
        assert engine.pid is not None
        if is_killed:
            os.kill(engine.pid, signal.SIGKILL)
            await wait_until_ended(process)
    await wait_until_ended(process)
