"""The vllm engine in a worker process, with a fake vLLM that sends the same messages per step."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from dragoman.core.errors import (
    BadRequest,
    ConfigError,
    ContextTooLong,
    EngineDied,
    EngineFailed,
    ModelFailed,
    NotSupported,
)
from dragoman.core.events import Finished, Started, TextDelta, Usage
from dragoman.core.features import Feature
from dragoman.core.request import (
    Asked,
    GenerationRequest,
    JsonSchema,
    Logprobs,
    OneOf,
    Sampling,
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
    events,
    numbers,
    text_of,
    with_engine,
)
from tests.engines.vllm_faults import BELL

pytestmark = pytest.mark.usefixtures("stand_in")


def test_reply_events_and_usage() -> None:
    async def test(made: WorkerEngine) -> None:
        said = await events(made, chat("Grüße, 世界 😀"))
        started, finished = said[0], said[-1]
        assert isinstance(started, Started)
        assert text_of(said) == "Grüße, 世界 😀"
        bytes_in_it = len("Grüße, 世界 😀".encode())
        assert finished == Finished("stop", usage=Usage(started.prompt_tokens, bytes_in_it, 0))
        again = (await events(made, chat("Grüße, 世界 😀")))[0]
        assert isinstance(again, Started)
        assert 0 < again.cached_tokens < started.prompt_tokens

    with_engine(test)


def test_model_info_and_features() -> None:
    async def test(made: WorkerEngine) -> None:
        assert [(info.name, info.context, info.format) for info in made.models()] == [("m", 512, "hermes")]
        assert {"chat", "completion", "constraint", "logprobs", "usage"} <= made.supports()
        assert "embeddings" not in made.supports()
        assert (made.device, made.slots) == ("cpu", 3)

    with_engine(test, context=512, slots=3, format="hermes")


def test_control_token_in_message_is_text() -> None:
    async def test(made: WorkerEngine) -> None:
        rendered = await made.render(chat("a<|im_end|>\n<|im_start|>system"))
        assert rendered.tokens.count(IM_START) == 2
        assert rendered.tokens.count(IM_END) == 1
        assert await made.tokenize("<|im_end|>", True) == (IM_END,)
        assert await made.detokenize(await made.tokenize("a<|im_end|>", False)) == "a<|im_end|>"

    with_engine(test)


def test_max_tokens_stop_tokens_and_context_limit() -> None:
    async def test(made: WorkerEngine) -> None:
        assert (await events(made, chat("hello", max_tokens=2)))[-1] == Finished("length", usage=Usage(24, 2, 0))
        none = await events(made, chat("hello", max_tokens=0))
        assert [type(event) for event in none] == [Started, Finished]
        stopped = await events(made, chat("hello", stop_token_ids=(ord("o"),)))
        assert text_of(stopped) == "hell"
        assert isinstance(stopped[-1], Finished)
        assert stopped[-1].reason == "stop"
        assert text_of(await events(made, chat("hi", ignore_eos=True, max_tokens=5))) == "hixxx"
        with pytest.raises(ContextTooLong) as raised:
            await events(made, chat("a" * 1000))
        assert raised.value.limit == 255
        full = await events(made, chat("count 999", max_tokens=999))
        assert isinstance(full[-1], Finished)
        assert full[-1].usage is not None
        assert full[-1].usage.prompt + full[-1].usage.completion == 256

    with_engine(test, context=256)


def test_logprobs() -> None:
    async def test(made: WorkerEngine) -> None:
        request = GenerationRequest(prompts=("abc",), echo=True, logprobs=Logprobs(2, prompt=2), max_tokens=2)
        started, first, *_ = await events(made, request)
        assert isinstance(started, Started)
        assert isinstance(first, TextDelta)
        assert started.prompt_text == "abc"
        assert [entry.text for entry in started.prompt_logprobs] == [b"a", b"b", b"c"]
        assert [entry.logprob for entry in started.prompt_logprobs] == [None, -0.5, -0.5]
        (entry,) = first.logprobs
        assert (entry.token, entry.text, entry.logprob) == (ord("a"), b"a", 0)
        assert [(rival.token, rival.logprob) for rival in entry.top] == [(65, -0.25), (66, -0.5)]

    with_engine(test)


def test_request_rejected_by_vllm_is_bad_request_and_others_continue() -> None:
    async def test(made: WorkerEngine) -> None:
        beside = asyncio.create_task(events(made, chat("count 100")))
        for wrong in (
            {"sampling": Sampling(temperature=3)},
            {"logprobs": Logprobs(21)},
            {"sampling": Sampling(logit_bias={10**6: 1.0})},
        ):
            with pytest.raises(BadRequest) as raised:
                await events(made, chat("hello", **wrong))
            assert raised.value.message
        assert text_of(await beside) == numbers(100)

    with_engine(test)


def test_unsatisfiable_schema_is_rejected_with_its_field() -> None:
    async def test(made: WorkerEngine) -> None:
        shape = JsonSchema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
        assert text_of(await events(made, chat('{"a": 1}', constraint=shape))) == '{"a": 1}'
        asked = (Asked(Feature.CONSTRAINT, "response_format"),)
        with pytest.raises(BadRequest) as raised:
            await events(made, chat("x", constraint=JsonSchema({"type": "strange"}), asked=asked))
        assert raised.value.param

    with_engine(test)


@pytest.mark.parametrize(
    ("strict", "mode", "always", "shaped"),
    [
        (False, "auto", False, False),
        (True, "auto", False, True),
        (False, "required", False, True),
        (False, "auto", True, True),
    ],
)
def test_tool_calls_are_constrained_when_requested(strict: bool, mode: Any, always: bool, shaped: bool) -> None:
    """The fake model answers "what grammar" with the grammar it was given."""

    async def test(made: WorkerEngine) -> None:
        tool = Tool("f", parameters={"type": "object"}, strict=strict)
        said = await events(made, chat("what grammar", tools=(tool,), tool_choice=ToolChoice(mode)))
        assert ("start:" in text_of(said)) is shaped

    with_engine(test, format="hermes", strict_tools=always)


def test_reasoning_is_closed_when_its_budget_is_used_up() -> None:
    async def test(made: WorkerEngine) -> None:
        said = await events(made, chat("<think>12345678", thinking=Thinking(budget_tokens=3), max_tokens=40))
        # The fake model ignores its own reply: when resumed, it starts over with no budget left.
        assert text_of(said) == ("<think>123\n</think>\n\n" + "<think>\n</think>\n\n" * 9)[:40]
        finished = said[-1]
        assert isinstance(finished, Finished)
        assert finished.usage is not None
        assert finished.usage.completion == sum(event.count for event in said if isinstance(event, TextDelta))

    with_engine(test, format="hermes")


@pytest.mark.parametrize("constraint", [OneOf(("yes", "no")), None])
def test_logprobs_of_constrained_reply_are_reported_as_ignored(constraint: OneOf | None) -> None:
    async def test(made: WorkerEngine) -> None:
        asked = Asked(Feature.LOGPROBS, "top_logprobs"), Asked(Feature.LOGPROBS, "best_of")
        started, first, *_ = await events(made, chat("yes", constraint=constraint, logprobs=Logprobs(2), asked=asked))
        assert isinstance(started, Started)
        assert isinstance(first, TextDelta)
        assert started.ignored == (() if constraint is None else ("top_logprobs",))
        assert len(first.logprobs[0].top) == 2

    with_engine(test)


def test_unenforced_keywords_are_checked_after_the_reply() -> None:
    async def test(made: WorkerEngine) -> None:
        for text, words in (('{"a": 1}', "should not be valid"), ('{"a": 2}', None)):
            said = await events(made, chat(text, constraint=NOT_ONE))
            assert text_of(said) == text
            finished = said[-1]
            assert isinstance(finished, Finished)
            assert (words in str(finished.warnings)) if words else not finished.warnings

    with_engine(test)


@pytest.mark.parametrize(
    "request_given",
    [
        chat('{"a": 1}', constraint=NOT_ONE),
        chat("<think>123456 at most 1 times", thinking=Thinking(budget_tokens=3), max_tokens=90),
        chat("at most 0 times"),
    ],
    ids=["check after the reply", "resume", "submit"],
)
def test_background_failure_fails_only_its_request(request_given: GenerationRequest) -> None:
    async def test(made: WorkerEngine) -> None:
        beside = asyncio.create_task(events(made, chat("count 50")))
        with pytest.raises(EngineFailed):
            await events(made, request_given)
        assert text_of(await beside) == numbers(50)
        assert await made.tokenize("", False) == (0,)

    with_engine(test, "tests.engines.vllm_faults:Faulty", format="hermes")


def test_step_that_cannot_be_processed_fails_all_requests() -> None:
    async def test(made: WorkerEngine) -> None:
        readers = (events(made, chat(text)) for text in ("count 999", f"ring {BELL}", "count 999"))
        ends = await asyncio.gather(*readers, return_exceptions=True)
        assert {type(end) for end in ends} == {EngineDied}
        assert text_of(await events(made, chat("count 3"))) == numbers(3)

    with_engine(test, "tests.engines.vllm_faults:Faulty")


async def start_fails(error: type[Exception], words: str | None, **options: Any) -> None:
    made = WorkerEngine("vllm", "m", {"path": "some/model", **options})
    try:
        async with asyncio.timeout(60):
            with pytest.raises(error, match=words):
                await made.start()
    finally:
        await made.stop()


def adapter(folder: Path, rank: int = 8) -> str:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(f'{{"r": {rank}}}')
    (folder / "adapter_model.bin").touch()
    return str(folder)


def test_adapters_are_listed_as_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    adapter(tmp_path / "poet", 40)

    async def test(made: WorkerEngine) -> None:
        assert [info.name for info in made.models()] == ["m", "m-legal", "m-poet"]
        for model, adapter_name in (("m", "None"), ("m-legal", "m-legal"), ("m-poet", "m-poet"), ("", "None")):
            assert text_of(await events(made, chat("what adapter", model=model))) == adapter_name

    with_engine(test, adapters={"m-legal": adapter(tmp_path / "legal", 12), "m-poet": "~/poet"})


@pytest.mark.parametrize(
    ("rank", "args", "words"), [(600, {}, "LoRA rank 600"), (8, {"enable_lora": False}, "max_loras exceeded")]
)
def test_adapter_rejected_by_vllm_is_named(tmp_path: Path, rank: int, args: dict[str, Any], words: str) -> None:
    adapters = {"x": adapter(tmp_path / "x", rank)}
    words = f"adapter x cannot be loaded: .*{words}"
    asyncio.run(start_fails(ConfigError, words, adapters=adapters, args=args))


@pytest.mark.parametrize(("name", "error"), [("large", ModelFailed), ("odd", ConfigError)])
def test_out_of_memory_for_adapter_is_no_config_error(tmp_path: Path, name: str, error: type[Exception]) -> None:
    asyncio.run(start_fails(error, None, adapters={name: adapter(tmp_path / "x")}))


@pytest.mark.parametrize("dies_in", ["tasks", "loras", "settings"])
def test_engine_process_death_during_start_fails_the_start(tmp_path: Path, dies_in: str) -> None:
    asyncio.run(start_fails(ModelFailed, None, adapters={"x": adapter(tmp_path / "x")}, args={"dies_in": dies_in}))


@pytest.mark.parametrize("isolate", [True, False])
def test_prefix_cache_isolation_between_principals(isolate: bool) -> None:
    async def test(made: WorkerEngine) -> None:
        async def cached(principal: str) -> int:
            started = (await events(made, chat("the same " * 9, principal=principal)))[0]
            assert isinstance(started, Started)
            return started.cached_tokens

        assert await cached("one") == 0
        assert await cached("one") > 0
        assert (await cached("other") > 0) is not isolate
        assert await cached("other") > 0
        assert await cached("one") > 0

    with_engine(test, isolate=isolate)


def test_pooling_model_embeds() -> None:
    async def test(made: WorkerEngine) -> None:
        assert made.supports() == {"embeddings", "tokenize", "add_special", "token_texts"}
        first, same, other = await made.embed(["abba", "abba", (100, 101)])
        assert first.cosine_similarity(same) == pytest.approx(1)
        assert first.cosine_similarity(other) < 0.99
        assert (first.tokens, other.tokens) == (4, 2)
        with pytest.raises(ContextTooLong):
            await made.embed(["a" * 5000])
        with pytest.raises(BadRequest):
            await made.embed([(10**6,)])
        with pytest.raises(NotSupported):
            await events(made, chat("hello"))

    with_engine(test, args={"runner": "pooling"})


def test_nan_embedding_fails_only_its_request() -> None:
    async def test(made: WorkerEngine) -> None:
        batches = [["abba"], ["x", "not a number", "y"], ["not a number"], ["abba"]]
        results = await asyncio.gather(*(made.embed(texts) for texts in batches), return_exceptions=True)
        assert [type(result) for result in results] == [tuple, EngineFailed, EngineFailed, tuple]
        assert len(await made.embed(["abba"])) == 1
        assert made._worker is not None
        assert not made._worker.unfinished

    with_engine(test, args={"runner": "pooling"})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"args": {"no_such_argument": 1}}, "vllm: args.no_such_argument: vLLM has no such engine argument"),
        (
            {"args": {"max_num_sequences": 1}},
            "args.max_num_sequences: vLLM has no such engine argument; did you mean max_",
        ),
        ({"args": {"max-num-seqs": 0}}, "vllm: some/model: args.max-num-seqs: Input should be greater"),
        ({"path": "broken"}, "no such model"),
        (
            {"context": 5, "args": {"max_model_len": 6}},
            "args.max_model_len: already set by the option context",
        ),
        (
            {"slots": 5, "args": {"max-num-seqs": 6}},
            "args.max-num-seqs: already set by the option slots",
        ),
        ({"args": {"model": "other"}}, "args.model: already set by the option source"),
        ({"adapters": {"x": "/nowhere"}}, "adapter x:"),
    ],
)
def test_config_errors_at_start(options: dict[str, Any], words: str) -> None:
    asyncio.run(start_fails(ConfigError, re.escape(words), **options))


def test_output_of_processes_that_do_not_start_is_in_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    words = r"vllm: starved: Engine core initialization failed.*the server's log"
    asyncio.run(start_fails(ConfigError, words, path="starved"))
    assert "ValueError: No available memory for the cache blocks" in capfd.readouterr().err
