"""What has been said so far, for whoever wants the whole reply, or wants to know how far it came."""

from collections.abc import Sequence

import msgspec

from dragoman.client.python_types import Shape
from dragoman.core.errors import DragomanError, OutputMismatch, StreamCutOff
from dragoman.core.events import Event, Finished
from dragoman.core.reply import Collection, Reply


class Gathering:
    def __init__(self, shape: Shape | None) -> None:
        self._shape = shape
        self._collection = Collection()
        self._is_complete = False

    def add(self, events: Sequence[Event]) -> Sequence[Event]:
        self._collection.add(0, events)
        self._is_complete = self._is_complete or (bool(events) and type(events[-1]) is Finished)
        return events

    def note(self, error: DragomanError) -> None:
        """Lets an error know what had arrived."""
        error.arrived = self._collection.arrived()

    def reply(self) -> Reply:
        if not self._is_complete:
            early = StreamCutOff(
                "there is no reply yet: not all of its events have been read, or the stream was closed"
            )
            self.note(early)
            raise early
        reply = self._collection.reply()
        if self._shape is None or (reply.tool_calls and not reply.text):
            return reply
        try:
            output = self._shape.read(reply.text)
        except ValueError as error:
            ended = "; it was cut short" if reply.reason == "length" else ""
            mismatch = OutputMismatch(f"the reply is not the {self._shape.name} that was asked for: {error}{ended}")
            self.note(mismatch)
            raise mismatch from error
        return msgspec.structs.replace(reply, output=output)
