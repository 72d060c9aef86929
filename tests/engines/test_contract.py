"""What every engine keeps to, ours and yours, here and in a worker: one suite over all of them."""

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from dragoman.client.planner import ProtocolName
from dragoman.core.engine import Engine, ModelInfo, Output
from dragoman.core.errors import BadRequest, ContextTooLong, DragomanError, EngineFailed, NotSupported
from dragoman.core.events import Event, Finished, Started, TextDelta, Usage
from dragoman.core.reply import Choice
from dragoman.core.request import GenerationRequest, Message, Sampling, Text
from dragoman.engines.scripted import ScriptedEngine, ScriptedOptions
from dragoman.engines.upstream.engine import UpstreamEngine
from dragoman.engines.upstream.options import UpstreamOptions
from dragoman.ipc.worker_engine import WorkerEngine, options_of
from dragoman.pipeline.event_stream import call, run
from tests.engines.vllm_model import CPU_ARGS, WITH_VLLM, smollm2_folder
from tests.pipeline.test_generate import whole
from tests.support.serving import serving

FEATURES = {
    *("chat", "completion", "token_prompt", "tokenize", "render", "count_tokens", "embeddings", "infill"),
    *("token_ids", "logprobs", "prompt_logprobs", "images", "tools", "strict_tools", "constraint", "thinking"),
    *("template_options", "documents", "service_tier"),
    *("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "stop_token_ids", "ignore_eos", "max_tokens", "usage"),
}
CONTEXT = 256
SLOTS = 2
LONG = "Write a very long story about a cat who goes to sea. " * 2
OVERLONG = "word " * 1500


class Slow(Engine):
    """An engine of somebody's own, with what the suite wants to know of it."""

    def __init__(self) -> None:
        self.live = 0

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Output]:
        self.live += 1
        try:
            for word in words(request):
                yield word
                await asyncio.sleep(0.001)
        finally:
            self.live -= 1


class Plain(Engine):
    """The same without async."""

    def __init__(self) -> None:
        self.live = 0

    def generate(self, request: GenerationRequest) -> Iterator[Output]:
        self.live += 1
        try:
            yield from words(request)
        finally:
            self.live -= 1


def words(request: GenerationRequest) -> Iterator[str]:
    """The last message in capitals, again and again where it asks for something long."""
    text = request.last_user_text
    if text == OVERLONG:
        yield "so "
        raise RuntimeError("too much")
    said = [f"{word} " for word in text.upper().split()]
    yield from said * (100_000 if text == LONG else 1)


class Subject:
    """An engine that has been started, the loop it lives in, and the error it has for a prompt beyond its means."""

    def __init__(self, engine: Engine, runner: asyncio.Runner, error: type[DragomanError]) -> None:
        self.engine = engine
        self.runner = runner
        self.error = error

    def run(self, test: Callable[[Engine], Awaitable[None]]) -> None:
        async def limited() -> None:
            async with asyncio.timeout(60):
                await test(self.engine)

        self.runner.run(limited())

    def working(self) -> int:
        """Generations that still cost something, as far as can be seen from here."""
        if isinstance(self.engine, WorkerEngine):
            assert self.engine._child is not None
            return len(self.engine._child.streams)
        if isinstance(self.engine, UpstreamEngine):
            return self.engine.states()[0].running
        return self.engine.live if isinstance(self.engine, Slow | Plain) else 0


def scripted(path: Path) -> Engine:
    return ScriptedEngine("scripted", ScriptedOptions(context=CONTEXT))


def scripted_in_a_worker(path: Path) -> Engine:
    return WorkerEngine("scripted", "scripted", options_of(ScriptedOptions(context=CONTEXT, tokens_per_second=100)))


def llama_in_a_worker(path: Path) -> Engine:
    options = {"path": str(path), "context": CONTEXT, "slots": SLOTS, "layout": "as-is"}
    return WorkerEngine("llama", "smollm2", options)


@contextmanager
def upstream(protocol: ProtocolName) -> Iterator[Engine]:
    """The scripted engine of another server, in a process of its own."""
    script = {"engine": "scripted", "context": CONTEXT, "tokens_per_second": 100}
    with TemporaryDirectory() as folder, serving(Path(folder), {"models": {"scripted": script}}) as below:
        yield UpstreamEngine("scripted", UpstreamOptions(url=below.url, protocol=protocol))


def vllm_in_a_worker(path: Path) -> Engine:
    folder = smollm2_folder(path)
    return WorkerEngine("vllm", "smollm2", {"path": str(folder), "context": CONTEXT, "slots": SLOTS, "args": CPU_ARGS})


Make = Callable[[Path], AbstractContextManager[Engine]]
SUBJECTS: dict[str, tuple[Make, type[DragomanError]]] = {
    "scripted": (lambda path: nullcontext(scripted(path)), ContextTooLong),
    "scripted in a worker": (lambda path: nullcontext(scripted_in_a_worker(path)), ContextTooLong),
    "llama in a worker": (lambda path: nullcontext(llama_in_a_worker(path)), ContextTooLong),
    **({"vllm in a worker": (lambda path: nullcontext(vllm_in_a_worker(path)), ContextTooLong)} if WITH_VLLM else {}),
    "upstream, chat": (lambda path: upstream("chat"), ContextTooLong),
    "upstream, messages": (lambda path: upstream("messages"), ContextTooLong),
    "upstream, responses": (lambda path: upstream("responses"), ContextTooLong),
    "somebody's async engine": (lambda path: nullcontext(Slow()), EngineFailed),
    "somebody's plain engine": (lambda path: nullcontext(Plain()), EngineFailed),
}


@pytest.fixture(scope="module", params=SUBJECTS)
def subject(request: pytest.FixtureRequest, smollm2_path: Path) -> Iterator[Subject]:
    make, error = SUBJECTS[request.param]
    with asyncio.Runner() as runner, make(smollm2_path) as engine:
        runner.run(engine.start())
        yield Subject(engine, runner, error)
        runner.run(engine.stop())


def ask(text: str, **fields: Any) -> GenerationRequest:
    return GenerationRequest(
        **{
            "id": "1",
            "messages": (Message("user", (Text(text),)),),
            "sampling": Sampling(temperature=0),
            "max_tokens": 12,
            **fields,
        }
    )


async def events(engine: Engine, request: GenerationRequest) -> list[Event]:
    return [event for batch in [batch async for batch in run(engine, request)] for event in batch]


async def choice(engine: Engine, request: GenerationRequest) -> Choice:
    return (await whole(engine, request)).choices[0]


def deltas(said: Sequence[Event]) -> list[TextDelta]:
    return [event for event in said if isinstance(event, TextDelta)]


def test_a_stream_begins_with_started_and_ends_with_the_only_finished(subject: Subject) -> None:
    async def test(engine: Engine) -> None:
        stream = run(engine, ask("Say hello to the world."))
        batches = [batch async for batch in stream]
        assert all(batches)
        said = [event for batch in batches for event in batch]
        assert [type(event) for event in said] == [Started, *[TextDelta] * (len(said) - 2), Finished]
        assert "".join(delta.text for delta in deltas(said)).strip()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    subject.run(test)


def test_an_empty_message_is_answered(subject: Subject) -> None:
    async def test(engine: Engine) -> None:
        said = await events(engine, ask(""))
        assert isinstance(said[0], Started)
        assert [event for event in said if isinstance(event, Finished)] == said[-1:]

    subject.run(test)


def test_counts_are_the_sum_of_the_deltas(subject: Subject) -> None:
    async def test(engine: Engine) -> None:
        said = await events(engine, ask("Say hello to the world."))
        started, finished = said[0], said[-1]
        assert isinstance(started, Started)
        assert isinstance(finished, Finished)
        counted = Usage(started.prompt_tokens, sum(delta.count for delta in deltas(said)), started.cached_tokens)
        if isinstance(engine, UpstreamEngine):
            # Only the server over there knows, and says so at the end.
            assert counted == Usage()
            counted = Usage(prompt=6, completion=6)
        assert finished.usage == (counted if "usage" in engine.supports() else None)
        assert (await choice(engine, ask("Say hello to the world."))).usage == counted

    subject.run(test)


@pytest.mark.parametrize("limit", [1, 5])
def test_no_more_than_max_tokens(subject: Subject, limit: int) -> None:
    async def test(engine: Engine) -> None:
        request = ask(LONG, max_tokens=limit)
        reply = await choice(engine, request)
        assert (reply.usage.completion, reply.reason) == (limit, "length")
        if "max_tokens" in engine.supports():
            said = await events(engine, request)
            assert sum(delta.count for delta in deltas(said)) == (0 if isinstance(engine, UpstreamEngine) else limit)
            assert "".join(delta.text for delta in deltas(said)) == reply.text

    subject.run(test)


def test_the_context_is_the_end(subject: Subject) -> None:
    async def test(engine: Engine) -> None:
        (info,) = engine.models()
        if info.context is None:
            return
        reply = await choice(engine, ask("a" * 4 * 250 if info.name == "scripted" else "Count. " * 100, max_tokens=999))
        assert reply.reason == "length"
        assert reply.usage.prompt + reply.usage.completion == info.context

    subject.run(test)


def test_two_at_once_do_not_mix(subject: Subject) -> None:
    async def test(engine: Engine) -> None:
        requests = [ask("What is the capital of France? Answer in one word."), ask("What is 2+2?")]
        alone = [(await choice(engine, request)).text for request in requests]
        together = await asyncio.gather(*(choice(engine, request) for request in requests * 3))
        assert [reply.text for reply in together] == alone * 3
        assert alone[0] != alone[1]

    subject.run(test)


def test_closing_early_frees(subject: Subject) -> None:
    """More long requests are closed than there are slots, then a short one has its turn at once."""

    async def test(engine: Engine) -> None:
        for _ in range(2):
            streams = [run(engine, ask(LONG, max_tokens=None)) for _ in range(SLOTS)]
            for stream in streams:
                await anext(stream)
            assert isinstance(engine, ScriptedEngine) or subject.working() == SLOTS
            for stream in streams:
                await stream.aclose()
        async with asyncio.timeout(60):
            await choice(engine, ask("Say hello.", max_tokens=1))
            while subject.working():  # noqa: ASYNC110 (it ends in another thread or process)
                await asyncio.sleep(0.01)

    subject.run(test)


def test_cancelling_the_reader_frees(subject: Subject) -> None:
    async def test(engine: Engine) -> None:
        async def read() -> None:
            async with aclosing(run(engine, ask(LONG, max_tokens=None))) as stream:
                async for _ in stream:
                    pass
            await asyncio.Event().wait()  # an engine that cannot be hurried may be through already

        readers = [asyncio.create_task(read()) for _ in range(SLOTS + 2)]
        await asyncio.sleep(0.05)
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        async with asyncio.timeout(60):
            await choice(engine, ask("Say hello.", max_tokens=1))
            while subject.working():  # noqa: ASYNC110 (it ends in another thread or process)
                await asyncio.sleep(0.01)

    subject.run(test)


def test_an_error_is_one_of_ours_and_the_engine_goes_on(subject: Subject) -> None:
    async def test(engine: Engine) -> None:
        for _ in range(SLOTS + 1):
            with pytest.raises(DragomanError) as raised:
                await events(engine, ask(OVERLONG))
            assert type(raised.value) is subject.error
            assert raised.value.message
            assert "too much" not in raised.value.message
        assert (await choice(engine, ask("Say hello."))).text

    subject.run(test)


def devices(engine: Engine) -> set[str]:
    """Those on which it may run here."""
    if isinstance(engine, UpstreamEngine):
        return {"elsewhere"}
    is_vllm = isinstance(engine, WorkerEngine) and engine._start.engine == "vllm"
    return {"cpu", "cuda"} if is_vllm else {"cpu"}


def test_what_it_says_of_itself(subject: Subject) -> None:
    (info,) = subject.engine.models()
    assert isinstance(info, ModelInfo)
    assert info.name
    assert info.owner
    assert info.context in (None, CONTEXT)
    assert {"chat", "completion"} <= subject.engine.supports() <= FEATURES
    assert subject.engine.slots in (None, SLOTS)
    assert subject.engine.device in devices(subject.engine)


def test_tokens_are_told_where_that_is_declared(subject: Subject) -> None:
    async def test(engine: Engine) -> None:
        text = "Grüße, 世界 😀\n <|im_end|>"
        if "tokenize" not in engine.supports():
            with pytest.raises(NotSupported):
                await call(engine.tokenize, text, False)
            return
        tokens: Sequence[int] = await call(engine.tokenize, text, False)
        assert await call(engine.detokenize, tokens) == text
        assert len(await call(engine.tokenize, text, True)) < len(tokens)
        with pytest.raises(BadRequest):
            await call(engine.detokenize, [2**31 - 1])

    subject.run(test)


def test_vectors_are_made_where_that_is_declared(subject: Subject) -> None:
    async def test(engine: Engine) -> None:
        if "embeddings" not in engine.supports():
            with pytest.raises(NotSupported):
                await call(engine.embed, ["a"])
            return
        inputs = ["The cat sleeps.", (7, 8, 9), "The cat sleeps.", "Taxes rise."]
        first, ids, second, other = await call(engine.embed, inputs)
        assert first.dimensions == ids.dimensions == other.dimensions > 8
        assert all(math.hypot(*made.values) == pytest.approx(1, abs=1e-5) for made in (first, ids, other))
        assert first.likeness(second) == pytest.approx(1, abs=1e-3)
        # Servers tell those of all inputs together.
        assert (first.tokens if isinstance(engine, UpstreamEngine) else ids.tokens) >= 3
        assert first.likeness(other) < 0.99
        with pytest.raises(ContextTooLong):
            await call(engine.embed, ["fine", OVERLONG])
        assert len(await call(engine.embed, ["fine"])) == 1

    subject.run(test)


class Talkative(Engine):
    """Has more to say after the end."""

    def generate(self, request: GenerationRequest) -> Iterator[Output]:
        yield [Started(3), TextDelta("one ")]
        yield [TextDelta("two"), Finished("length"), TextDelta("three")]
        yield Finished()
        yield "four"


class TalkativeAsync(Talkative):
    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Output, None]:  # type: ignore[override]
        for output in super().generate(request):
            yield output


@pytest.mark.parametrize("engine", [Talkative(), TalkativeAsync()], ids=["plain", "async"])
def test_nothing_follows_the_end_whatever_an_engine_yields(engine: Engine) -> None:
    said = asyncio.run(events(engine, ask("x")))
    assert said == [Started(3), TextDelta("one "), TextDelta("two"), Finished("length")]
