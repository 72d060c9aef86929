"""Reads the stream of a response as a strict client does: checks the order of events and joins them to a response."""

from typing import Any

from tests.protocols import anthropic_stream

PARTS = {"reasoning": "reasoning_text", "message": "output_text"}
CALLS = {
    "function_call": ("function_call_arguments", "arguments"),
    "custom_tool_call": ("custom_tool_call_input", "input"),
}


def read(body: bytes) -> list[dict[str, Any]]:
    """Return the payloads and check their event names and numbers. Comments are skipped."""
    payloads = anthropic_stream.read(body)
    assert [payload["sequence_number"] for payload in payloads] == list(range(len(payloads)))
    return payloads


def accumulated(payloads: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the payloads of a complete stream to a response."""
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
    assert (begun["type"], begun["id"]) == (done["type"], done["id"])
    assert all(payload["item_id"] == done["id"] for payload in inner)
    if done["type"] == "compaction":
        assert {payload["type"] for payload in inner} <= {"response.compaction.compacting"}
        return done
    assert begun["status"] == "in_progress"
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
    added, *deltas, ended = inner
    assert (added["type"], ended["type"]) == ("response.content_part.added", "response.content_part.done")
    assert added["part"]["text"] == ""
    assert content == [ended["part"]]
    assert content[0]["type"] == kind
    assert _joined(f"response.{kind}", deltas, "text") == content[0]["text"]
    if kind == "output_text":
        logprobs = [entry for delta in deltas[:-1] for entry in delta["logprobs"]]
        assert logprobs == deltas[-1]["logprobs"] == content[0]["logprobs"]


def _joined(event: str, inner: list[dict[str, Any]], field: str) -> str:
    *deltas, done = inner
    assert {payload["type"] for payload in deltas} <= {f"{event}.delta"}
    assert done["type"] == f"{event}.done"
    text: str = "".join(payload["delta"] for payload in deltas)
    assert done[field] == text
    return text
