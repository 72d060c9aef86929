"""Embeddings of real models: an embedding model compared with a reference, and a chat model."""

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
from dragoman.engines.llama.compute_thread import ComputeThread
from dragoman.engines.llama.embedder import MAX_UNCHECKED_BYTES
from dragoman.engines.llama.engine import EMBEDDING_SEQUENCES, LlamaEngine
from dragoman.engines.llama.options import LlamaOptions
from tests.engines.llama_fixtures import Run, chat, collect, completion

Vectors = NDArray[np.float64]
CLS, SEP = 101, 102


class Reference(msgspec.Struct, frozen=True):
    """Embeddings by sentence-transformers with the same weights: rows of half floats."""

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


def stacked(embeddings: Sequence[Embedding]) -> Vectors:
    return np.array([entry.values for entry in embeddings])


def cosines(one: Vectors, other: Vectors) -> Vectors:
    lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    found: Vectors = (one * other).sum(axis=1) / lengths
    return found


def test_embeddings_match_the_reference(with_minilm: Run, reference: Reference) -> None:
    async def test(engine: LlamaEngine) -> None:
        embeddings = await engine.embed(reference.sentences)
        expected = np.frombuffer(base64.b64decode(reference.vectors), "<f2").reshape(len(embeddings), -1).astype(float)
        assert len(embeddings) == 50
        assert stacked(embeddings).shape == expected.shape == (50, 384)
        assert cosines(stacked(embeddings), expected).min() > 0.9999
        assert [entry.tokens for entry in embeddings] == reference.tokens
        assert np.linalg.norm(stacked(embeddings), axis=1) == pytest.approx(np.ones(50), abs=1e-5)

    with_minilm(test)


def test_embedding_does_not_depend_on_other_texts(with_minilm: Run, reference: Reference) -> None:
    async def test(engine: LlamaEngine) -> None:
        texts = reference.sentences[:6] + reference.sentences[-2:]
        together = stacked(await engine.embed(texts))
        alone = stacked([(await engine.embed([text]))[0] for text in texts])
        crowd = await asyncio.gather(*(engine.embed([text]) for text in texts * 3))
        assert cosines(together, alone).min() > 0.99999
        assert cosines(np.tile(together, (3, 1)), stacked([embedding for (embedding,) in crowd])).min() > 0.99999

    with_minilm(test)


def test_token_ids_are_used_unchanged(with_minilm: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
        words = await engine.tokenize("hello world", False)
        text, framed, bare = await engine.embed(["hello world", (CLS, *words, SEP), tuple(words)])
        assert text == framed
        assert (text.tokens, bare.tokens) == (4, 2)
        assert text.likeness(bare) < 0.999
        with pytest.raises(BadRequest, match="token id 30522 is not in the vocabulary"):
            await engine.embed([(30522,)])

    with_minilm(test)


def test_control_token_names_in_a_text_are_content(with_minilm: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
        (embedding,) = await engine.embed(["[SEP] [MASK]"])
        assert embedding.tokens > 2 + 2

    with_minilm(test)


def test_longest_input(with_minilm: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
        (info,) = engine.models()
        assert info.context == 512
        embeddings = await engine.embed(["word " * 510] * 3)
        assert [entry.tokens for entry in embeddings] == [512] * 3
        blank = await engine.embed([" " * MAX_UNCHECKED_BYTES])
        assert blank[0].tokens == 2
        for text in ("word " * 511, "word " * 100_000, tuple([2000] * 513)):
            with pytest.raises(ContextTooLong, match="maximum context length is 512 tokens"):
                await engine.embed(["a", text])

    with_minilm(test)


def test_configured_context_limits_the_input(with_minilm: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
        assert (await engine.embed(["word " * 14]))[0].tokens == 16
        with pytest.raises(ContextTooLong):
            await engine.embed(["word " * 15])

    with_minilm(test, context=16)


def test_embedding_model_does_not_generate(with_minilm: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
        assert engine.supports() == {"embeddings", "tokenize"}
        text = await engine.detokenize(await engine.tokenize("Hello world", False))
        assert text.strip() == "hello world"
        with pytest.raises(NotSupported):
            await collect(engine, completion("hello"))

    with_minilm(test)


def test_cancelled_requests_free_their_sequences(with_minilm: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
        await engine.embed(["warm"])
        embedder = engine.embedder
        assert embedder is not None
        # These would take minutes.
        tasks = [asyncio.create_task(engine.embed(["word " * 400] * 400)) for _ in range(3)]
        while not embedder.active:  # noqa: ASYNC110 (changes in another thread)
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        async with asyncio.timeout(60):
            assert await engine.embed(["hello"])
        assert (list(embedder.jobs), embedder.active) == ([], [])
        assert sorted(embedder.free_sequences) == list(range(EMBEDDING_SEQUENCES))

    with_minilm(test)


def test_stop_fails_running_requests(with_minilm: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
        task = asyncio.create_task(engine.embed(["word " * 500] * 40))
        await asyncio.sleep(0.2)
        await engine.stop()
        with pytest.raises(EngineFailed):
            await task

    with_minilm(test)


@pytest.mark.parametrize("fault", ["code", "exception", "number"])
def test_embedder_recovers_from_failures(with_minilm: Run, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
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
        embeddings = await engine.embed(["one"] * (EMBEDDING_SEQUENCES + 1))
        assert embeddings[0].likeness(embeddings[-1]) > 0.9999

    with_minilm(test)


# A chat model.


def test_chat_model_creates_embeddings(with_engine: Run) -> None:
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


def test_long_text_in_chunks_has_the_same_embedding(with_engine: Run) -> None:
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
def test_every_batch_size_generates_and_embeds(with_engine: Run, batch: int, slots: int) -> None:
    async def test(engine: LlamaEngine) -> None:
        texts = [f"Text {at} of some." for at in range(20)]
        writing = asyncio.gather(*(collect(engine, completion(max_tokens=3)) for _ in range(slots)))
        embeddings, written = await engine.embed(texts), await writing
        assert [entry.dimensions for entry in embeddings] == [576] * len(texts)
        assert {reply.text for reply in written} == {written[0].text}

    with_engine(test, batch=batch, slots=slots, context=64)


def test_stream_continues_while_texts_are_embedded(with_engine: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
        await engine.embed(["warm"])
        embedding = asyncio.create_task(engine.embed(["The old clockmaker wound the clock every morning. " * 10] * 12))
        await asyncio.sleep(0.3)
        async for _ in engine.generate(chat("Tell me a story.", max_tokens=24, ignore_eos=True)):
            pass
        assert not embedding.done()
        embedding.cancel()

    with_engine(test)


def test_compute_thread_is_fair() -> None:
    compute_thread, ready = ComputeThread(), threading.Event()
    order: list[tuple[str, int]] = []

    def compute(caller: str) -> None:
        order.append((caller, threading.get_ident()))
        ready.set()
        time.sleep(0.001)

    def other() -> None:
        for _ in range(20):
            compute_thread.run(compute, "other")

    thread = threading.Thread(target=other)
    thread.start()
    ready.wait()
    for _ in range(10):
        compute_thread.run(compute, "this")
    thread.join()
    compute_thread.close()
    mine = [at for at, (caller, _) in enumerate(order) if caller == "this"]
    assert max(after - before for before, after in pairwise(mine)) <= 3
    assert len({ident for _, ident in order}) == 1
