r"""Frames of a stored stream.

    frame := "event: " TYPE "\n" "data: " JSON "\n\n"      JSON has no line breaks

A response that ends early, because it is cancelled or its server stopped, keeps the output items that are complete.
Its last frame is `response.failed`, or `response.incomplete` if it is cancelled: clients know no other one.
"""

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

FRAME_END = b"\n\n"
ItemEvent = tuple[str, dict[str, Any]]
"""The type of an event and its fields except the sequence number."""
ITEM_DONE = b"event: response.output_item.done\ndata: "


def encode_frame(name: str, fields: dict[str, Any], number: int) -> bytes:
    payload = {"type": name, **fields, "sequence_number": number}
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(payload))


def count_frames(frames: bytes) -> int:
    return frames.count(FRAME_END)


def skip_frames(frames: bytes, count: int) -> bytes:
    """The frames after the first `count` ones."""
    at = 0
    for _ in range(count):
        at = frames.index(FRAME_END, at) + len(FRAME_END)
    return frames[at:]


def end_early(
    body: bytes, frames: bytes, number: int, status: Literal["failed", "cancelled"], code: str, message: str
) -> tuple[bytes, bytes]:
    """The body of a response that ends now, and the last frames of its stream. `frames` are those so far, `number` is
    the next sequence number."""
    response = msgspec.json.decode(body)
    response |= {"status": status, "output": list(_done_items(frames.split(FRAME_END)))}
    if status == "cancelled":
        return msgspec.json.encode(response), encode_frame("response.incomplete", {"response": response}, number)
    error = {"code": code, "message": message}
    response["error"] = error
    opening = encode_frame("error", {**error, "param": None}, number)
    return msgspec.json.encode(response), opening + encode_frame("response.failed", {"response": response}, number + 1)


def _done_items(frames: Iterable[bytes]) -> Iterable[dict[str, Any]]:
    for frame in frames:
        if frame.startswith(ITEM_DONE):
            yield msgspec.json.decode(frame.removeprefix(ITEM_DONE))["item"]
