"""The items of a response while they are made: each knows its events and what it is in the end.

message        added  content_part.added  output_text.delta*     output_text.done     content_part.done  done
reasoning      added  content_part.added  reasoning_text.delta*  reasoning_text.done  content_part.done  done
function       added  function_call_arguments.delta*   function_call_arguments.done   done
custom         added  custom_tool_call_input.delta*    custom_tool_call_input.done    done
another call   added  done
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from dragoman.core.events import TokenLogprob
from dragoman.protocols import openai
from dragoman.protocols.responses.calls import PREFIXES, Called, encode_call, encode_custom, encode_function
from dragoman.protocols.responses.custom_tool_text import Peel
from dragoman.protocols.responses.encrypted_reasoning import seal

Told = tuple[str, dict[str, Any]]
"""The name of an event, and what it says beside that and its number."""


class Draft(ABC):
    def __init__(self, end: str, index: int) -> None:
        self._end = end
        """The end of the item's id, which the response's other items do not have."""
        self._index = index
        self._pieces: list[str] = []

    @property
    @abstractmethod
    def id(self) -> str: ...

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @abstractmethod
    def item(self, status: str) -> dict[str, Any]:
        """What it is now."""

    @abstractmethod
    def begin(self) -> Iterator[Told]: ...

    @abstractmethod
    def add(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> Iterator[Told]: ...

    def finish(self, status: str) -> Iterator[Told]:
        yield from self._close()
        yield "response.output_item.done", {"output_index": self._index, "item": self.item(status)}

    def _close(self) -> Iterator[Told]:
        """What is told of its content before the item is done."""
        return iter(())

    def _added(self) -> Told:
        return "response.output_item.added", {"output_index": self._index, "item": self.item("in_progress")}

    def _of(self, **fields: Any) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": self._index, **fields}


class _Content(Draft):
    """An item whose content is one part of text."""

    kind: str

    @abstractmethod
    def _part(self, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]: ...

    def __init__(self, end: str, index: int) -> None:
        super().__init__(end, index)
        self.logprobs: list[TokenLogprob] = []
        self.begun = False

    @property
    def parts(self) -> list[dict[str, Any]]:
        return [self._part(self.text, openai.encode_logprobs(self.logprobs))] if self.begun else []

    def begin(self) -> Iterator[Told]:
        yield self._added()
        self.begun = True
        yield "response.content_part.added", self._of(content_index=0, part=self._part("", []))

    def add(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> Iterator[Told]:
        self._pieces.append(text)
        self.logprobs += logprobs
        yield f"response.{self.kind}.delta", self._of(content_index=0, delta=text, **self._extra(logprobs))

    def _close(self) -> Iterator[Told]:
        text = self.text
        done = self._of(content_index=0, text=text, **self._extra(self.logprobs))
        yield f"response.{self.kind}.done", done
        yield "response.content_part.done", self._of(content_index=0, part=self.parts[0])

    def _extra(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {}


class MessageDraft(_Content):
    kind = "output_text"

    @property
    def id(self) -> str:
        return f"msg_{self._end}"

    def _part(self, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def item(self, status: str) -> dict[str, Any]:
        return {"type": "message", "id": self.id, "role": "assistant", "status": status, "content": self.parts}

    def _extra(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {"logprobs": openai.encode_logprobs(logprobs)}

    @property
    def head(self) -> bytes:
        """The frame of a piece of its text, up to the text."""
        name = f"response.{self.kind}.delta"
        told = {"type": name, **self._of(content_index=0, logprobs=[])}
        return b"event: %b\ndata: %b" % (name.encode(), msgspec.json.encode(told)[:-1] + b',"delta":')

    def push(self, text: str) -> None:
        """A piece whose frame somebody else has made."""
        self._pieces.append(text)


class ThoughtDraft(_Content):
    kind = "reasoning_text"

    def __init__(self, end: str, index: int, sealed: bool) -> None:
        super().__init__(end, index)
        self._sealed = sealed

    @property
    def id(self) -> str:
        return f"rs_{self._end}"

    def _part(self, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": text}

    def item(self, status: str) -> dict[str, Any]:
        thought = {"type": "reasoning", "id": self.id, "summary": [], "content": self.parts, "status": status}
        sealed = seal(self.text) if self._sealed and status != "in_progress" else None
        return {**thought, "encrypted_content": sealed}


class CallDraft(Draft):
    """A call that is told when it is complete: only then it is known whether its arguments fit its item."""

    def __init__(self, end: str, index: int, call_id: str, called: Called) -> None:
        super().__init__(end, index)
        self._call_id = call_id
        self._called = called

    @property
    def id(self) -> str:
        return PREFIXES[self._called.kind] + self._end

    def item(self, status: str) -> dict[str, Any]:
        return encode_call(self._called, self._call_id, self.text, self._end, status)

    def begin(self) -> Iterator[Told]:
        return iter(())

    def add(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> Iterator[Told]:
        self._pieces.append(text)
        return iter(())

    def _close(self) -> Iterator[Told]:
        if self.item("in_progress")["type"] != "function_call":
            yield self._added()
            return
        function = FunctionDraft(self._end, self._index, self._call_id, self._called)
        yield from function.begin()
        yield from function.add(self.text)
        yield from function._close()


class FunctionDraft(CallDraft):
    @property
    def id(self) -> str:
        return PREFIXES["function"] + self._end

    def item(self, status: str) -> dict[str, Any]:
        return encode_function(self._called, self._call_id, self.text, self._end, status)

    def begin(self) -> Iterator[Told]:
        yield self._added()

    def add(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> Iterator[Told]:
        if text:
            self._pieces.append(text)
            yield "response.function_call_arguments.delta", self._of(delta=text)

    def _close(self) -> Iterator[Told]:
        yield "response.function_call_arguments.done", self._of(name=self._called.name, arguments=self.text)


class CustomDraft(CallDraft):
    def __init__(self, end: str, index: int, call_id: str, called: Called) -> None:
        super().__init__(end, index, call_id, called)
        self._peel = Peel()

    def item(self, status: str) -> dict[str, Any]:
        return encode_custom(self._called, self._call_id, self.text, self._end, status)

    def begin(self) -> Iterator[Told]:
        yield self._added()

    def add(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> Iterator[Told]:
        return self._told(self._peel.feed(text))

    def _told(self, text: str) -> Iterator[Told]:
        if text:
            self._pieces.append(text)
            yield "response.custom_tool_call_input.delta", self._of(delta=text)

    def _close(self) -> Iterator[Told]:
        yield from self._told(self._peel.end())
        yield "response.custom_tool_call_input.done", self._of(input=self.text)


def call_draft(end: str, index: int, call_id: str, called: Called) -> CallDraft:
    kinds: dict[str, type[CallDraft]] = {"function": FunctionDraft, "custom": CustomDraft}
    return kinds.get(called.kind, CallDraft)(end, index, call_id, called)
