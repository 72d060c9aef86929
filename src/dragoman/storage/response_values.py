"""The values of stored responses, and the interface of their store for the code that answers requests.

    queued ──> in_progress ──> completed | incomplete | failed | cancelled

A background response begins as queued. A streamed one is recorded while it runs, so it begins as in_progress. Any other
response is stored when it has ended.
"""

from collections.abc import Iterable, Mapping
from typing import Literal, Protocol

import msgspec

ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
EarlyEnd = Literal["failed", "cancelled"]
RUNNING: tuple[ResponseStatus, ...] = ("queued", "in_progress")


class StoredItem(msgspec.Struct, frozen=True):
    """An item of a response or a conversation; `body` is its JSON."""

    id: str
    body: bytes


class StoredResponse(msgspec.Struct, frozen=True):
    """`body` is the JSON of the response, including its output."""

    id: str
    principal: str
    created: float
    status: ResponseStatus
    body: bytes
    is_background: bool = False

    @property
    def is_running(self) -> bool:
        return self.status in RUNNING


class ResponseItems(msgspec.Struct, frozen=True):
    status: ResponseStatus
    input: tuple[StoredItem, ...]
    output: tuple[StoredItem, ...]


class RecordedEvents(msgspec.Struct, frozen=True):
    """Frames of a stream; `first` is the sequence number of the first one."""

    first: int
    frames: bytes


class Recording(msgspec.Struct, frozen=True):
    """Events of a response that runs. The first recording of a response makes it in_progress, with the body that it has
    then; later ones need no body."""

    response: StoredResponse
    events: RecordedEvents
    is_first: bool


class EndedResponse(msgspec.Struct, frozen=True):
    """A response that has ended. The last `added` items of its input, and its output, are added to the conversation.

    `is_recorded`: the response is in the database already. Without `should_store` only the conversation is changed.
    """

    response: StoredResponse
    input: tuple[StoredItem, ...]
    output: tuple[StoredItem, ...]
    events: RecordedEvents | None = None
    is_recorded: bool = False
    should_store: bool = True
    conversation: str | None = None
    added: int = 0

    @property
    def new_items(self) -> tuple[StoredItem, ...]:
        return self.input[len(self.input) - self.added :] + self.output


class EventPage(msgspec.Struct, frozen=True):
    """Frames of a stream; `last` is the sequence number of the last one. `has_ended`: no others will follow."""

    frames: bytes
    last: int
    has_ended: bool


class StoredResponses(Protocol):
    """The interface of the response store, in the parent and in front ends. All methods may raise `StorageUnavailable`.

    Methods about a response return None if it does not exist, or belongs to another principal.
    """

    async def check(self, principal: str) -> None:
        """Raise `StorageUnavailable` if a write is known to fail, `TooLarge` if the principal has no room."""

    async def keep(self, ended: EndedResponse) -> bool:
        """Store a response that has ended. False: it was cancelled or deleted meanwhile."""

    async def record(self, recording: Recording) -> bool:
        """Store events of a response that runs. False: it was cancelled or deleted meanwhile."""

    async def end_early(self, response_id: str, status: EarlyEnd, code: str, message: str) -> None:
        """End a recorded response that no longer runs, as failed or cancelled."""

    async def find(self, principal: str, response_id: str) -> StoredResponse | None: ...

    async def find_items(self, principal: str, response_id: str) -> ResponseItems | None: ...

    async def items(self, principal: str, ids: Iterable[str]) -> Mapping[str, bytes]:
        """The bodies of the items that exist, in any response."""

    async def read_events(self, principal: str, response_id: str, after: int) -> EventPage | None:
        """Events after this sequence number. If there are no events yet, wait up to a second for some."""

    async def conversation_items(self, principal: str, conversation_id: str) -> tuple[StoredItem, ...] | None:
        """The items of a conversation."""
