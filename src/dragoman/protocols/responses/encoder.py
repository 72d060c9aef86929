"""Encodes a response as a stream of events or as a whole.

    stream    := response.created queued? response.in_progress item* (response.completed | response.incomplete)
               | response.created queued? response.in_progress item* error response.failed
    queued    := response.queued                                  of a background response
    compacted := added  compaction.compacting*            done    the first item, if there is one
    message   := added  content_part.added  output_text.delta*     output_text.done     content_part.done  done
    reasoning := added  content_part.added  reasoning_text.delta*  reasoning_text.done  content_part.done  done
    function  := added  function_call_arguments.delta*   function_call_arguments.done   done
    custom    := added  custom_tool_call_input.delta*    custom_tool_call_input.done    done
    other     := added  done                                      of MCP servers: see `mcp_items`

Rules
1. Events have consecutive sequence numbers. Each item is done before the next one starts, except calls of MCP servers.
2. The whole response is the one at the end of the stream.
3. A response without text and calls has an empty message, unless it is incomplete or only a compaction.
4. A response repeats fields of its request that are not part of a `GenerationRequest`. Therefore each request has its
   own `ResponseEncoding`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from dragoman.core.edits import ContextEvent
from dragoman.core.errors import BadRequest, ContextTooLong, DragomanError, QueueFull
from dragoman.core.events import (
    Event,
    Finished,
    FinishReason,
    ReasoningDelta,
    RoundEnded,
    Started,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
    ToolOutput,
    ToolsListed,
    Usage,
    total_usage,
)
from dragoman.core.reply import Reply
from dragoman.core.request import GenerationRequest
from dragoman.protocols import openai
from dragoman.protocols.responses import calls
from dragoman.protocols.responses.compaction_items import CompactionOutput
from dragoman.protocols.responses.frames import ItemEvent, encode_frame
from dragoman.protocols.responses.items import PREFIX
from dragoman.protocols.responses.mcp_items import ServerCallItem, WaitingCalls, encode_listing
from dragoman.protocols.responses.output_items import CallItem, ContentItem, Status
from dragoman.protocols.responses.reply_events import reply_events
from dragoman.protocols.responses.server import ResponseContext
from dragoman.protocols.wire_protocol import EVENT_STREAM

SAMPLING_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Shown if neither the request nor the configuration of the model has the parameter: the response always has them."""
INCOMPLETE_REASONS: dict[FinishReason, str] = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""Finish reasons of an incomplete response."""
ERROR_CODES: tuple[tuple[type[DragomanError], str], ...] = (
    (ContextTooLong, "context_length_exceeded"),
    (BadRequest, "invalid_prompt"),
    (QueueFull, "rate_limit_exceeded"),
    (DragomanError, "server_error"),
)
"""The first matching class decides the `code` of a failed response."""
QUEUED_EVENTS = ("response.created", "response.queued")


class ResponseEncoding:
    """Encodes the reply to one request. Afterwards `response` is the final response object.

    `queued` is the creation time of a background response that was queued; its stream has begun then.
    """

    stream_type = EVENT_STREAM

    def __init__(self, context: ResponseContext, clock: Callable[[], float], queued: float | None = None) -> None:
        self.response: dict[str, Any] | None = None
        self.context = context
        self.clock = clock
        self.was_queued = queued is not None
        self.first_number = len(QUEUED_EVENTS) if self.was_queued else 0
        """The sequence number of the first event."""
        self.created = int(clock() if queued is None else queued)

    def encode_queued(self, request: GenerationRequest) -> tuple[dict[str, Any], bytes]:
        """Return a background response that has not begun, and the first frames of its stream."""
        encoder = ResponseEncoder(self, request)
        response = encoder.snapshot("queued")
        return response, encoder.frames((name, {"response": response}) for name in QUEUED_EVENTS)

    def encode_stream(self, request: GenerationRequest, created: int) -> "ResponseEncoder":
        return ResponseEncoder(self, request)

    def encode_reply(self, request: GenerationRequest, created: int, reply: Reply) -> dict[str, Any]:
        encoder = ResponseEncoder(self, request)
        if reply.edited is not None:
            list(encoder.context_events(reply.edited))
        for event in reply_events(reply.choices[0], reply.usage):
            for _ in encoder.item_events(event):
                pass
        return encoder.finish()


class ResponseEncoder:
    def __init__(self, encoding: ResponseEncoding, request: GenerationRequest) -> None:
        self._encoding = encoding
        self._request = request
        self._number = encoding.first_number
        self._is_started = False
        self._needs_message = True
        self._output: list[dict[str, Any]] = []
        self._open: ContentItem | CallItem | ServerCallItem | None = None
        self._message: ContentItem | None = None
        """The open item, if it is a message."""
        self._waiting = WaitingCalls(self._output)
        self._pending_logprobs: list[TokenLogprob] = []
        """Logprobs that arrived before their text."""
        self._finished = Finished()
        self._compaction = CompactionOutput(self._id_suffix)

    def feed(self, choice: int, events: Sequence[Event]) -> bytes:
        return b"".join([self._encode(event) for event in events])

    def feed_context(self, event: ContextEvent) -> bytes:
        return self.frames(self.context_events(event))

    def context_events(self, event: ContextEvent) -> Iterator[ItemEvent]:
        yield from self._compaction.events(event, () if self._is_started else self._begin())
        if self._compaction.item is not None:
            self._output.append(self._compaction.item)

    def _encode(self, event: Event) -> bytes:
        message = self._message
        if message is not None and type(event) is TextDelta and event.text and not event.logprobs:
            # By far the most common event.
            message.pieces.append(event.text)
            number = self._number
            self._number += 1
            return message.delta_prefix + msgspec.json.encode(event.text) + b',"sequence_number":%d}\n\n' % number
        return self.frames(self.item_events(event))

    def item_events(self, event: Event) -> Iterator[ItemEvent]:
        if isinstance(event, TextDelta):
            yield from self._text(event)
        elif isinstance(event, ReasoningDelta):
            if event.text:
                if not isinstance(self._open, ContentItem) or self._message is not None:
                    yield from self._start_content(is_message=False)
                yield from self._add(event.text)
            if event.signature and isinstance(self._open, ContentItem) and self._message is None:
                yield from self._close("completed")
        elif isinstance(event, ToolCallStart):
            yield from self._close("completed")
            self._needs_message = False
            self._open = self._call_item(event)
            yield from self._open.begin()
        elif isinstance(event, ToolCallDelta):
            yield from self._add(event.arguments)
        elif isinstance(event, Started):
            if not self._is_started:
                yield from self._begin()
        elif isinstance(event, ToolsListed):
            yield from self._add_done(encode_listing(event, self._id_suffix, len(self._output)))
        elif isinstance(event, RoundEnded | ToolOutput):
            yield from self._close("completed")
            if isinstance(event, ToolOutput):
                yield from self._waiting.complete(event)
        else:
            self._finished = event
            yield from self._close("incomplete" if event.reason in INCOMPLETE_REASONS else "completed")
            yield from self._waiting.abandon()
            if self._needs_message and event.reason not in (*INCOMPLETE_REASONS, "compaction"):
                yield from self._start_content(is_message=True)
                if self._pending_logprobs:
                    yield from self._add("", self._pending_logprobs)
                yield from self._close("completed")

    def _begin(self) -> Iterator[ItemEvent]:
        self._is_started = True
        response = self.snapshot("in_progress")
        if not self._encoding.was_queued:
            yield "response.created", {"response": response}
        yield "response.in_progress", {"response": response}

    def _text(self, event: TextDelta) -> Iterator[ItemEvent]:
        if not event.text and self._message is None:
            self._pending_logprobs += event.logprobs
            return
        if self._message is None:
            yield from self._start_content(is_message=True)
        logprobs = (*self._pending_logprobs, *event.logprobs)
        self._pending_logprobs.clear()
        if event.text or logprobs:
            yield from self._add(event.text, logprobs)

    @property
    def _id_suffix(self) -> str:
        return f"{self._request.id.removeprefix(PREFIX)}_{len(self._output)}"

    def _start_content(self, is_message: bool) -> Iterator[ItemEvent]:
        yield from self._close("completed")
        encrypts = self._encoding.context.encrypts_reasoning
        self._open = item = ContentItem(is_message, self._id_suffix, len(self._output), encrypts)
        if is_message:
            self._message, self._needs_message = item, False
        yield from item.begin()

    def _call_item(self, call: ToolCallStart) -> CallItem | ServerCallItem:
        if call.server is not None:
            return ServerCallItem(call, self._id_suffix, len(self._output))
        tool = self._encoding.context.client_tools.get(call.name) or calls.ClientTool("function", call.name)
        return CallItem(tool, call.id, self._id_suffix, len(self._output))

    def _add(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> Iterator[ItemEvent]:
        return iter(()) if self._open is None else self._open.add(text, logprobs)

    def _close(self, status: Status) -> Iterator[ItemEvent]:
        item, self._open, self._message = self._open, None, None
        if isinstance(item, ServerCallItem) and item.is_approval is (status == "incomplete"):
            # A call waits for its output. A request for approval without all arguments is left out.
            if not item.is_approval:
                yield from item.finish(status)
                self._waiting.add(item)
        elif item is not None:
            yield from self._add_done(item.finish(status))

    def _add_done(self, events: Iterator[ItemEvent]) -> Iterator[ItemEvent]:
        """Add the item that the last event has."""
        *_, (_, fields) = complete = list(events)
        self._output.append(fields["item"])
        yield from complete

    def end(self) -> bytes:
        response = self.finish()
        frames = self.frames([(f"response.{response['status']}", {"response": response})])
        # If the response cannot be stored, the end is not sent, and `fail` takes its number.
        self._number -= 1
        return frames

    def finish(self) -> dict[str, Any]:
        """Return the final response."""
        finished = self._finished
        usage = encode_usage(total_usage([self._compaction.usage, finished.usage or Usage()]))
        reason = INCOMPLETE_REASONS.get(finished.reason)
        if reason is not None:
            response = self.snapshot("incomplete", usage=usage, incomplete_details={"reason": reason})
        else:
            response = self.snapshot("completed", usage=usage, completed_at=int(self._encoding.clock()))
        self._encoding.response = response
        return response

    def fail(self, error: DragomanError) -> bytes:
        opening = b"" if self._is_started else self.frames(self._begin())
        fields = {"code": error_code(error), "message": error.message}
        param = "input" if isinstance(error, ContextTooLong) else error.param
        # The stream has no further events of items.
        list(self._waiting.abandon())
        self._encoding.response = response = self.snapshot("failed", error=fields)
        return opening + self.frames(
            [("error", {**fields, "param": param}), ("response.failed", {"response": response})]
        )

    def snapshot(self, status: Status, **fields: Any) -> dict[str, Any]:
        """Return the response as it is now."""
        return {
            "id": self._request.id,
            "object": "response",
            "created_at": self._encoding.created,
            "model": self._request.model,
            **self._encoding.context.echoed,
            "service_tier": openai.service_tier(self._request),
            **{
                name: default if (value := getattr(self._request.sampling, name)) is None else value
                for name, default in SAMPLING_DEFAULTS.items()
            },
            "status": status,
            "output": list(self._output),
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "usage": None,
            **fields,
        }

    def frames(self, events: Iterable[ItemEvent]) -> bytes:
        frames = bytearray()
        for name, fields in events:
            frames += encode_frame(name, fields, self._number)
            self._number += 1
        return bytes(frames)


def error_code(error: DragomanError) -> str:
    """The `code` of a failed response."""
    return next(code for kind, code in ERROR_CODES if isinstance(error, kind))


def encode_usage(usage: Usage) -> Mapping[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": usage.kept},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }
