"""Callables of your own that the app calls for every generation.

    on_request   before the model starts; an error of `core.errors` that it raises refuses the request
    on_token     for each event between `Started` and `Finished`, with the index of its choice
    on_finish    once at the end, with the usage of all choices that ended, and the error that ended the request, if any

Rules
1. They are plain functions and run in the event loop: they must not block it.
2. A request whose model cannot answer ends with its error. The fallback model has a request of its own.
3. An exception of `on_finish` is logged; the reply is complete then.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass

from dragoman.core.errors import DragomanError, EngineFailed, Unavailable
from dragoman.core.events import Event, Finished, Started, Usage, total_usage
from dragoman.core.request import GenerationRequest
from dragoman.pipeline.generate import OnEvents

log = logging.getLogger("dragoman.hooks")


@dataclass(frozen=True, kw_only=True)
class Hooks:
    on_request: Callable[[GenerationRequest], None] | None = None
    on_token: Callable[[GenerationRequest, int, Event], None] | None = None
    on_finish: Callable[[GenerationRequest, Usage, DragomanError | None], None] | None = None
    """A client that disconnects, and a server that stops, are an `Unavailable` error."""

    async def run(
        self,
        request: GenerationRequest,
        on_events: OnEvents,
        generation: Callable[[OnEvents], Coroutine[None, None, None]],
    ) -> None:
        """Run a generation, which calls the function that it is given with all events."""
        usages: list[Usage] = []

        def pass_on(choice: int, events: Sequence[Event]) -> Awaitable[None] | None:
            for event in events:
                if type(event) is Finished:
                    usages.append(event.usage or Usage())
                elif self.on_token is not None and type(event) is not Started:
                    self.on_token(request, choice, event)
            return on_events(choice, events)

        error: DragomanError | None = None
        try:
            if self.on_request is not None:
                self.on_request(request)
            await generation(pass_on)
        except asyncio.CancelledError:
            error = Unavailable("the request was cancelled")
            raise
        except Exception as raised:
            error = raised if isinstance(raised, DragomanError) else EngineFailed("internal error")
            raise
        finally:
            self._finish(request, total_usage(usages), error)

    def _finish(self, request: GenerationRequest, usage: Usage, error: DragomanError | None) -> None:
        if self.on_finish is None:
            return
        try:
            self.on_finish(request, usage, error)
        except Exception:
            log.exception("request %s: on_finish raised", request.id, extra={"request_id": request.id})
