"""Embeddings of real models: an embedding model compared with a reference, and a chat model."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dragoman.core.embeddings import Embedding
from dragoman.core.engine import stream_events
from dragoman.core.errors import BadRequest, ContextTooLong, EngineFailed, NotSupported
from dragoman.engines.llama.binding import Context
from dragoman.engines.llama.engine import EMBEDDING_SEQUENCES, LlamaEngine
from dragoman.engines.prompt_reader import MAX_UNCHECKED_BYTES
from tests.engines.llama_fixtures import chat, collect, completion, running_engine, wait_until

pytestmark = pytest.mark.anyio

Vectors = NDArray[np.float64]
CLS, SEP = 101, 102


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    """Embeddings by sentence-transformers with the same weights: sentences, tokens, and vectors of half floats."""
    found: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "minilm.json").read_text())
    return found


@pytest.fixture
async def minilm(request: pytest.FixtureRequest, minilm_path: Path) -> AsyncIterator[LlamaEngine]:
    marker = request.node.get_closest_marker("engine_options")
    options = {"context": None} if marker is None else marker.kwargs
    async with running_engine(minilm_path, **options) as engine:
        yield engine


def stacked(embeddings: Sequence[Embedding]) -> Vectors:
    return np.array([entry.values for entry in embeddings])


def cosines(one: Vectors, other: Vectors) -> Vectors:
    lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    found: Vectors = (one * other).sum(axis=1) / lengths
    return found


async def test_embeddings_match_the_reference(minilm: LlamaEngine, reference: dict[str, Any]) -> None:
    embeddings = await minilm.embed(reference["sentences"])
    expected = np.frombuffer(base64.b64decode(reference["vectors"]), "<f2").reshape(len(embeddings), -1).astype(float)
    assert len(embeddings) == 50
    assert stacked(embeddings).shape == expected.shape == (50, 384)
    assert cosines(stacked(embeddings), expected).min() > 0.9999
    assert [entry.tokens for entry in embeddings] == reference["tokens"]
    assert np.linalg.norm(stacked(embeddings), axis=1) == pytest.approx(np.ones(50), abs=1e-5)


async def test_embedding_does_not_depend_on_other_texts(minilm: LlamaEngine, reference: dict[str, Any]) -> None:
    texts = reference["sentences"][:6] + reference["sentences"][-2:]
    together = stacked(await minilm.embed(texts))
    alone = stacked([(await minilm.embed([text]))[0] for text in texts])
    crowd = await asyncio.gather(*(minilm.embed([text]) for text in texts * 3))
    assert cosines(together, alone).min() > 0.99999
    assert cosines(np.tile(together, (3, 1)), stacked([embedding for (embedding,) in crowd])).min() > 0.99999


async def test_token_ids_are_used_unchanged(minilm: LlamaEngine) -> None:
    words = await minilm.tokenize("hello world", False)
    text, framed, bare = await minilm.embed(["hello world", (CLS, *words, SEP), tuple(words)])
    assert text == framed
    assert (text.tokens, bare.tokens) == (4, 2)
    assert text.cosine_similarity(bare) < 0.999
    with pytest.raises(BadRequest, match="token id 30522 is not in the vocabulary"):
        await minilm.embed([(30522,)])


async def test_control_token_names_in_a_text_are_content(minilm: LlamaEngine) -> None:
    (embedding,) = await minilm.embed(["[SEP] [MASK]"])
    assert embedding.tokens > 2 + 2


async def test_longest_input(minilm: LlamaEngine) -> None:
    (info,) = minilm.models()
    assert info.context == 512
    embeddings = await minilm.embed(["word " * 510] * 3)
    assert [entry.tokens for entry in embeddings] == [512] * 3
    blank = await minilm.embed([" " * MAX_UNCHECKED_BYTES])
    assert blank[0].tokens == 2
    for text in ("word " * 511, "word " * 100_000, tuple([2000] * 513)):
        with pytest.raises(ContextTooLong, match="maximum context length is 512 tokens"):
            await minilm.embed(["a", text])


@pytest.mark.engine_options(context=16)
async def test_configured_context_limits_the_input(minilm: LlamaEngine) -> None:
    assert (await minilm.embed(["word " * 14]))[0].tokens == 16
    with pytest.raises(ContextTooLong):
        await minilm.embed(["word " * 15])


async def test_embedding_model_does_not_generate(minilm: LlamaEngine) -> None:
    assert minilm.supports() == {"embeddings", "tokenize", "add_special", "token_texts"}
    text = await minilm.detokenize(await minilm.tokenize("Hello world", False))
    assert text.strip() == "hello world"
    with pytest.raises(NotSupported):
        await collect(minilm, completion("hello"))


async def test_cancelled_requests_free_their_sequences(minilm: LlamaEngine) -> None:
    await minilm.embed(["warm"])
    assert minilm.loaded is not None
    embedder = minilm.loaded.embedder
    # These would take minutes.
    tasks = [asyncio.create_task(minilm.embed(["word " * 400] * 400)) for _ in range(3)]
    await wait_until(lambda: bool(embedder.active))
    for task in tasks:
        task.cancel()
    async with asyncio.timeout(60):
        assert await minilm.embed(["hello"])
    assert (list(embedder.jobs), embedder.active) == ([], [])
    assert sorted(embedder.free_sequences) == list(range(EMBEDDING_SEQUENCES))


async def test_stop_fails_running_requests(minilm: LlamaEngine) -> None:
    task = asyncio.create_task(minilm.embed(["word " * 500] * 40))
    await asyncio.sleep(0.2)
    await minilm.stop()
    with pytest.raises(EngineFailed):
        await task


@pytest.mark.parametrize("fault", ["code", "exception", "number"])
async def test_embedder_recovers_from_failures(
    minilm: LlamaEngine, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    def explode(*_: object) -> int:
        raise RuntimeError("secret")

    with monkeypatch.context() as patched:
        if fault == "number":
            patched.setattr(Context, "vectors", lambda self, rows: np.full((rows, self.width), np.nan))
        else:
            patched.setattr(Context, "decode", explode if fault == "exception" else lambda *_: 3)
        with pytest.raises(EngineFailed) as failure:
            await minilm.embed(["one", "two", "three"])
        assert "secret" not in failure.value.message
    embeddings = await minilm.embed(["one"] * (EMBEDDING_SEQUENCES + 1))
    assert embeddings[0].cosine_similarity(embeddings[-1]) > 0.9999


# A chat model.


async def test_chat_model_creates_embeddings(engine: LlamaEngine) -> None:
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
    assert cat.cosine_similarity(again) > 0.9999
    assert cat.cosine_similarity(kitten) > cat.cosine_similarity(tax)


async def test_long_text_in_chunks_has_the_same_embedding(model_path: Path) -> None:
    found: list[Embedding] = []
    text = "The old clockmaker wound the clock of the tower every morning. " * 12
    for batch in (32, 512):
        async with running_engine(model_path, batch=batch) as engine:
            found.extend(await engine.embed([text, "short"]))
            with pytest.raises(ContextTooLong):
                await engine.embed([text * 8])
    assert found[0].tokens > 100
    assert found[0].cosine_similarity(found[2]) > 0.999
    assert found[1].cosine_similarity(found[3]) > 0.999


@pytest.mark.parametrize(("batch", "slots"), [(1, 4), (2, 1), (8, 16), (15, 4), (65_536, 2)])
async def test_every_batch_size_generates_and_embeds(model_path: Path, batch: int, slots: int) -> None:
    async with running_engine(model_path, batch=batch, slots=slots, context=64) as engine:
        texts = [f"Text {at} of some." for at in range(20)]
        writing = asyncio.gather(*(collect(engine, completion(max_tokens=3)) for _ in range(slots)))
        embeddings, written = await engine.embed(texts), await writing
        assert [entry.dimensions for entry in embeddings] == [576] * len(texts)
        assert {reply.text for reply in written} == {written[0].text}


async def test_stream_continues_while_texts_are_embedded(engine: LlamaEngine) -> None:
    await engine.embed(["warm"])
    embedding = asyncio.create_task(engine.embed(["The old clockmaker wound the clock every morning. " * 10] * 12))
    await asyncio.sleep(0.3)
    async for _ in stream_events(engine, chat("Tell me a story.", max_tokens=24, ignore_eos=True)):
        pass
    assert not embedding.done()
    embedding.cancel()
