"""The vllm engine in its worker, over a stand-in for vLLM that speaks the same messages per step."""

import asyncio
import itertools
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dragoman.conversation import (
    Asked,
    GenerationRequest,
    JsonSchema,
    Logprobs,
    Message,
    Sampling,
    Text,
    Thinking,
    Tool,
    ToolChoice,
)
from dragoman.engines.run import run
from dragoman.errors import BadRequest, ConfigError, ContextTooLong, EngineDied, EngineFailed, NotSupported
from dragoman.events import Event, Finished, Started, TextDelta, Usage
from dragoman.worker.parent import WorkerEngine

STAND_IN = Path(__file__).parent / "fakevllm"
IM_START, IM_END = 256, 257


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(STAND_IN), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))


@asynccontextmanager
async def engine(args: dict[str, Any] | None = None, **options: Any) -> AsyncIterator[WorkerEngine]:
    given = {"path": "some/model", "args": {"steps_per_second": 500, **(args or {})}, **options}
    made = WorkerEngine("vllm", "m", given)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


def with_engine(test: Callable[[WorkerEngine], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), engine(**options) as made:
            await test(made)

    asyncio.run(main())


def chat(text: str, **fields: Any) -> GenerationRequest:
    return GenerationRequest(id="1", messages=(Message("user", (Text(text),)),), **fields)


NOT_ONE = JsonSchema(
    {"type": "object", "properties": {"a": {"type": "integer", "not": {"const": 1}}}, "required": ["a"]}
)
"""Of which `not` is not enforced."""


async def events(made: WorkerEngine, request: GenerationRequest) -> list[Event]:
    return [event async for batch in run(made, request) for event in batch]


def text_of(said: Sequence[Event]) -> str:
    return "".join(event.text for event in said if isinstance(event, TextDelta))


def numbers(count: int) -> str:
    return " ".join(map(str, range(count)))


def helpers_of(pid: int) -> list[int]:
    """Processes that a process has started, from whichever thread."""
    found = [children.read_text().split() for children in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for child in itertools.chain(*found)]


def engine_process(made: WorkerEngine) -> int:
    assert made.pid is not None
    (found,) = helpers_of(made.pid)
    return found


async def gone(pid: int) -> None:
    async with asyncio.timeout(5):
        while _runs(pid):  # noqa: ASYNC110 (another process ends)
            await asyncio.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


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
    async def main() -> None:
        given = {"path": "some/model", "args": {"steps_per_second": 500}, "format": "hermes"}
        made = WorkerEngine("tests.engines.vllm_faults:Faulty", "m", given)
        await made.start()
        try:
            async with asyncio.timeout(20):
                beside = asyncio.create_task(events(made, chat("count 50")))
                with pytest.raises(EngineFailed):
                    await events(made, request_given)
                assert text_of(await beside) == numbers(50)
                assert await made.tokenize("", False) == (0, 0)
        finally:
            await made.stop()

    asyncio.run(main())


def adapter(folder: Path, rank: int) -> str:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(f'{{"r": {rank}}}')
    return str(folder)


def test_adapters_are_models_of_their_own(tmp_path: Path) -> None:
    async def test(made: WorkerEngine) -> None:
        assert [info.name for info in made.models()] == ["m", "m-legal", "m-poet"]
        for model, told in (("m", "None"), ("m-legal", "m-legal"), ("m-poet", "m-poet"), ("", "None")):
            assert text_of(await events(made, chat("what adapter", model=model))) == told

    with_engine(test, adapters={"m-legal": adapter(tmp_path / "legal", 12), "m-poet": adapter(tmp_path / "poet", 40)})


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
        ({"args": {"no_such_argument": 1}}, "no_such_argument"),
        ({"path": "broken"}, "no such model"),
        ({"context": 5, "args": {"max_model_len": 6}}, "give it once"),
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


def test_512_streams_at_100_steps_a_second_are_in_order_and_complete() -> None:
    async def test(made: WorkerEngine) -> None:
        lengths = [20 + at % 40 for at in range(512)]
        begun = time.monotonic()
        said = await asyncio.gather(*(events(made, chat(f"count {length}")) for length in lengths))
        assert [text_of(each) for each in said] == [numbers(length) for length in lengths]
        for each in said:
            assert isinstance(each[-1], Finished)
            assert each[-1].usage is not None
            assert each[-1].usage.completion == len(text_of(each))
        # The longest has 169 tokens: nobody was held up by the others.
        assert time.monotonic() - begun < 30

    with_engine(test, args={"steps_per_second": 100})


def test_each_of_512_streams_can_be_left() -> None:
    """In decode and in the queue alike; those who stay get all of theirs."""

    async def test(made: WorkerEngine) -> None:
        async def leave_after(batches: int) -> None:
            async with aclosing(run(made, chat("count 999", max_tokens=3000))) as stream:
                for _ in range(batches):
                    await anext(stream)

        waiting = [asyncio.create_task(leave_after(10**6)) for _ in range(100)]
        leaving = [leave_after(1 + at % 5) for at in range(256)]
        staying = [events(made, chat("count 30")) for _ in range(156)]
        said = await asyncio.gather(*leaving, *staying)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert [text_of(each) for each in said[256:] if each is not None] == [numbers(30)] * 156
        # All of them are gone, or this one would wait for a place.
        assert text_of(await asyncio.wait_for(events(made, chat("count 3")), 3)) == numbers(3)
        assert made.kv_used is not None
        assert made._child is not None
        assert not made._child.streams

    with_engine(test, args={"steps_per_second": 100, "max_num_seqs": 384})


def test_a_killed_engine_process_is_told_at_once_and_comes_back_by_itself() -> None:
    async def test(made: WorkerEngine) -> None:
        readers = [asyncio.create_task(events(made, chat("count 999", max_tokens=3000))) for _ in range(256)]
        await asyncio.sleep(1)
        assert not any(reader.done() for reader in readers)
        worker, process = made.pid, engine_process(made)
        os.kill(process, signal.SIGKILL)
        begun = time.monotonic()
        ends = await asyncio.gather(*readers, return_exceptions=True)
        assert time.monotonic() - begun < 2
        assert {type(end) for end in ends} == {EngineDied}
        assert text_of(await events(made, chat("count 3"))) == numbers(3)
        assert made.pid != worker

    with_engine(test, args={"steps_per_second": 100})


def test_the_engine_process_ends_with_the_worker_however_that_ends() -> None:
    async def main() -> None:
        async with engine() as made:
            stopped = engine_process(made)
        await gone(stopped)
        async with engine() as made:
            assert made.pid is not None
            orphan = engine_process(made)
            os.kill(made.pid, signal.SIGKILL)
            await gone(orphan)

    asyncio.run(main())
