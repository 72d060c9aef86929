"""Encodes the items of a response that are about MCP servers. `mcp` decodes those of a request.

    listing  := added  mcp_list_tools.in_progress  (mcp_list_tools.completed | mcp_list_tools.failed)  done
    call     := added  mcp_call.in_progress  mcp_call_arguments.delta*  mcp_call_arguments.done
                (mcp_call.completed | mcp_call.failed)  done
    approval := added  done

Rules
1. A call waits for its output after its arguments; meanwhile other items of the same round may follow.
2. A call without an output, because the reply was cut off or has failed, is incomplete.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from dragoman.core.events import TokenLogprob, ToolCallStart, ToolOutput, ToolsListed
from dragoman.protocols.responses import mcp
from dragoman.protocols.responses.frames import ItemEvent

CallStatus = Literal["in_progress", "calling", "completed", "incomplete", "failed"]


class ServerCallItem:
    """A call that Dragoman makes itself, or that waits for approval; `id_suffix` is unique within the response."""

    def __init__(self, call: ToolCallStart, id_suffix: str, index: int) -> None:
        self.call_id = call.id
        self.index = index
        self.is_approval = call.needs_approval
        self._call = call
        self._id = mcp.ID_PREFIXES[mcp.APPROVAL_REQUEST if call.needs_approval else mcp.CALL] + id_suffix
        self._pieces: list[str] = []
        self._output: ToolOutput | None = None

    def begin(self) -> Iterator[ItemEvent]:
        # A request for approval is sent when it is complete.
        if not self.is_approval:
            yield "response.output_item.added", self._item_fields("in_progress")
            yield "response.mcp_call.in_progress", self._fields()

    def add(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> Iterator[ItemEvent]:
        if text:
            self._pieces.append(text)
            if not self.is_approval:
                yield "response.mcp_call_arguments.delta", self._fields(delta=text)

    def finish(self, status: str) -> Iterator[ItemEvent]:
        """End the arguments. A call that is incomplete, or needs approval, ends here."""
        if self.is_approval:
            yield "response.output_item.added", self._item_fields("in_progress")
        else:
            yield "response.mcp_call_arguments.done", self._fields(arguments="".join(self._pieces))
        if self.is_approval or status == "incomplete":
            yield "response.output_item.done", self._item_fields("incomplete")

    def complete(self, output: ToolOutput) -> Iterator[ItemEvent]:
        self._output = output
        status: CallStatus = "failed" if output.is_error else "completed"
        yield f"response.mcp_call.{status}", self._fields()
        yield "response.output_item.done", self._item_fields(status)

    def abandon(self) -> Iterator[ItemEvent]:
        yield "response.output_item.done", self._item_fields("incomplete")

    def item(self, status: CallStatus) -> dict[str, Any]:
        call, output = self._call, self._output
        item = {"id": self._id, "name": call.name, "arguments": "".join(self._pieces), "server_label": call.server}
        if self.is_approval:
            return {"type": mcp.APPROVAL_REQUEST, **item}
        return {
            "type": mcp.CALL,
            **item,
            "status": status,
            "approval_request_id": call.approval,
            "output": None if output is None or output.is_error else output.text,
            "error": _encode_error(output) if output is not None and output.is_error else None,
        }

    def _item_fields(self, status: CallStatus) -> dict[str, Any]:
        return {"output_index": self.index, "item": self.item(status)}

    def _fields(self, **fields: Any) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": self.index, **fields}


class WaitingCalls:
    """Calls that wait for their output. They have a place among the items of the response."""

    def __init__(self, items: list[dict[str, Any]]) -> None:
        self._items = items
        self._calls: dict[str, ServerCallItem] = {}

    def add(self, call: ServerCallItem) -> None:
        self._calls[call.call_id] = call
        self._items.append(call.item("calling"))

    def complete(self, output: ToolOutput) -> Iterator[ItemEvent]:
        call = self._calls.pop(output.call_id)
        return self._end(call, call.complete(output))

    def abandon(self) -> Iterator[ItemEvent]:
        """End the calls that get no output."""
        for call in self._calls.values():
            yield from self._end(call, call.abandon())
        self._calls.clear()

    def _end(self, call: ServerCallItem, events: Iterator[ItemEvent]) -> Iterator[ItemEvent]:
        for event in events:
            self._items[call.index] = event[1].get("item", self._items[call.index])
            yield event


def _encode_error(output: ToolOutput) -> dict[str, Any]:
    if output.code is None:
        content = [{"type": "text", "text": output.text}]
        return {"type": "mcp_tool_execution_error", "content": content}
    kind = "http_error" if output.code > 0 else "mcp_protocol_error"
    return {"type": kind, "code": output.code, "message": output.text}


def encode_listing(listing: ToolsListed, id_suffix: str, index: int) -> Iterator[ItemEvent]:
    item: dict[str, Any] = {
        "type": mcp.LIST,
        "id": mcp.ID_PREFIXES[mcp.LIST] + id_suffix,
        "server_label": listing.server,
        "tools": [],
        "error": None,
    }
    fields = {"item_id": item["id"], "output_index": index}
    yield "response.output_item.added", {"output_index": index, "item": item}
    yield "response.mcp_list_tools.in_progress", fields
    yield f"response.mcp_list_tools.{'completed' if listing.error is None else 'failed'}", fields
    tools = [
        {
            "name": tool.name,
            "description": tool.description,
            "input_schema": tool.input_schema,
            "annotations": {"read_only": tool.is_read_only},
        }
        for tool in listing.tools
    ]
    yield "response.output_item.done", {"output_index": index, "item": item | {"tools": tools, "error": listing.error}}
