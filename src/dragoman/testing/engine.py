"""The engine of a model server: plays planned replies, and refuses requests that none of them fits.

A refusal is a 400, which SDKs do not repeat, and a failure of the test.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import NoReturn

import msgspec

from dragoman.core.errors import BadRequest, truncate
from dragoman.core.request import GenerationRequest
from dragoman.engines.scripted import ScriptedEngine, ScriptedOptions
from dragoman.engines.scripted_replies import ScriptedReply
from dragoman.formats.syntax import PLAIN
from dragoman.testing.checks import find_mismatches
from dragoman.testing.replies import PlannedReply

SHOWN = 80


class PlannedEngine(ScriptedEngine):
    """`on_request` is called with each request; `drop` breaks the connection of the request with an id."""

    def __init__(
        self,
        name: str,
        options: ScriptedOptions,
        on_request: Callable[[GenerationRequest], None],
        drop: Callable[[str], None],
    ) -> None:
        super().__init__(name, options)
        self.emits_tool_calls = options.format == PLAIN.name
        self.failures: list[str] = []
        self._planned: dict[int, PlannedReply] = {}
        """By the identity of the scripted reply, which several replies may be equal to."""
        self._on_request = on_request
        self._drop = drop

    def add(self, planned: PlannedReply) -> None:
        # A copy, so that the same reply can be planned twice.
        scripted = msgspec.structs.replace(planned.scripted)
        self._planned[id(scripted)] = msgspec.structs.replace(planned, scripted=scripted)
        self.script.add(scripted)

    @property
    def unplayed(self) -> list[PlannedReply]:
        """The replies of the script that were never played."""
        return [self._planned[id(reply)] for reply in self.script.unplayed]

    def choose_reply(self, request: GenerationRequest) -> ScriptedReply:
        self._on_request(request)
        chosen = self.script.choose(request)
        if chosen is None:
            left = len(self.unplayed)
            rest = f"{left} unplayed replies are for other requests" if left else "all its replies have been played"
            self._refuse(request, f"the script has no reply for it; {rest}")
        planned = self._planned[id(chosen)]
        if planned.is_checked and chosen.error is None and self.syntax is PLAIN:
            mismatches = list(find_mismatches(chosen, request))
            if mismatches:
                self._refuse(request, f"the scripted reply does not fit it: {'; '.join(mismatches)}")
        return chosen

    async def raise_error(self, reply: ScriptedReply, request: GenerationRequest) -> None:
        if self._planned[id(reply)].is_cut:
            self._drop(request.id)
            # The request is being cancelled.
            await asyncio.Event().wait()
        await super().raise_error(reply, request)

    def _refuse(self, request: GenerationRequest, reason: str) -> NoReturn:
        message = f"model server: request {truncate(request.last_user_text, SHOWN)!r}: {reason}"
        self.failures.append(message)
        raise BadRequest(message)


def describe(replies: Iterable[PlannedReply]) -> str:
    shown = []
    for planned in replies:
        scripted = planned.scripted
        calls = [f"{call.name}({call.arguments_text})" for call in scripted.calls]
        error = [] if scripted.error is None else [f"error {scripted.error.status or scripted.error.code}"]
        text = [repr(truncate(scripted.output, SHOWN))] if scripted.output else []
        shown.append(" ".join([*text, *calls, *error]) or "an empty reply")
    return "\n".join(f"- {line}" for line in shown)
