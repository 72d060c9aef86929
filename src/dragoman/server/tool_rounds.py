"""Runs a generation in rounds: the model calls tools of servers, Dragoman runs the calls, the model goes on.

    response := Started ToolsListed* approved* round+ Finished
    approved := ToolCallStart ToolCallDelta ToolOutput              a call of an earlier response
    round    := (TextDelta | ReasoningDelta | call)* (RoundEnded ToolOutput+)?

Rules
1. The rounds are one stream of events: it starts once and finishes once, with the usage of all rounds. The meter gets
   the events of each round as they are.
2. The calls of a round run at the same time, after the model has ended. Their outputs come in the order of the
   calls. Meanwhile the response holds no slot of the model.
3. A round is the last one if it has no calls of servers, or also calls for the client or such that need approval. Calls
   of servers run even then. A reply that was cut off ends at once.
4. A call above the limits is not run; that is an error for the model. After a second round without any call that has
   run, the response ends.
5. A forced call is forced in the first round only.
6. If the engine rejects the schemas of the tools, the servers check the arguments instead.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TypeVar

import msgspec

from dragoman.core.errors import InvalidSchema
from dragoman.core.events import Event, Finished, RoundEnded, Started, ToolCallStart, ToolOutput, total_usage
from dragoman.core.reply import ReplyBuilder
from dragoman.core.request import GenerationRequest, Message, Part, ToolCall, ToolChoice
from dragoman.pipeline.generate import ChoiceSlots, OnEvents
from dragoman.protocols.json_body import is_object
from dragoman.server.request_timer import RequestTimer
from dragoman.server.request_tools import RequestTools, as_result

GenerateRound = Callable[[GenerationRequest, OnEvents], Coroutine[None, None, None]]
T = TypeVar("T")
CUT_OFF = ("length", "content_filter")
SCHEMAS_NOT_ENFORCED = "the schemas of the tools of MCP servers are not enforced: {}"


class ToolRounds:
    """`generate_round` runs one generation. `measure` gets the events of every round."""

    def __init__(
        self,
        tools: RequestTools,
        max_rounds: int,
        generate_round: GenerateRound,
        slots: ChoiceSlots,
        timer: RequestTimer,
        measure: Callable[[int, Sequence[Event]], None],
    ) -> None:
        self.seconds_in_calls = 0.0
        """Seconds in which calls ran."""
        self._tools = tools
        self._max_rounds = max_rounds
        self._generate = generate_round
        self._slots = slots
        self._timer = timer
        self._measure = measure
        self._ended: list[Finished] = []
        self._warnings: list[str] = []

    async def run(self, request: GenerationRequest, deliver: OnEvents) -> None:
        """Run all rounds. `request` is complete: it has the tools as functions."""
        if request.approved_calls:
            await self._without_slot(self._tools.run_approved())
            request = self._tools.fill_results(request)
        calls_left, rounds_left, has_warned = request.max_tool_calls, self._max_rounds, False
        round_, request = await self._run_first_round(request, deliver)
        while True:
            ended = self._ended[-1]
            calls = round_.server_calls
            if not calls or ended.reason in CUT_OFF:
                break
            count = len(calls) if calls_left is None else min(len(calls), calls_left)
            runnable = calls[: count if rounds_left > 0 else 0]
            await _deliver(deliver, [RoundEnded()])
            outputs = await self._run_calls(runnable, calls[len(runnable) :])
            await _deliver(deliver, outputs)
            calls_left = None if calls_left is None else calls_left - len(runnable)
            rounds_left -= 1
            if round_.has_other_calls or (has_warned and not runnable):
                break
            has_warned = not runnable
            results = [Message("tool", (as_result(output),)) for output in outputs]
            request = self._next_request(request.with_reply(round_.message), results)
            if request.max_tokens == 0:
                self._ended[-1] = msgspec.structs.replace(ended, reason="length")
                break
            round_ = await self._run_round(request, deliver, opening=None)
        await _deliver(deliver, [self._finish(round_)])

    async def _run_first_round(
        self, request: GenerationRequest, deliver: OnEvents
    ) -> tuple["_Round", GenerationRequest]:
        """Run the first round. Returns the request with schemas that the engine accepts, too."""
        try:
            return await self._run_round(request, deliver, self._tools.opening), request
        except InvalidSchema as error:
            relaxed = self._tools.accept_any_arguments(request)
            if relaxed == request:
                raise
            self._warnings.append(SCHEMAS_NOT_ENFORCED.format(error.message))
            return await self._run_round(relaxed, deliver, self._tools.opening), relaxed

    async def _run_round(
        self, request: GenerationRequest, deliver: OnEvents, opening: Sequence[Event] | None
    ) -> "_Round":
        round_ = _Round(self._tools, deliver, opening, is_stream=request.delivery.stream, number=len(self._ended))

        def receive(choice: int, events: Sequence[Event]) -> Awaitable[None] | None:
            self._measure(choice, events)
            return round_.receive(events)

        await self._generate(request, receive)
        await _deliver(deliver, round_.held)
        self._ended.append(round_.finished)
        return round_

    async def _run_calls(self, runnable: Sequence[ToolCall], others: Sequence[ToolCall]) -> list[ToolOutput]:
        functions = self._tools.functions
        outputs: list[ToolOutput] = []
        if runnable:
            running = [self._tools.call(functions[call.name], call) for call in runnable]
            outputs += await self._without_slot(asyncio.gather(*running))
        message = "not run: the limit of calls in one response is reached"
        return [*outputs, *(ToolOutput(call.id, message, is_error=True) for call in others)]

    async def _without_slot(self, running: Awaitable[T]) -> T:
        """Wait without a slot of the model, and without the limit for an engine that produces nothing."""
        began = time.monotonic()
        self._slots.release()
        self._timer.note_running(0)
        result = await running
        await self._slots.acquire()
        self._timer.note_running(1)
        self.seconds_in_calls += time.monotonic() - began
        return result

    def _next_request(self, request: GenerationRequest, added: Sequence[Message]) -> GenerationRequest:
        limit, usage = request.max_tokens, self._ended[-1].usage
        choice = request.tool_choice
        if choice.mode in ("required", "named"):
            choice = ToolChoice(parallel=choice.parallel)
        return msgspec.structs.replace(
            request,
            messages=(*request.messages, *added),
            tool_choice=choice,
            max_tokens=None if limit is None else max(0, limit - (0 if usage is None else usage.completion)),
        )

    def _finish(self, round_: "_Round") -> Finished:
        last = self._ended[-1]
        usages = [ended.usage for ended in self._ended if ended.usage is not None]
        warnings = (*self._warnings, *(warning for ended in self._ended for warning in ended.warnings))
        # The calls of servers are over.
        is_over = last.reason == "tool_calls" and not round_.has_client_calls
        return msgspec.structs.replace(
            last,
            reason="stop" if is_over else last.reason,
            usage=total_usage(usages) if usages else None,
            warnings=tuple(dict.fromkeys(warnings)),
        )


class _Round:
    """One round of the model. Passes its events on, with calls of servers as such."""

    def __init__(
        self, tools: RequestTools, deliver: OnEvents, opening: Sequence[Event] | None, *, is_stream: bool, number: int
    ) -> None:
        """`opening` follows the start of the first round; None in a further one."""
        self.finished = Finished()
        self.held: list[Event] = []
        """Events that are passed on at the end: an engine may start again, unless the reply is streamed."""
        self._tools = tools
        self._deliver = deliver
        self._opening = opening
        self._is_stream = is_stream
        self._number = number
        self._builder = ReplyBuilder()
        self._ids: set[str] = set()

    def receive(self, events: Sequence[Event]) -> Awaitable[None] | None:
        if type(events[0]) is Started:
            self.held.clear()
            self._ids.clear()
        events = [self._unique(event) for event in events]
        self._builder.add(0, events)
        shown = [shown for event in events for shown in self._show(event)]
        if not self._is_stream:
            self.held += shown
            return None
        return self._deliver(0, shown) if shown else None

    def _unique(self, event: Event) -> Event:
        """Give a call another id if the engine has used it in this response. Only upstream servers do so."""
        if type(event) is not ToolCallStart:
            return event
        call_id = f"{event.id}_{self._number}" if self._number and not event.id.startswith("call_") else event.id
        while call_id in self._ids:
            call_id += "_"
        self._ids.add(call_id)
        return event if call_id == event.id else msgspec.structs.replace(event, id=call_id)

    def _show(self, event: Event) -> Sequence[Event]:
        if type(event) is Started:
            return () if self._opening is None else (event, *self._opening)
        if type(event) is Finished:
            self.finished = event
            return ()
        if type(event) is ToolCallStart and event.name in self._tools.functions:
            function = self._tools.functions[event.name]
            label, name = function.server.label, function.tool.name
            return (ToolCallStart(event.id, name, label, needs_approval=function.needs_approval),)
        return (event,)

    @property
    def _parts(self) -> tuple[Part, ...]:
        return self._builder.arrived()

    @property
    def message(self) -> Message:
        """The round as the next message of the conversation."""
        return Message("assistant", tuple([_repair(part) for part in self._parts]))

    @property
    def server_calls(self) -> list[ToolCall]:
        """The calls to run."""
        functions = self._tools.functions
        calls = [part for part in self._parts if isinstance(part, ToolCall) and part.name in functions]
        return [call for call in calls if not functions[call.name].needs_approval]

    @property
    def has_client_calls(self) -> bool:
        return any(isinstance(part, ToolCall) and part.name not in self._tools.functions for part in self._parts)

    @property
    def has_other_calls(self) -> bool:
        """Whether a call waits for the client."""
        return sum(isinstance(part, ToolCall) for part in self._parts) > len(self.server_calls)


def _repair(part: Part) -> Part:
    """Replace arguments that are not a JSON object, which templates and servers reject."""
    if isinstance(part, ToolCall) and not is_object(part.arguments):
        return msgspec.structs.replace(part, arguments="{}")
    return part


async def _deliver(deliver: OnEvents, events: Sequence[Event]) -> None:
    pause = deliver(0, events) if events else None
    if pause is not None:
        await pause
