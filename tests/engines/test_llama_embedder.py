"""Vectors from real models: a sentence model against its reference, and a chat model."""

import asyncio
import base64
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from dragoman.core.embeddings import Embedding
from dragoman.core.errors import BadRequest, ContextTooLong, EngineFailed, NotSupported
from dragoman.engines.llama.binding import Context
from dragoman.engines.llama.compute_thread import Turns
from dragoman.engines.llama.embedder import READ_ANYWAY
from dragoman.engines.llama.engine import EMBEDDED_AT_ONCE, LlamaEngine
from dragoman.engines.llama.options import LlamaOptions
from tests.engines.running import Run, chat, collect, completion

Vectors = NDArray[np.float64]
CLS, SEP = 101, 102


class Reference(msgspec.Struct, frozen=True):
    """What sentence-transformers made of the same weights: half floats, one row after the other."""

    made_by: str
    sentences: list[str]
    tokens: list[int]
    vectors: str


@pytest.fixture(scope="module")
def reference() -> Reference:
    file = Path(__file__).parents[1] / "data" / "minilm.json"
    return msgspec.json.decode(file.read_bytes(), type=Reference)


@pytest.fixture
def with_minilm(minilm_path: Path) -> Callable[[Callable[[LlamaEngine], Awaitable[None]]], None]:
    def run(test: Callable[[LlamaEngine], Awaitable[None]], context: int | None = None) -> None:
        async def main() -> None:
            engine = LlamaEngine("minilm", LlamaOptions(path=str(minilm_path), context=context))
            await engine.start()
            try:
                await test(engine)
            finally:
                await engine.stop()

        asyncio.run(main())

    return run


def stacked(made: Sequence[Embedding]) -> Vectors:
    return np.array([entry.values for entry in made])


def cosines(one: Vectors, other: Vectors) -> Vectors:
    lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    found: Vectors = (one * other).sum(axis=1) / lengths
    return found


def test_it_agrees_with_the_reference(with_minilm: Run, reference: Reference) -> None:
    async def test(engine: LlamaEngine) -> None:
        made = await engine.embed(reference.sentences)
        expected = np.frombuffer(base64.b64decode(reference.vectors), "<f2").reshape(len(made), -1).astype(float)
        assert len(made) == 50
        assert stacked(made).shape == expected.shape == (50, 384)
        assert cosines(stacked(made), expected).min() > 0.9999
        assert [entry.tokens for entry in made] == reference.tokens
        assert np.linalg.norm(stacked(made), axis=1) == pytest.approx(np.ones(50), abs=1e-5)

    with_minilm(test)


def test_a_text_has_the_same_vector_in_any_company(with_minilm: Run, reference: Reference) -> None:
    async def test(engine: LlamaEngine) -> None:
        texts = reference.sentences[:6] + reference.sentences[-2:]
        together = stacked(await engine.embed(texts))
        alone = stacked([(await engine.embed([text]))[0] for text in texts])
        crowd = await asyncio.gather(*(engine.embed([text]) for text in texts * 3))
        assert cosines(together, alone).min() > 0.99999
        assert cosines(np.tile(together, (3, 1)), stacked([made for (made,) in crowd])).min() > 0.99999

    with_minilm(test)


def test_tokens_are_taken_as_they_are(with_minilm: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
        words = await engine.tokenize("hello world", False)
        text, framed, bare = await engine.embed(["hello world", (CLS, *words, SEP), tuple(words)])
        assert text == framed
        assert (text.tokens, bare.tokens) == (4, 2)
        assert text.likeness(bare) < 0.999
        with pytest.raises(BadRequest, match="token id 30522 is not in the vocabulary"):
            await engine.embed([(30522,)])

    with_minilm(test)


def test_names_of_control_tokens_in_a_text_are_content(with_minilm: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
        (made,) = await engine.embed(["[SEP] [MASK]"])
        assert made.tokens > 2 + 2

    with_minilm(test)


def test_the_longest_text(with_minilm: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
        (info,) = engine.models()
        assert info.context == 512
        made = await engine.embed(["word " * 510] * 3)
        assert [entry.tokens for entry in made] == [512] * 3
        blank = await engine.embed([" " * READ_ANYWAY])
        assert blank[0].tokens == 2
        for text in ("word " * 511, "word " * 100_000, tuple([2000] * 513)):
            with pytest.raises(ContextTooLong, match="maximum context length is 512 tokens"):
                await engine.embed(["a", text])

    with_minilm(test)


def test_a_shorter_context(with_minilm: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
        assert (await engine.embed(["word " * 14]))[0].tokens == 16
        with pytest.raises(ContextTooLong):
            await engine.embed(["word " * 15])

    with_minilm(test, context=16)


def test_it_writes_nothing(with_minilm: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
        assert engine.supports() == {"embeddings", "tokenize"}
        text = await engine.detokenize(await engine.tokenize("Hello world", False))
        assert text.strip() == "hello world"
        with pytest.raises(NotSupported):
            await collect(engine, completion("hello"))

    with_minilm(test)


def test_who_leaves_frees(with_minilm: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
        await engine.embed(["warm"])
        embedder = engine.embedder
        assert embedder is not None
        # This would take minutes.
        tasks = [asyncio.create_task(engine.embed(["word " * 400] * 400)) for _ in range(3)]
        while not embedder.seats:  # noqa: ASYNC110 (another thread takes them)
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        async with asyncio.timeout(60):
            assert await engine.embed(["hello"])
        assert (list(embedder.jobs), embedder.seats) == ([], [])
        assert sorted(embedder.free) == list(range(EMBEDDED_AT_ONCE))

    with_minilm(test)


def test_a_stop_fails_what_is_under_way(with_minilm: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
        task = asyncio.create_task(engine.embed(["word " * 500] * 40))
        await asyncio.sleep(0.2)
        await engine.stop()
        with pytest.raises(EngineFailed):
            await task

    with_minilm(test)


@pytest.mark.parametrize("fault", ["code", "exception", "number"])
def test_what_fails_once_does_not_fail_twice(with_minilm: Run, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    def explode(*_: object) -> int:
        raise RuntimeError("secret")

    async def test(engine: LlamaEngine) -> None:
        with monkeypatch.context() as patched:
            if fault == "number":
                patched.setattr(Context, "vectors", lambda self, rows: np.full((rows, self.width), np.nan))
            else:
                patched.setattr(Context, "decode", explode if fault == "exception" else lambda *_: 3)
            with pytest.raises(EngineFailed) as failure:
                await engine.embed(["one", "two", "three"])
            assert "secret" not in failure.value.message
        made = await engine.embed(["one"] * (EMBEDDED_AT_ONCE + 1))
        assert made[0].likeness(made[-1]) > 0.9999

    with_minilm(test)


# A chat model.


def test_a_chat_model_makes_vectors_too(with_engine: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
        assert "embeddings" in engine.supports()
        cat, kitten, tax, again = await engine.embed(
            [
                "The cat sleeps on the sofa.",
                "A kitten sleeps on the couch.",
                "Taxes rise by 3.5 %.",
                "The cat sleeps on the sofa.",
            ]
        )
        assert cat.dimensions == 576
        assert cat.likeness(again) > 0.9999
        assert cat.likeness(kitten) > cat.likeness(tax)

    with_engine(test)


def test_a_long_text_goes_in_by_chunks_and_comes_out_the_same(with_engine: Run) -> None:
    found: list[Embedding] = []
    text = "The old clockmaker wound the clock of the tower every morning. " * 12

    async def test(engine: LlamaEngine) -> None:
        found.extend(await engine.embed([text, "short"]))
        with pytest.raises(ContextTooLong):
            await engine.embed([text * 8])

    with_engine(test, batch=32)
    with_engine(test, batch=512)
    assert found[0].tokens > 100
    assert found[0].likeness(found[2]) > 0.999
    assert found[1].likeness(found[3]) > 0.999


@pytest.mark.parametrize(("batch", "slots"), [(1, 4), (2, 1), (8, 16), (15, 4), (65_536, 2)])
def test_any_batch_loads_writes_and_makes_vectors(with_engine: Run, batch: int, slots: int) -> None:
    async def test(engine: LlamaEngine) -> None:
        texts = [f"Text {at} of some." for at in range(20)]
        writing = asyncio.gather(*(collect(engine, completion(max_tokens=3)) for _ in range(slots)))
        made, written = await engine.embed(texts), await writing
        assert [entry.dimensions for entry in made] == [576] * len(texts)
        assert {reply.text for reply in written} == {written[0].text}

    with_engine(test, batch=batch, slots=slots, context=64)


def test_a_stream_goes_on_while_many_texts_are_embedded(with_engine: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
        await engine.embed(["warm"])
        embedding = asyncio.create_task(engine.embed(["The old clockmaker wound the clock every morning. " * 10] * 12))
        await asyncio.sleep(0.3)
        async for _ in engine.generate(chat("Tell me a story.", max_tokens=24, ignore_eos=True)):
            pass
        assert not embedding.done()
        embedding.cancel()

    with_engine(test)


def test_turns_are_fair_and_in_one_thread() -> None:
    turns, ready = Turns(), threading.Event()
    order: list[tuple[str, int]] = []

    def compute(who: str) -> None:
        order.append((who, threading.get_ident()))
        ready.set()
        time.sleep(0.001)

    def other() -> None:
        for _ in range(20):
            turns.run(compute, "other")

    thread = threading.Thread(target=other)
    thread.start()
    ready.wait()
    for _ in range(10):
        turns.run(compute, "this")
    thread.join()
    turns.close()
    mine = [at for at, (who, _) in enumerate(order) if who == "this"]
    assert max(after - before for before, after in pairwise(mine)) <= 3
    assert len({ident for _, ident in order}) == 1
