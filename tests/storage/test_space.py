"""The limit of what one principal stores."""

from pathlib import Path

import msgspec
import pytest

from dragoman.config.settings import Settings
from dragoman.core.errors import StorageUnavailable, TooLarge
from dragoman.storage import space
from dragoman.storage.batches import BatchStore, NewBatch
from dragoman.storage.blobs import BlobStore
from dragoman.storage.conversations import ConversationStore
from dragoman.storage.database import Database
from dragoman.storage.files import FileStore, NewFile
from dragoman.storage.response_values import EndedResponse, StoredItem, StoredResponse
from dragoman.storage.responses import ResponseStore
from dragoman.storage.space import SpaceLimit

DAY, MOST = 86400.0, 10_000
LARGE = b"x" * 6000


class Stores:
    def __init__(self, database: Database, blobs: BlobStore) -> None:
        limit = SpaceLimit(database, MOST)
        self.blobs = blobs
        self.files = FileStore(database, blobs, DAY, limit)
        self.batches = BatchStore(database, self.files, DAY)
        self.responses = ResponseStore(database, Settings(), limit)
        self.conversations = ConversationStore(database, DAY, None, MOST, limit)

    async def add_file(self, principal: str) -> None:
        await self.files.add(NewFile(principal, "a", "batch", self.blobs.add(LARGE + principal.encode())))

    async def add_batch(self, principal: str) -> None:
        blob = self.blobs.add(LARGE + principal.encode())
        batch = NewBatch(
            api="anthropic",
            principal=principal,
            caller=b"",
            endpoint="/v1/messages",
            window="24h",
            seconds=DAY,
            blob=blob,
        )
        await self.batches.add(batch)

    async def add_conversation(self, principal: str) -> None:
        await self.conversations.create(principal, b"{}", [StoredItem("a", msgspec.json.encode({"a": LARGE.decode()}))])

    async def queue_response(self, principal: str) -> None:
        response = StoredResponse(f"resp_{principal}", principal, 1.0, "queued", b"{}", is_background=True)
        await self.responses.queue(response, LARGE, b"data: {}\n\n")


@pytest.fixture
def stores(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stores:
    monkeypatch.setattr(space, "RETRY_SECONDS", -1.0)
    return Stores(database, BlobStore(tmp_path / "blobs"))


KINDS = ("add_file", "add_batch", "add_conversation", "queue_response")


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", KINDS[:3])
async def test_everything_of_one_principal_counts_together(stores: Stores, first: str, second: str) -> None:
    await getattr(stores, first)("ann")
    with pytest.raises(TooLarge):
        await getattr(stores, second)("ann")
    with pytest.raises(TooLarge):
        await getattr(stores, second)("ann")
    await getattr(stores, second)("bob")


async def test_refused_file_leaves_no_content(stores: Stores) -> None:
    await stores.add_conversation("ann")
    for add in (stores.add_file, stores.add_batch):
        with pytest.raises(TooLarge):
            await add("ann")
    assert not list(stores.blobs.directory.glob("[0-9a-f][0-9a-f]/*"))


async def test_deleting_makes_room(stores: Stores) -> None:
    await stores.add_file("ann")
    [file] = (await stores.files.list("ann")).files
    with pytest.raises(TooLarge):
        await stores.add_conversation("ann")
    await stores.files.delete("ann", file.id)
    await stores.add_conversation("ann")


async def test_response_without_room_is_not_stored(stores: Stores) -> None:
    await stores.add_file("ann")
    response = StoredResponse("resp_1", "ann", 1.0, "completed", LARGE)
    with pytest.raises(StorageUnavailable, match="principal_bytes"):
        await stores.responses.keep(EndedResponse(response, (), (), None, is_recorded=False, should_store=True))
    assert await stores.responses.find("ann", "resp_1") is None
