"""The contract of all engines, in the same process and in a worker process."""

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from dragoman.client.planner import ProtocolName
from dragoman.core.engine import Engine, ModelInfo, Output, call_engine, list_models, stream_events
from dragoman.core.errors import BadRequest, ContextTooLong, DragomanError, EngineFailed, NotSupported
from dragoman.core.events import Finished, Started, TextDelta, Usage
from dragoman.core.features import Feature
from dragoman.core.reply import Choice
from dragoman.core.request import Delivery, GenerationRequest, Message, Sampling, Text
from dragoman.engines.scripted import ScriptedEngine, ScriptedOptions
from dragoman.engines.upstream.engine import UpstreamEngine
from dragoman.engines.upstream.options import UpstreamOptions
from dragoman.ipc.worker_engine import WorkerEngine
from tests.engines.vllm_model import CPU_ARGS, WITH_VLLM, smollm2_folder
from tests.support.generation import collect, whole
from tests.support.server_process import serving

pytestmark = pytest.mark.anyio

CONTEXT = 256
SLOTS = 2
LONG = "Write a very long story about a cat who goes to sea. " * 2
OVERLONG = "word " * 1500
STREAM = Delivery(stream=True)


class CustomAsyncEngine(Engine):
    """A user-defined async engine that counts its running generations."""

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


class CustomEngine(Engine):
    """The same with a plain generator."""

    def __init__(self) -> None:
        self.live = 0

    def generate(self, request: GenerationRequest) -> Iterator[Output]:
        self.live += 1
        try:
            yield from words(request)
        finally:
            self.live -= 1


def words(request: GenerationRequest) -> Iterator[str]:
    """Yield the last message in capitals, repeated for a long reply."""
    text = request.last_user_text
    if text == OVERLONG:
        yield "so "
        raise RuntimeError("too much")
    capitals = [f"{word} " for word in text.upper().split()]
    yield from capitals * (100_000 if text == LONG else 1)


def count_running(engine: Engine) -> int:
    """The number of running generations, as far as it is known."""
    if isinstance(engine, WorkerEngine):
        assert engine._worker is not None
        return len(engine._worker.unfinished)
    if isinstance(engine, UpstreamEngine):
        return engine.states()[0].running
    return engine.live if isinstance(engine, CustomAsyncEngine | CustomEngine) else 0


@contextmanager
def upstream(protocol: ProtocolName) -> Iterator[Engine]:
    """The scripted engine of another server, in another process."""
    script = {"engine": "scripted", "context": CONTEXT, "tokens_per_second": 100}
    with TemporaryDirectory() as folder, serving(Path(folder), {"models": {"scripted": script}}) as below:
        yield UpstreamEngine("scripted", UpstreamOptions(url=below.url, protocol=protocol))


def scripted_in_a_worker() -> Engine:
    return WorkerEngine("scripted", "scripted", {"context": CONTEXT, "tokens_per_second": 100})


def smollm2_in_a_worker(kind: str, path: Path, **options: Any) -> Engine:
    return WorkerEngine(kind, "smollm2", {"path": str(path), "context": CONTEXT, "slots": SLOTS, **options})


ENGINES: dict[str, Callable[[Path], AbstractContextManager[Engine]]] = {
    "scripted": lambda path: nullcontext(ScriptedEngine("scripted", ScriptedOptions(context=CONTEXT))),
    "scripted in a worker": lambda path: nullcontext(scripted_in_a_worker()),
    "llama in a worker": lambda path: nullcontext(smollm2_in_a_worker("llama", path, layout="as-is")),
    "vllm in a worker": lambda path: nullcontext(smollm2_in_a_worker("vllm", smollm2_folder(path), args=CPU_ARGS)),
    "upstream, chat": lambda path: upstream("chat"),
    "upstream, messages": lambda path: upstream("messages"),
    "upstream, responses": lambda path: upstream("responses"),
    "custom async engine": lambda path: nullcontext(CustomAsyncEngine()),
    "custom engine": lambda path: nullcontext(CustomEngine()),
}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", params=[name for name in ENGINES if WITH_VLLM or "vllm" not in name])
async def engine(request: pytest.FixtureRequest, smollm2_path: Path) -> AsyncIterator[Engine]:
    with ENGINES[request.param](smollm2_path) as engine:
        await engine.start()
        yield engine
        await engine.stop()


def ask(text: str, **fields: Any) -> GenerationRequest:
    messages = (Message("user", (Text(text),)),)
    given = {"id": "1", "messages": messages, "sampling": Sampling(temperature=0), "max_tokens": 12, **fields}
    return GenerationRequest(**given)


async def choice(engine: Engine, request: GenerationRequest) -> Choice:
    return (await whole(engine, request)).choices[0]


async def test_stream_begins_with_started_and_ends_with_one_finished(engine: Engine) -> None:
    stream = stream_events(engine, ask("Say hello to the world."))
    batches = [batch async for batch in stream]
    assert all(batches)
    started, *deltas, finished = [event for batch in batches for event in batch]
    assert isinstance(started, Started)
    assert isinstance(finished, Finished)
    assert "".join(delta.text for delta in deltas if isinstance(delta, TextDelta)).strip()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_empty_message(engine: Engine) -> None:
    await collect(engine, ask(""))


async def test_usage_is_the_sum_of_the_deltas(engine: Engine) -> None:
    request = ask("Say hello to the world.")
    reply = await collect(engine, request)
    completion = sum(delta.count for delta in reply.deltas)
    counted = Usage(reply.started.prompt_tokens, completion, reply.started.cached_tokens)
    if isinstance(engine, UpstreamEngine):
        # The server reports usage only at the end.
        assert counted == Usage()
        counted = Usage(prompt=6, completion=6)
    assert reply.finished.usage == (counted if "usage" in engine.supports() else None)
    assert (await choice(engine, request)).usage == counted


@pytest.mark.parametrize("limit", [1, 5])
async def test_max_tokens(engine: Engine, limit: int) -> None:
    request = ask(LONG, max_tokens=limit)
    reply = await choice(engine, request)
    assert (reply.usage.completion, reply.reason) == (limit, "length")
    if "max_tokens" in engine.supports():
        collected = await collect(engine, request)
        counted = sum(delta.count for delta in collected.deltas)
        assert counted == (0 if isinstance(engine, UpstreamEngine) else limit)
        assert collected.text == reply.text


async def test_reply_ends_at_the_context_limit(engine: Engine) -> None:
    (info,) = list_models(engine)
    if info.context is None:
        return
    reply = await choice(engine, ask("a" * 4 * 250 if info.name == "scripted" else "Count. " * 100, max_tokens=999))
    assert reply.reason == "length"
    assert reply.usage.prompt + reply.usage.completion == info.context


async def test_concurrent_replies_do_not_mix(engine: Engine) -> None:
    requests = [ask("What is the capital of France? Answer in one word."), ask("What is 2+2?")]
    alone = [(await choice(engine, request)).text for request in requests]
    together = await asyncio.gather(*(choice(engine, request) for request in requests * 3))
    assert [reply.text for reply in together] == alone * 3
    assert alone[0] != alone[1]


async def test_closing_a_stream_frees_its_slot(engine: Engine) -> None:
    """After closing more long streams than there are slots, a short request is served at once."""
    for _ in range(2):
        streams = [stream_events(engine, ask(LONG, max_tokens=None, delivery=STREAM)) for _ in range(SLOTS)]
        for stream in streams:
            await anext(stream)
        assert isinstance(engine, ScriptedEngine) or count_running(engine) == SLOTS
        for stream in streams:
            await stream.aclose()
        await choice(engine, ask("Say hello.", max_tokens=1))
        # A plain generator ends in its thread, soon after its stream.
        while count_running(engine):  # noqa: ASYNC110 (it changes in another thread or process)
            await asyncio.sleep(0.01)


async def test_cancelling_the_reader_frees_its_slot(engine: Engine) -> None:
    async def read() -> None:
        async with aclosing(stream_events(engine, ask(LONG, max_tokens=None, delivery=STREAM))) as stream:
            async for _ in stream:
                pass
        await asyncio.Event().wait()  # a fast engine may have finished already

    readers = [asyncio.create_task(read()) for _ in range(SLOTS + 2)]
    await asyncio.sleep(0.05)
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    async with asyncio.timeout(60):
        await choice(engine, ask("Say hello.", max_tokens=1))
        while count_running(engine):  # noqa: ASYNC110 (it changes in another thread or process)
            await asyncio.sleep(0.01)


async def test_errors_are_dragoman_errors_and_the_engine_continues(engine: Engine) -> None:
    for _ in range(SLOTS + 1):
        with pytest.raises(DragomanError) as raised:
            await collect(engine, ask(OVERLONG))
        is_custom = isinstance(engine, CustomAsyncEngine | CustomEngine)
        assert type(raised.value) is (EngineFailed if is_custom else ContextTooLong)
        assert raised.value.message
        assert "too much" not in raised.value.message
    assert (await choice(engine, ask("Say hello."))).text


async def test_model_info_and_features(engine: Engine) -> None:
    (info,) = engine.models()
    assert isinstance(info, ModelInfo)
    assert info.name
    assert info.owner
    assert info.context in (None, CONTEXT)
    assert {"chat", "completion"} <= engine.supports() <= frozenset(Feature)
    assert engine.slots in (None, SLOTS)
    if isinstance(engine, UpstreamEngine):
        assert engine.device == "elsewhere"
    else:
        is_vllm = isinstance(engine, WorkerEngine) and engine._start.engine == "vllm"
        assert engine.device in (("cpu", "cuda") if is_vllm else ("cpu",))


async def test_tokenize_if_supported(engine: Engine) -> None:
    text = "Grüße, 世界 😀\n <|im_end|>"
    if "tokenize" not in engine.supports():
        with pytest.raises(NotSupported):
            await call_engine(engine.tokenize, text, False)
        return
    tokens: Sequence[int] = await call_engine(engine.tokenize, text, False)
    assert await call_engine(engine.detokenize, tokens) == text
    assert len(await call_engine(engine.tokenize, text, True)) < len(tokens)
    with pytest.raises(BadRequest):
        await call_engine(engine.detokenize, [2**31 - 1])


async def test_embed_if_supported(engine: Engine) -> None:
    if "embeddings" not in engine.supports():
        with pytest.raises(NotSupported):
            await call_engine(engine.embed, ["a"])
        return
    inputs = ["The cat sleeps.", (7, 8, 9), "The cat sleeps.", "Taxes rise."]
    first, ids, second, other = await call_engine(engine.embed, inputs)
    assert first.dimensions == ids.dimensions == other.dimensions > 8
    assert all(math.hypot(*made.values) == pytest.approx(1, abs=1e-5) for made in (first, ids, other))
    assert first.cosine_similarity(second) == pytest.approx(1, abs=1e-3)
    # Servers report the tokens of all inputs together.
    assert (first.tokens if isinstance(engine, UpstreamEngine) else ids.tokens) >= 3
    assert first.cosine_similarity(other) < 0.99
    with pytest.raises(ContextTooLong):
        await call_engine(engine.embed, ["fine", OVERLONG])
    assert len(await call_engine(engine.embed, ["fine"])) == 1


class Endless(Engine):
    """Yields more events after `Finished`."""

    def generate(self, request: GenerationRequest) -> Iterator[Output]:
        yield [Started(3), TextDelta("one ")]
        yield [TextDelta("two"), Finished("length"), TextDelta("three")]
        yield Finished()
        yield "four"


class EndlessAsync(Endless):
    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Output, None]:  # type: ignore[override]
        for output in super().generate(request):
            yield output


@pytest.mark.parametrize("engine", [Endless(), EndlessAsync()], ids=["plain", "async"])
async def test_events_after_finished_are_dropped(engine: Engine) -> None:
    events = [event async for batch in stream_events(engine, ask("x")) for event in batch]
    assert events == [Started(3), TextDelta("one "), TextDelta("two"), Finished("length")]
