"""Invalid engine output fails its own request, not the front end or the worker."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.test_frontends import many
from tests.support.requests import CHAT
from tests.support.server_process import Running, serving

WRONG = ["wrong 1", "wrong 100000000", "eos 1"]
WORDS = "".join(f"{at} " for at in range(60))
MODELS: dict[str, Any] = {
    "here": {"engine": "tests.ipc.engines:Obedient"},
    "apart": {"engine": "tests.ipc.engines:Apart"},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("wrong"), {"models": MODELS}, "--workers", "2") as running:
        yield running


async def chat(client: httpx.AsyncClient, model: str, text: str) -> tuple[str, str | None]:
    """Return the text and the error."""
    body = {"model": model, "messages": [{"role": "user", "content": text}], "stream": True}
    lines = (await client.post(CHAT, json=body)).text.splitlines()
    said = ""
    for line in lines:
        if line == "data: [DONE]":
            return said, None
        frame = json.loads(line.removeprefix("data: ")) if line else {"choices": []}
        if "error" in frame:
            return said, frame["error"]["message"]
        said += "".join(choice["delta"].get("content") or "" for choice in frame["choices"])
    raise AssertionError(lines)


@pytest.mark.parametrize("model", MODELS)
def test_invalid_event_fails_only_its_request(pair: Running, model: str) -> None:
    async def whole() -> list[tuple[str, str | None]]:
        async with many(pair) as client:
            await chat(client, model, "count 1")
            before = pair.fronts(), pair.workers()
            # Enough connections to reach both front ends.
            texts = ["slowly 60", *WRONG] * 8
            results = await asyncio.gather(*(chat(client, model, text) for text in texts))
            assert (pair.fronts(), pair.workers()) == before
            stats = (await client.get("/stats")).json()["models"][model]
            assert stats["running"] == 0
            return results

    results = asyncio.run(whole())
    assert results[::4] == [(WORDS, None)] * 8
    failed = [error for at, (_, error) in enumerate(results) if at % 4]
    assert failed == ["the engine failed (ValidationError); see the server log"] * 24
    log = pair.log.read_text()
    assert "engine output cannot be decoded" in log
    assert "died" not in log
