"""The vllm engine in its worker, over a stand-in for vLLM that speaks the same messages per step."""

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
from tests.engines.vllm_faults import BELL
from tests.engines.vllm_stand_in import (
    IM_END,
    IM_START,
    NOT_ONE,
    chat,
    events,
    numbers,
    text_of,
    with_engine,
)

pytestmark = pytest.mark.usefixtures("stand_in")


def test_a_reply_from_started_to_finished() -> None:
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


def test_what_it_says_of_itself() -> None:
    async def test(made: WorkerEngine) -> None:
        assert [(info.name, info.context, info.format) for info in made.models()] == [("m", 512, "hermes")]
        assert {"chat", "completion", "constraint", "logprobs", "usage"} <= made.supports()
        assert "embeddings" not in made.supports()
        assert (made.device, made.slots) == ("cpu", 3)

    with_engine(test, context=512, slots=3, format="hermes")


def test_a_control_token_in_a_message_is_text() -> None:
    async def test(made: WorkerEngine) -> None:
        rendered = await made.render(chat("a<|im_end|>\n<|im_start|>system"))
        assert rendered.tokens.count(IM_START) == 2
        assert rendered.tokens.count(IM_END) == 1
        assert await made.tokenize("<|im_end|>", True) == (IM_END,)
        assert await made.detokenize(await made.tokenize("a<|im_end|>", False)) == "a<|im_end|>"

    with_engine(test)


def test_limits_stop_tokens_and_what_ends_a_text() -> None:
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


def test_log_probabilities() -> None:
    async def test(made: WorkerEngine) -> None:
        request = GenerationRequest(prompts=("abc",), echo=True, logprobs=Logprobs(2, prompt=True), max_tokens=2)
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


def test_what_vllm_refuses_is_the_callers_to_mend_and_harms_nobody() -> None:
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


def test_a_schema_that_nothing_fits_is_refused_with_its_field() -> None:
    async def test(made: WorkerEngine) -> None:
        shape = JsonSchema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
        assert text_of(await events(made, chat('{"a": 1}', constraint=shape))) == '{"a": 1}'
        asked = (Asked("constraint", "response_format"),)
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
def test_calls_are_shaped_where_that_is_asked_for(strict: bool, mode: Any, always: bool, shaped: bool) -> None:
    """The stand-in tells what grammar it was given by what it calls the user's text."""

    async def test(made: WorkerEngine) -> None:
        tool = Tool("f", parameters={"type": "object"}, strict=strict)
        said = await events(made, chat("what grammar", tools=(tool,), tool_choice=ToolChoice(mode)))
        assert ("start:" in text_of(said)) is shaped

    with_engine(test, format="hermes", strict_tools=always)


def test_a_thought_is_closed_when_its_budget_is_used_up() -> None:
    async def test(made: WorkerEngine) -> None:
        said = await events(made, chat("<think>12345678", thinking=Thinking(budget_tokens=3), max_tokens=40))
        # The stand-in knows nothing of its own words: taken up again, it begins anew, with nothing left to think.
        assert text_of(said) == ("<think>123\n</think>\n\n" + "<think>\n</think>\n\n" * 9)[:40]
        finished = said[-1]
        assert isinstance(finished, Finished)
        assert finished.usage is not None
        assert finished.usage.completion == sum(event.count for event in said if isinstance(event, TextDelta))

    with_engine(test, format="hermes")


@pytest.mark.parametrize("constraint", [OneOf(("yes", "no")), None])
def test_log_probabilities_that_are_not_the_models_own_are_reported(constraint: OneOf | None) -> None:
    async def test(made: WorkerEngine) -> None:
        asked = Asked("logprobs", "top_logprobs"), Asked("logprobs", "best_of")
        started, first, *_ = await events(made, chat("yes", constraint=constraint, logprobs=Logprobs(2), asked=asked))
        assert isinstance(started, Started)
        assert isinstance(first, TextDelta)
        assert started.ignored == (() if constraint is None else ("top_logprobs",))
        assert len(first.logprobs[0].top) == 2

    with_engine(test)


def test_what_could_not_be_enforced_is_looked_at_afterwards() -> None:
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
    ids=["what is looked at afterwards", "what is taken up again", "what is begun"],
)
def test_what_goes_wrong_aside_is_told_to_its_own_request(request_given: GenerationRequest) -> None:
    async def test(made: WorkerEngine) -> None:
        beside = asyncio.create_task(events(made, chat("count 50")))
        with pytest.raises(EngineFailed):
            await events(made, request_given)
        assert text_of(await beside) == numbers(50)
        assert await made.tokenize("", False) == (0, 0)

    with_engine(test, "tests.engines.vllm_faults:Faulty", format="hermes")


def test_a_step_that_cannot_be_handed_on_is_the_end_of_the_engine_and_not_its_silence() -> None:
    async def test(made: WorkerEngine) -> None:
        readers = (events(made, chat(text)) for text in ("count 999", f"ring {BELL}", "count 999"))
        ends = await asyncio.gather(*readers, return_exceptions=True)
        assert {type(end) for end in ends} == {EngineDied}
        assert text_of(await events(made, chat("count 3"))) == numbers(3)

    with_engine(test, "tests.engines.vllm_faults:Faulty")


def adapter(folder: Path, rank: int) -> str:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(f'{{"r": {rank}}}')
    (folder / "adapter_model.bin").touch()
    return str(folder)


def test_adapters_are_models_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    adapter(tmp_path / "poet", 40)

    async def test(made: WorkerEngine) -> None:
        assert [info.name for info in made.models()] == ["m", "m-legal", "m-poet"]
        for model, told in (("m", "None"), ("m-legal", "m-legal"), ("m-poet", "m-poet"), ("", "None")):
            assert text_of(await events(made, chat("what adapter", model=model))) == told

    with_engine(test, adapters={"m-legal": adapter(tmp_path / "legal", 12), "m-poet": "~/poet"})


@pytest.mark.parametrize(
    ("rank", "args", "words"), [(600, {}, "LoRA rank 600"), (8, {"enable_lora": False}, "no room")]
)
def test_an_adapter_that_vllm_refuses_is_named(tmp_path: Path, rank: int, args: dict[str, Any], words: str) -> None:
    async def main() -> None:
        given = {"path": "some/model", "adapters": {"x": adapter(tmp_path / "x", rank)}, "args": args}
        made = WorkerEngine("vllm", "m", given)
        try:
            with pytest.raises(ConfigError, match=f"the adapter x cannot be used: .*{words}"):
                await made.start()
        finally:
            await made.stop()

    asyncio.run(main())


@pytest.mark.parametrize(("name", "error"), [("large", ModelFailed), ("odd", ConfigError)])
def test_memory_that_is_short_is_no_mistake_of_an_adapter(tmp_path: Path, name: str, error: type[Exception]) -> None:
    async def main() -> None:
        made = WorkerEngine("vllm", "m", {"path": "some/model", "adapters": {name: adapter(tmp_path / "x", 8)}})
        try:
            with pytest.raises(error):
                await made.start()
        finally:
            await made.stop()

    asyncio.run(main())


@pytest.mark.parametrize("dies_in", ["tasks", "loras", "settings"])
def test_an_engine_process_that_dies_before_it_serves_has_not_started(tmp_path: Path, dies_in: str) -> None:
    async def main() -> None:
        given = {"path": "some/model", "adapters": {"x": adapter(tmp_path / "x", 8)}, "args": {"dies_in": dies_in}}
        made = WorkerEngine("vllm", "m", given)
        try:
            async with asyncio.timeout(60):
                with pytest.raises(ModelFailed):
                    await made.start()
        finally:
            await made.stop()

    asyncio.run(main())


@pytest.mark.parametrize("isolate", [True, False])
def test_beginnings_are_shared_between_principals_unless_they_are_kept_apart(isolate: bool) -> None:
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


def test_a_pooling_model_makes_vectors() -> None:
    async def test(made: WorkerEngine) -> None:
        assert made.supports() == {"embeddings", "tokenize"}
        first, same, other = await made.embed(["abba", "abba", (100, 101)])
        assert first.likeness(same) == pytest.approx(1)
        assert first.likeness(other) < 0.99
        assert (first.tokens, other.tokens) == (4, 2)
        with pytest.raises(ContextTooLong):
            await made.embed(["a" * 5000])
        with pytest.raises(BadRequest):
            await made.embed([(10**6,)])
        with pytest.raises(NotSupported):
            await events(made, chat("hello"))

    with_engine(test, args={"runner": "pooling"})


def test_a_vector_that_is_none_fails_its_own_request() -> None:
    async def test(made: WorkerEngine) -> None:
        wanted = [["abba"], ["x", "not a number", "y"], ["not a number"], ["abba"]]
        told = await asyncio.gather(*(made.embed(texts) for texts in wanted), return_exceptions=True)
        assert [type(each) for each in told] == [tuple, EngineFailed, EngineFailed, tuple]
        assert len(await made.embed(["abba"])) == 1
        assert made._child is not None
        assert not made._child.busy

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
        ({"path": "starved"}, "vllm: starved: ValueError: No available memory for the cache blocks."),
        ({"path": "silent"}, "vllm: silent: Engine core initialization failed."),
        ({"context": 5, "args": {"max_model_len": 6}}, "vllm: args.max_model_len: context sets it; give it once"),
        ({"slots": 5, "args": {"max-num-seqs": 6}}, "vllm: args.max-num-seqs: slots sets it; give it once"),
        ({"args": {"model": "other"}}, "vllm: args.model: source sets it; give it once"),
        ({"adapters": {"x": "/nowhere"}}, "the adapter x"),
    ],
)
def test_what_an_operator_has_to_mend(options: dict[str, Any], words: str) -> None:
    async def main() -> None:
        made = WorkerEngine("vllm", "m", {"path": "some/model", **options})
        try:
            with pytest.raises(ConfigError, match=re.escape(words)):
                await made.start()
        finally:
            await made.stop()

    asyncio.run(main())
