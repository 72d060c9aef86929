"""Prompt caching on request, with a real model and little cache memory."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.server_process import Running, Serving

RULES = "You are a careful clerk who answers letters about lost umbrellas. " * 6
TOPICS = ["the sea", "a city", "three goats", "an old mill", "the moon"]


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path, serving: Serving) -> Iterator[Running]:
    model = {"source": str(smollm2_path), "context": 256, "slots": 1, "cache_sequences": 2, "layout": "as-is"}
    with serving(tmp_path_factory.mktemp("kept"), {"models": {"smollm2": model}}) as running:
        yield running


def post(running: Running, path: str, body: dict[str, Any]) -> httpx.Response:
    response = httpx.post(f"{running.url}{path}", json=body, timeout=60, trust_env=False)
    assert response.status_code == 200, response.text
    assert "x-dragoman-ignored" not in response.headers
    return response


def message(rules: str, control: dict[str, str] | None, **fields: Any) -> dict[str, Any]:
    block = {"type": "text", "text": rules} | ({} if control is None else {"cache_control": control})
    asked = [{"role": "user", "content": "Hello"}]
    return {"model": "smollm2", "system": [block], "messages": asked, "max_tokens": 2, **fields}


def counts(usage: dict[str, int]) -> tuple[int, int, int]:
    return usage["input_tokens"], usage["cache_creation_input_tokens"], usage["cache_read_input_tokens"]


def crowd(running: Running) -> None:
    for topic in TOPICS:
        post(running, "/v1/messages", message(f"Write about {topic}, slowly and with great care. " * 6, None))


def test_prompt_is_cached_for_the_requested_time(narrow: Running) -> None:
    first = post(narrow, "/v1/messages", message(RULES, {"type": "ephemeral"})).json()["usage"]
    assert counts(first)[0] == counts(first)[2] == 0
    assert counts(first)[1] > 80
    assert first["cache_creation"] == {"ephemeral_5m_input_tokens": counts(first)[1], "ephemeral_1h_input_tokens": 0}
    crowd(narrow)
    again = post(narrow, "/v1/messages", message(RULES, None)).json()["usage"]
    assert counts(again) == (2, 0, counts(first)[1] - 2)


def test_openai_prompt_cache_retention_and_eviction(narrow: Running) -> None:
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Please tell me how to mend a broken umbrella. " * 8}],
        "max_tokens": 2,
        "prompt_cache_retention": "24h",
    }
    first = post(narrow, "/v1/chat/completions", body).json()["usage"]
    crowd(narrow)
    again = post(narrow, "/v1/chat/completions", body).json()["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] == first["prompt_tokens"] - 2
    unpinned = post(narrow, "/v1/messages", message(RULES, None)).json()["usage"]
    assert counts(unpinned)[2] < 32
