"""Helpers for tests of batches."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from anthropic import Anthropic
from anthropic.types.messages import MessageBatch
from openai import OpenAI
from openai.types import Batch

from tests.support.requests import CHAT, eventually

ENDED = ("completed", "failed", "expired", "cancelled")


def chat_line(name: str, text: str = "hello", *, url: str = CHAT, **body: Any) -> dict[str, Any]:
    asked = {"model": "echo", "messages": [{"role": "user", "content": text}]} | body
    return {"custom_id": name, "method": "POST", "url": url, "body": asked}


def message_request(name: str, text: str = "hello", **params: Any) -> Any:
    asked = {"model": "echo", "max_tokens": 50, "messages": [{"role": "user", "content": text}]} | params
    return {"custom_id": name, "params": asked}


def jsonl(lines: Iterable[Mapping[str, Any] | bytes]) -> bytes:
    return b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines) + b"\n"


def submit(client: OpenAI, lines: Iterable[Mapping[str, Any] | bytes], endpoint: Any = CHAT, **fields: Any) -> Batch:
    file = client.files.create(purpose="batch", file=("input.jsonl", jsonl(lines)))
    given = {"completion_window": "24h"} | fields
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, **given)


def finish(client: OpenAI, batch_id: str) -> Batch:
    """Wait for the end of a batch."""
    assert eventually(lambda: client.batches.retrieve(batch_id).status in ENDED), client.batches.retrieve(batch_id)
    return client.batches.retrieve(batch_id)


def finish_messages(client: Anthropic, batch_id: str) -> MessageBatch:
    def has_ended() -> bool:
        return client.messages.batches.retrieve(batch_id).processing_status == "ended"

    assert eventually(has_ended), client.messages.batches.retrieve(batch_id)
    return client.messages.batches.retrieve(batch_id)


def read_file(client: OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """The lines of a result file; none if there is no file."""
    if file_id is None:
        return []
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def text_of_line(entry: Mapping[str, Any]) -> str:
    assert entry["error"] is None
    assert entry["response"]["status_code"] == 200, entry
    text: str = entry["response"]["body"]["choices"][0]["message"]["content"]
    return text
