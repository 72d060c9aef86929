from typing import Any

import pytest

from dragoman.storage.response_store import OVERHEAD, MemoryResponseStore, StoredItem, StoredResponse


def response(name: str, *, principal: str = "ann", body: bytes = b"{}", items: tuple[str, ...] = ()) -> StoredResponse:
    return StoredResponse(name, principal, body, tuple(StoredItem(item, item.encode()) for item in items), ())


def store(count: int = 10, size: int = 100_000, seconds: float = 10) -> MemoryResponseStore:
    return MemoryResponseStore(count=count, size=size, seconds=seconds)


async def test_response_is_visible_only_to_its_principal() -> None:
    kept = store()
    one = response("r1", items=("i1",))
    await kept.keep(one)
    assert await kept.find("ann", "r1") == one
    assert await kept.find("bob", "r1") is None
    assert await kept.items("ann", ["i1", "i2"]) == {"i1": b"i1"}
    assert await kept.items("bob", ["i1"]) == {}
    assert not await kept.delete("bob", "r1")
    assert await kept.delete("ann", "r1")
    assert not await kept.delete("ann", "r1")
    assert await kept.items("ann", ["i1"]) == {}


async def test_oldest_response_is_evicted() -> None:
    kept = store(count=2)
    for name in ("r1", "r2", "r3"):
        await kept.keep(response(name))
    assert [await kept.find("ann", name) is not None for name in ("r1", "r2", "r3")] == [False, True, True]


async def test_total_size_is_limited() -> None:
    kept = store(size=3 * (OVERHEAD + 1000))
    for number in range(50):
        await kept.keep(response(f"r{number}", body=b"x" * 1000))
    assert len(kept) == 3
    await kept.keep(response("huge", body=b"x" * 100_000))
    assert len(kept) == 3
    assert await kept.find("ann", "huge") is None
    for number in range(50):
        await kept.delete("ann", f"r{number}")
    assert (len(kept), kept._bytes, kept._item_bodies) == (0, 0, {})


async def test_invalid_response_changes_nothing() -> None:
    kept = store(count=1)
    await kept.keep(response("r1", items=("i1",)))
    nameless: Any = {"a": 1}
    odd = StoredResponse("r2", "bob", b"{}", (StoredItem("i2", b"{}"), StoredItem(nameless, b"{}")), ())
    used = kept._bytes
    with pytest.raises(TypeError):
        await kept.keep(odd)
    assert (len(kept), kept._bytes, list(kept._item_bodies)) == (1, used, [("ann", "i1")])
    await kept.keep(response("r3"))
    assert await kept.find("ann", "r3") is not None


async def test_responses_expire() -> None:
    now = [0.0]
    kept = MemoryResponseStore(count=10, size=10_000, seconds=5, clock=lambda: now[0])
    await kept.keep(response("r1", items=("i1",)))
    now[0] = 4
    await kept.keep(response("r2", items=("i2",)))
    now[0] = 5
    assert await kept.find("ann", "r1") is None
    assert await kept.items("ann", ["i1", "i2"]) == {"i2": b"i2"}


async def test_item_is_kept_while_a_response_has_it() -> None:
    kept = store()
    await kept.keep(response("r1", items=("i1",)))
    await kept.keep(response("r2", items=("i1", "i2")))
    await kept.delete("ann", "r2")
    assert await kept.items("ann", ["i1", "i2"]) == {"i1": b"i1"}


async def test_same_id_replaces_the_response() -> None:
    kept = store()
    await kept.keep(response("r1", items=("i1",)))
    await kept.keep(response("r1", body=b"[]"))
    found = await kept.find("ann", "r1")
    assert found is not None
    assert found.body == b"[]"
    assert await kept.items("ann", ["i1"]) == {}
