"""The requests that a model server has received."""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import msgspec

from dragoman.core.errors import DECODE_ERRORS
from dragoman.core.request import GenerationRequest, Message, Tool
from dragoman.server.telemetry.recording import ExchangeRecording


class ReceivedRequest:
    """`generation` is the request as the model got it, the same for all protocols; None if it was refused before."""

    generation: GenerationRequest | None = None

    def __init__(self, request_id: str, path: str, headers: Mapping[str, str], body: bytes) -> None:
        self.id = request_id
        self.path = path
        self.headers = headers
        """The names are in lower case."""
        self.body = body

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.path} {self.text[:60]!r}>"

    @cached_property
    def json(self) -> Any:
        """The body as the client sent it; None if it is not JSON."""
        try:
            return msgspec.json.decode(self.body)
        except DECODE_ERRORS:
            return None

    @property
    def model(self) -> str | None:
        """The model that the client asked for."""
        return self.json.get("model") if isinstance(self.json, dict) else None

    @property
    def messages(self) -> tuple[Message, ...]:
        return () if self.generation is None else self.generation.messages

    @property
    def tools(self) -> tuple[Tool, ...]:
        return () if self.generation is None else self.generation.tools

    @property
    def text(self) -> str:
        """The text of the last user or tool message, or the prompt of a completion."""
        return "" if self.generation is None else self.generation.last_user_text


class BodyListener(ExchangeRecording):
    """Passes the body of a request on when it has arrived, and records nothing else."""

    def __init__(self, started: float, listener: Callable[[bytes], None]) -> None:
        super().__init__(started)
        self._listener = listener

    def note_request(self, body: bytes) -> None:
        self._listener(body)

    def note_reply(self, status: int, body: bytes) -> None:
        pass

    def note_piece(self, data: bytes) -> None:
        pass
