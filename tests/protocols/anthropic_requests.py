"""Decodes Anthropic requests for tests."""

import json
from typing import Any

import pytest

from dragoman.core.errors import BadRequest
from dragoman.core.request import GenerationRequest, Message
from dragoman.protocols.registry import PROTOCOLS

HI = {"role": "user", "content": "hi"}


def decode(**fields: Any) -> GenerationRequest:
    body = {"model": "m", "max_tokens": 10, "messages": [HI], **fields}
    return PROTOCOLS["messages"].decode(json.dumps(body).encode())


def asked(request: GenerationRequest) -> list[tuple[str, str]]:
    return [(entry.feature, entry.param) for entry in request.asked if entry.feature != "chat"]


def decode_blocks(role: str, *blocks: dict[str, Any]) -> tuple[Message, ...]:
    return decode(messages=[{"role": role, "content": list(blocks)}]).messages


def rejected_param(**fields: Any) -> str | None:
    with pytest.raises(BadRequest) as raised:
        decode(**fields)
    assert raised.value.param is None or raised.value.param in raised.value.message
    return raised.value.param
