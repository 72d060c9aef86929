"""A stream of a response as a strict client reads it: every event where it belongs, and the response they make."""

import json
from typing import Any

PARTS = {"reasoning": "reasoning_text", "message": "output_text"}
CALLS = {
    "function_call": ("function_call_arguments", "arguments"),
    "custom_tool_call": ("custom_tool_call_input", "input"),
}


def read(body: bytes) -> list[dict[str, Any]]:
    """The payloads; each has its event's name and the next number. Comments are left out."""
    text = body.decode()
    assert text.endswith("\n\n")
    blocks = [block.split("\n") for block in text.removesuffix("\n\n").split("\n\n") if not block.startswith(":")]
    payloads: list[dict[str, Any]] = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name for name, _ in blocks] == [f"event: {payload['type']}" for payload in payloads]
    assert [payload["sequence_number"] for payload in payloads] == list(range(len(payloads)))
    return payloads


def accumulated(payloads: list[dict[str, Any]]) -> dict[str, Any]:
    """The response of a stream that went well."""
    created, in_progress, *inner, last = payloads
    assert (created["type"], in_progress["type"]) == ("response.created", "response.in_progress")
    assert created["response"] == in_progress["response"]
    assert (created["response"]["status"], created["response"]["output"]) == ("in_progress", [])
    final: dict[str, Any] = last["response"]
    assert last["type"] == f"response.{final['status']}"
    assert final["status"] in ("completed", "incomplete")
    items: list[dict[str, Any]] = []
    while inner:
        end = next(at for at, payload in enumerate(inner) if payload["type"] == "response.output_item.done")
        item, inner = inner[: end + 1], inner[end + 1 :]
        assert {payload["output_index"] for payload in item} == {len(items)}
        items.append(_item(item[0], item[1:-1], item[-1]["item"]))
    assert final["output"] == items
    changed = {"status", "output", "usage", "completed_at", "incomplete_details"}
    assert {name for name, value in final.items() if created["response"][name] != value} <= changed
    return final


def _item(added: dict[str, Any], inner: list[dict[str, Any]], done: dict[str, Any]) -> dict[str, Any]:
    assert added["type"] == "response.output_item.added"
    begun = added["item"]
    assert begun["status"] == "in_progress"
    assert (begun["type"], begun["id"]) == (done["type"], done["id"])
    assert all(payload["item_id"] == done["id"] for payload in inner)
    if done["type"] in PARTS:
        assert begun["content"] == []
        _content(PARTS[done["type"]], inner, done["content"])
    elif done["type"] in CALLS:
        event, field = CALLS[done["type"]]
        assert begun[field] == ""
        assert _joined(f"response.{event}", inner, field) == done[field]
    else:
        assert inner == []
    return done


def _content(kind: str, inner: list[dict[str, Any]], content: list[dict[str, Any]]) -> None:
    added, *told, ended = inner
    assert (added["type"], ended["type"]) == ("response.content_part.added", "response.content_part.done")
    assert added["part"]["text"] == ""
    assert content == [ended["part"]]
    assert content[0]["type"] == kind
    assert _joined(f"response.{kind}", told, "text") == content[0]["text"]
    if kind == "output_text":
        logprobs = [entry for delta in told[:-1] for entry in delta["logprobs"]]
        assert logprobs == told[-1]["logprobs"] == content[0]["logprobs"]


def _joined(event: str, inner: list[dict[str, Any]], field: str) -> str:
    *deltas, done = inner
    assert {payload["type"] for payload in deltas} <= {f"{event}.delta"}
    assert done["type"] == f"{event}.done"
    text: str = "".join(payload["delta"] for payload in deltas)
    assert done[field] == text
    return text
