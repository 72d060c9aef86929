"""Reads Anthropic streams as a strict client does: checks the order of frames and joins them to a message."""

import json
from typing import Any

TEXT_FIELDS = {"text": "text", "thinking": "thinking", "tool_use": "input"}
DELTA_FIELDS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
DELTA_TYPES = {
    "text": {"text_delta"},
    "thinking": {"thinking_delta", "signature_delta"},
    "tool_use": {"input_json_delta"},
}


def read(body: bytes) -> list[dict[str, Any]]:
    """Return the payloads and check their event names. Comments are skipped."""
    text = body.decode()
    assert text.endswith("\n\n")
    payloads = []
    for frame in text.removesuffix("\n\n").split("\n\n"):
        if frame.startswith(":"):
            continue
        event, data = frame.split("\n")
        payload: dict[str, Any] = json.loads(data.removeprefix("data: "))
        assert event == f"event: {payload['type']}"
        payloads.append(payload)
    return payloads


def accumulated(payloads: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the payloads of a complete stream to a message."""
    first, *inner, last_delta, last = [payload for payload in payloads if payload["type"] != "ping"]
    assert (first["type"], last_delta["type"], last) == ("message_start", "message_delta", {"type": "message_stop"})
    message: dict[str, Any] = first["message"]
    assert (message["content"], message["stop_reason"], message["stop_sequence"]) == ([], None, None)
    while inner:
        end = next(at for at, payload in enumerate(inner) if payload["type"] == "content_block_stop")
        block, inner = inner[: end + 1], inner[end + 1 :]
        assert {payload["index"] for payload in block} == {len(message["content"])}
        message["content"].append(_block(block[0], block[1:-1]))
    message |= last_delta["delta"]
    message |= {name: value for name, value in last_delta.items() if name not in ("type", "delta", "usage")}
    message["usage"] |= last_delta["usage"]
    return message


def _block(start: dict[str, Any], deltas: list[dict[str, Any]]) -> dict[str, Any]:
    assert start["type"] == "content_block_start"
    block: dict[str, Any] = start["content_block"]
    kind = block["type"]
    if kind == "compaction":
        for delta in (payload["delta"] for payload in deltas):
            assert (delta["type"], block["content"]) == ("compaction_delta", None)
            block |= {name: delta[name] for name in ("content", "encrypted_content")}
        return block
    assert not block[TEXT_FIELDS[kind]]
    assert deltas
    pieces = []
    for delta in (payload["delta"] for payload in deltas):
        assert delta["type"] in DELTA_TYPES[kind]
        if delta["type"] == "signature_delta":
            assert delta is deltas[-1]["delta"]
            block["signature"] = delta["signature"]
        else:
            pieces.append(delta[DELTA_FIELDS[delta["type"]]])
    text = "".join(pieces)
    return block | {TEXT_FIELDS[kind]: _input(text) if kind == "tool_use" else text}


def _input(text: str) -> dict[str, Any]:
    if not text.strip():
        return {}
    try:
        parsed = json.loads(text)
    except ValueError:
        return {"INVALID_JSON": text}
    return parsed if isinstance(parsed, dict) else {"INVALID_JSON": text}
