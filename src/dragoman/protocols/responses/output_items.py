"""The output items of a response that the model writes: messages, reasoning and calls, with their stream events.

`encoder` has the grammar of the events.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from dragoman.core.events import (
    TokenLogprob,
)
from dragoman.protocols import openai
from dragoman.protocols.responses import calls
from dragoman.protocols.responses.frames import ItemEvent
from dragoman.protocols.sealed import Seal

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed"]
CALL_EVENTS = {"function": "function_call_arguments", "custom": "custom_tool_call_input"}
"""The events of calls that are streamed. The item of another call is sent when complete."""


class ContentItem:
    """A message or reasoning, whose content is one text part; `id_suffix` is unique within the response."""

    def __init__(self, is_message: bool, id_suffix: str, index: int, encrypts: bool) -> None:
        self.is_message = is_message
        self.id = ("msg_" if is_message else "rs_") + id_suffix
        self.kind = "output_text" if is_message else "reasoning_text"
        self.pieces: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._index = index
        self._encrypts = encrypts
        name = f"response.{self.kind}.delta"
        fields = msgspec.json.encode({"type": name, **self._fields(logprobs=[])})
        self.delta_prefix = b"event: %b\ndata: %b" % (name.encode(), fields[:-1] + b',"delta":')
        """The frame of a text delta of a message, without logprobs, up to the text."""

    def begin(self) -> Iterator[ItemEvent]:
        yield "response.output_item.added", {"output_index": self._index, "item": self._item("in_progress", [])}
        yield "response.content_part.added", self._fields(part=self._part("", []))

    def add(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> Iterator[ItemEvent]:
        self.pieces.append(text)
        self._logprobs += logprobs
        yield f"response.{self.kind}.delta", self._fields(delta=text, **self._logprob_fields(logprobs))

    def finish(self, status: Status) -> Iterator[ItemEvent]:
        text = "".join(self.pieces)
        part = self._part(text, self._logprobs)
        yield f"response.{self.kind}.done", self._fields(text=text, **self._logprob_fields(self._logprobs))
        yield "response.content_part.done", self._fields(part=part)
        yield "response.output_item.done", {"output_index": self._index, "item": self._item(status, [part])}

    def _part(self, text: str, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        annotations: dict[str, Any] = {"annotations": []} if self.is_message else {}
        return {"type": self.kind, "text": text, **annotations, **self._logprob_fields(logprobs)}

    def _logprob_fields(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {"logprobs": openai.encode_logprobs(logprobs)} if self.is_message else {}

    def _item(self, status: Status, parts: list[dict[str, Any]]) -> dict[str, Any]:
        item = {"id": self.id, "status": status, "content": parts}
        if self.is_message:
            return {"type": "message", "role": "assistant", **item}
        reasoning = {"type": "reasoning", "summary": [], **item}
        if self._encrypts and status != "in_progress":
            reasoning["encrypted_content"] = Seal.REASONING.seal("".join(self.pieces))
        return reasoning

    def _fields(self, **fields: Any) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": self._index, "content_index": 0, **fields}


class CallItem:
    def __init__(self, tool: calls.ClientTool, call_id: str, id_suffix: str, index: int) -> None:
        self._tool = tool
        self._kind = tool.kind
        self._call_id = call_id
        self._id_suffix = id_suffix
        self._index = index
        self._pieces: list[str] = []
        self._extractor = calls.TextExtractor()

    def begin(self) -> Iterator[ItemEvent]:
        if self._kind in CALL_EVENTS:
            yield "response.output_item.added", self._item_fields("in_progress")

    def add(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> Iterator[ItemEvent]:
        return self._delta(self._extractor.feed(text) if self._kind == "custom" else text)

    def _delta(self, text: str) -> Iterator[ItemEvent]:
        if text:
            self._pieces.append(text)
            if self._kind in CALL_EVENTS:
                yield f"response.{CALL_EVENTS[self._kind]}.delta", self._fields(delta=text)

    def finish(self, status: Status) -> Iterator[ItemEvent]:
        if self._kind == "custom":
            yield from self._delta(self._extractor.end())
        elif self._kind != "function":
            added = self._item_fields("in_progress")
            if added["item"]["type"] == "function_call":
                # The arguments do not fit.
                yield from self._become_function()
            else:
                yield "response.output_item.added", added
        if self._kind in CALL_EVENTS:
            text = "".join(self._pieces)
            done = {"input": text} if self._kind == "custom" else {"name": self._tool.name, "arguments": text}
            yield f"response.{CALL_EVENTS[self._kind]}.done", self._fields(**done)
        yield "response.output_item.done", self._item_fields(status)

    def _become_function(self) -> Iterator[ItemEvent]:
        arguments = "".join(self._pieces)
        self._pieces.clear()
        self._kind = "function"
        yield from self.begin()
        yield from self._delta(arguments)

    def _item_fields(self, status: Status) -> dict[str, Any]:
        tool = msgspec.structs.replace(self._tool, kind=self._kind)
        item = calls.encode_call(tool, self._call_id, "".join(self._pieces), self._id_suffix, status)
        return {"output_index": self._index, "item": item}

    def _fields(self, **fields: Any) -> dict[str, Any]:
        return {"item_id": calls.PREFIXES[self._kind] + self._id_suffix, "output_index": self._index, **fields}
