"""Builds the items of a response and their events.

message        added  content_part.added  output_text.delta*     output_text.done     content_part.done  done
reasoning      added  content_part.added  reasoning_text.delta*  reasoning_text.done  content_part.done  done
function       added  function_call_arguments.delta*   function_call_arguments.done   done
custom         added  custom_tool_call_input.delta*    custom_tool_call_input.done    done
other calls    added  done
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from dragoman.core.events import TokenLogprob
from dragoman.protocols import openai
from dragoman.protocols.responses.calls import PREFIXES, ClientTool, encode_call, encode_custom, encode_function
from dragoman.protocols.responses.custom_tool_text import TextExtractor
from dragoman.protocols.responses.parts import seal

ItemEvent = tuple[str, dict[str, Any]]
"""The type of an event and its fields except the sequence number."""


class ItemDraft(ABC):
    """`id_suffix` is the part of the item's id that is unique within the response."""

    def __init__(self, id_prefix: str, id_suffix: str, index: int) -> None:
        self.id = id_prefix + id_suffix
        self._id_suffix = id_suffix
        self._index = index
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @abstractmethod
    def item(self, status: str) -> dict[str, Any]:
        """Return the item in its current state."""

    @abstractmethod
    def begin(self) -> Iterator[ItemEvent]: ...

    @abstractmethod
    def add(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> Iterator[ItemEvent]: ...

    def finish(self, status: str) -> Iterator[ItemEvent]:
        yield from self._close()
        yield "response.output_item.done", {"output_index": self._index, "item": self.item(status)}

    def _close(self) -> Iterator[ItemEvent]:
        """Return the events that complete its content."""
        return iter(())

    def _added_event(self) -> ItemEvent:
        return "response.output_item.added", {"output_index": self._index, "item": self.item("in_progress")}

    def _event_fields(self, **fields: Any) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": self._index, **fields}


class _ContentDraft(ItemDraft):
    """An item whose content is one text part."""

    kind: str

    @abstractmethod
    def _part(self, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]: ...

    id_prefix: str

    def __init__(self, id_suffix: str, index: int) -> None:
        super().__init__(self.id_prefix, id_suffix, index)
        self.logprobs: list[TokenLogprob] = []
        self.is_started = False

    @property
    def parts(self) -> list[dict[str, Any]]:
        return [self._part(self.text, openai.encode_logprobs(self.logprobs))] if self.is_started else []

    def begin(self) -> Iterator[ItemEvent]:
        yield self._added_event()
        self.is_started = True
        yield "response.content_part.added", self._event_fields(content_index=0, part=self._part("", []))

    def add(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> Iterator[ItemEvent]:
        self._pieces.append(text)
        self.logprobs += logprobs
        yield (
            f"response.{self.kind}.delta",
            self._event_fields(content_index=0, delta=text, **self._logprob_fields(logprobs)),
        )

    def _close(self) -> Iterator[ItemEvent]:
        text = self.text
        done = self._event_fields(content_index=0, text=text, **self._logprob_fields(self.logprobs))
        yield f"response.{self.kind}.done", done
        yield "response.content_part.done", self._event_fields(content_index=0, part=self.parts[0])

    def _logprob_fields(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {}


class MessageDraft(_ContentDraft):
    kind = "output_text"
    id_prefix = "msg_"

    def _part(self, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def item(self, status: str) -> dict[str, Any]:
        return {"type": "message", "id": self.id, "role": "assistant", "status": status, "content": self.parts}

    def _logprob_fields(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {"logprobs": openai.encode_logprobs(logprobs)}

    @property
    def delta_prefix(self) -> bytes:
        """The frame of a text delta up to the text."""
        name = f"response.{self.kind}.delta"
        fields = {"type": name, **self._event_fields(content_index=0, logprobs=[])}
        return b"event: %b\ndata: %b" % (name.encode(), msgspec.json.encode(fields)[:-1] + b',"delta":')

    def push(self, text: str) -> None:
        """Add a text whose frame the caller builds."""
        self._pieces.append(text)


class ReasoningDraft(_ContentDraft):
    kind = "reasoning_text"
    id_prefix = "rs_"

    def __init__(self, id_suffix: str, index: int, encrypts: bool) -> None:
        super().__init__(id_suffix, index)
        self._encrypts = encrypts

    def _part(self, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": text}

    def item(self, status: str) -> dict[str, Any]:
        item = {"type": "reasoning", "id": self.id, "summary": [], "content": self.parts, "status": status}
        encrypted = seal(self.text) if self._encrypts and status != "in_progress" else None
        return {**item, "encrypted_content": encrypted}


class CallDraft(ItemDraft):
    """A call without deltas. Its item is sent when complete, because only then its type is known."""

    def __init__(self, id_suffix: str, index: int, call_id: str, tool: ClientTool) -> None:
        super().__init__(PREFIXES[tool.kind], id_suffix, index)
        self._call_id = call_id
        self._tool = tool

    def item(self, status: str) -> dict[str, Any]:
        return encode_call(self._tool, self._call_id, self.text, self._id_suffix, status)

    def begin(self) -> Iterator[ItemEvent]:
        return iter(())

    def add(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> Iterator[ItemEvent]:
        self._pieces.append(text)
        return iter(())

    def _close(self) -> Iterator[ItemEvent]:
        if self.item("in_progress")["type"] != "function_call":
            yield self._added_event()
            return
        function = FunctionDraft(self._id_suffix, self._index, self._call_id, self._tool)
        yield from function.begin()
        yield from function.add(self.text)
        yield from function._close()


class FunctionDraft(CallDraft):
    def __init__(self, id_suffix: str, index: int, call_id: str, tool: ClientTool) -> None:
        super().__init__(id_suffix, index, call_id, tool)
        self.id = PREFIXES["function"] + id_suffix

    def item(self, status: str) -> dict[str, Any]:
        return encode_function(self._tool, self._call_id, self.text, self._id_suffix, status)

    def begin(self) -> Iterator[ItemEvent]:
        yield self._added_event()

    def add(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> Iterator[ItemEvent]:
        if text:
            self._pieces.append(text)
            yield "response.function_call_arguments.delta", self._event_fields(delta=text)

    def _close(self) -> Iterator[ItemEvent]:
        yield "response.function_call_arguments.done", self._event_fields(name=self._tool.name, arguments=self.text)


class CustomDraft(CallDraft):
    def __init__(self, id_suffix: str, index: int, call_id: str, tool: ClientTool) -> None:
        super().__init__(id_suffix, index, call_id, tool)
        self._extractor = TextExtractor()

    def item(self, status: str) -> dict[str, Any]:
        return encode_custom(self._tool, self._call_id, self.text, self._id_suffix, status)

    def begin(self) -> Iterator[ItemEvent]:
        yield self._added_event()

    def add(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> Iterator[ItemEvent]:
        return self._input_delta(self._extractor.feed(text))

    def _input_delta(self, text: str) -> Iterator[ItemEvent]:
        if text:
            self._pieces.append(text)
            yield "response.custom_tool_call_input.delta", self._event_fields(delta=text)

    def _close(self) -> Iterator[ItemEvent]:
        yield from self._input_delta(self._extractor.end())
        yield "response.custom_tool_call_input.done", self._event_fields(input=self.text)


def call_draft(id_suffix: str, index: int, call_id: str, tool: ClientTool) -> CallDraft:
    kinds: dict[str, type[CallDraft]] = {"function": FunctionDraft, "custom": CustomDraft}
    return kinds.get(tool.kind, CallDraft)(id_suffix, index, call_id, tool)
