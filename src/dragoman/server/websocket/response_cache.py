"""Caches the responses of WebSocket connections, so that later requests of a connection can continue them.

Rules
1. A response is cached with its whole conversation, whether or not it is stored.
2. A connection caches at most `MAX_RESPONSES` responses and `CONNECTION_BYTES`, all connections of a process
   together `PROCESS_BYTES`. Those that were used least recently are forgotten first. Their clients send the whole
   conversation again.
3. A response belongs to the principal that created it.
4. If a request fails that continues a response of its own stream, that response is forgotten, as OpenAI does.
5. Everything is forgotten with the connection.
"""

from collections import OrderedDict
from typing import NamedTuple

from dragoman.storage.response_values import StoredItem

RESPONSE_CACHE = "dragoman.response_cache"
"""The extension of the ASGI scope of a request of a WebSocket. Its value is the `RequestResponseCache`."""
MAX_RESPONSES = 64
CONNECTION_BYTES = 64 * 1024 * 1024
PROCESS_BYTES = 256 * 1024 * 1024
ITEM_BYTES = 200
"""What an item takes besides its JSON."""

Items = tuple[StoredItem, ...]


class CachedResponse(NamedTuple):
    principal: str
    items: Items
    stream_id: str | None
    size: int


class ProcessResponseCache:
    """The sizes of all cached responses of a process."""

    def __init__(self) -> None:
        self.size = 0
        self._recent: OrderedDict[tuple[ConnectionResponseCache, str], None] = OrderedDict()

    def use(self, connection: "ConnectionResponseCache", response_id: str) -> None:
        self._recent[connection, response_id] = None
        self._recent.move_to_end((connection, response_id))

    def remove(self, connection: "ConnectionResponseCache", response_id: str) -> None:
        del self._recent[connection, response_id]

    def shrink(self) -> None:
        while self.size > PROCESS_BYTES and len(self._recent) > 1:
            connection, response_id = next(iter(self._recent))
            connection.forget(response_id)


class ConnectionResponseCache:
    def __init__(self, process: ProcessResponseCache) -> None:
        self._process = process
        self._responses: OrderedDict[str, CachedResponse] = OrderedDict()
        self._size = 0

    def find(self, response_id: str) -> CachedResponse | None:
        found = self._responses.get(response_id)
        if found is not None:
            self._responses.move_to_end(response_id)
            self._process.use(self, response_id)
        return found

    def add(self, response_id: str, response: CachedResponse) -> None:
        self.forget(response_id)
        self._responses[response_id] = response
        self._change_size(response.size)
        self._process.use(self, response_id)
        while len(self._responses) > 1 and (len(self._responses) > MAX_RESPONSES or self._size > CONNECTION_BYTES):
            self.forget(next(iter(self._responses)))
        self._process.shrink()

    def forget(self, response_id: str) -> None:
        forgotten = self._responses.pop(response_id, None)
        if forgotten is not None:
            self._change_size(-forgotten.size)
            self._process.remove(self, response_id)

    def close(self) -> None:
        for response_id in list(self._responses):
            self.forget(response_id)

    def _change_size(self, change: int) -> None:
        self._size += change
        self._process.size += change


class RequestResponseCache:
    """The cache of the connection, as one of its requests uses it."""

    def __init__(self, connection: ConnectionResponseCache, stream_id: str | None) -> None:
        self._connection = connection
        self._stream_id = stream_id
        self._continued: str | None = None

    def find(self, principal: str, response_id: str) -> Items | None:
        """The conversation up to the end of a response, which the request continues."""
        found = self._connection.find(response_id)
        if found is None or found.principal != principal:
            return None
        if found.stream_id == self._stream_id:
            self._continued = response_id
        return found.items

    def remember(self, principal: str, response_id: str, items: Items) -> None:
        size = sum(len(item.body) + ITEM_BYTES for item in items)
        self._connection.add(response_id, CachedResponse(principal, items, self._stream_id, size))

    def forget_continued(self) -> None:
        """The request has failed."""
        if self._continued is not None:
            self._connection.forget(self._continued)
