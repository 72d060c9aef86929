"""The reply of `/v1/responses/compact`: the conversation that a client sends instead of the one that it had.

    output := (message of system, developer or user)* compaction

Rules
1. The output is in the order of the conversation, and goes into the input of the next request unchanged.
2. It is not stored: its id cannot be continued.
"""

from typing import Any

from dragoman.core.reply import Reply
from dragoman.core.request import GenerationRequest
from dragoman.protocols.responses import items
from dragoman.protocols.responses.compaction_items import ID_PREFIX, encode_item
from dragoman.protocols.responses.encoder import encode_usage
from dragoman.protocols.responses.server import ResponseContext
from dragoman.protocols.wire_protocol import EVENT_STREAM, Encoder


class CompactedEncoding:
    stream_type = EVENT_STREAM

    def __init__(self, context: ResponseContext) -> None:
        self._context = context

    def encode_reply(self, request: GenerationRequest, created: int, reply: Reply) -> dict[str, Any]:
        compaction = reply.compaction
        assert compaction is not None
        conversation = [("", items.kind_of(item, ""), dict(item)) for item in self._context.items]
        retained = [item for _, _, item in items.retained(conversation, compaction.kept)]
        suffix = request.id.removeprefix(items.PREFIX)
        output = items.storable_items(retained, request.id)
        return {
            "id": request.id,
            "object": "response.compaction",
            "created_at": created,
            "output": [*output, encode_item(compaction, f"{ID_PREFIX}{suffix}")],
            "usage": encode_usage(compaction.usage),
        }

    def encode_stream(self, request: GenerationRequest, created: int) -> Encoder:
        raise AssertionError("a compacted conversation is not streamed")
