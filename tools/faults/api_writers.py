"""Writers of stored responses, conversations and batches for `storage_kills`."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import msgspec
from sqlalchemy import func
from sqlalchemy import select as select_rows

from dragoman.core.events import Usage
from dragoman.protocols.batch_lines import InputLine, LineResult
from dragoman.protocols.batches import Api
from dragoman.protocols.responses.frames import count_frames, encode_frame
from dragoman.server.batches.results import ResultWriter
from dragoman.storage.batch_states import StoredBatch, next_step
from dragoman.storage.batches import FIRST, SERVER_PRINCIPAL, NewBatch
from dragoman.storage.response_values import (
    RUNNING,
    EndedResponse,
    RecordedEvents,
    Recording,
    ResponseStatus,
    StoredItem,
    StoredResponse,
)
from dragoman.storage.tables import responses as responses_table
from tools.faults.storage_writers import Acknowledge, Found, Stores, Writer

ANN = "user:ann"
QUEUED, UNKNOWN, DELETED = "queued", None, False
"""What is known of a response that was not acknowledged as complete."""
MAX_LINES = 60
LINES_AT_ONCE = 8


class ResponseWrites(Writer):
    """Responses that are stored when they end, streams that are recorded, and background responses."""

    async def run(self, stores: Stores, random: Random, acknowledge: Acknowledge) -> None:
        store = stores.responses
        while True:
            response_id, size = f"resp_{random.getrandbits(64):x}", random.choice((1, 10, 1000))
            is_background, is_stream = random.choice(((False, False), (False, True), (True, True)))
            if is_background:
                await store.queue(_response(response_id, "queued"), _request(response_id), _frame(0).frames)
                acknowledge([response_id, QUEUED])
                if random.random() < 0.3:
                    continue
            frames = int(is_background)
            for _ in range(random.randint(1, 3) if is_stream else 0):
                running = _response(response_id, "in_progress", is_background=is_background)
                await store.record(Recording(running, _frame(frames), frames == int(is_background)))
                frames += 1
            await store.keep(_ended(response_id, size, frames if is_stream else None))
            acknowledge([response_id, [size, frames + 1 if is_stream else 0]])
            if random.random() < 0.2:
                acknowledge([response_id, UNKNOWN])
                await store.delete(ANN, response_id)
                acknowledge([response_id, DELETED])

    async def check(self, stores: Stores, known: dict[str, Any], found: Found) -> None:
        store = stores.responses
        for lost in await store.close_lost():
            found.expect(lost.request == _request(lost.id), "the request of a queued response is damaged")
            running = _response(lost.id, "in_progress", is_background=True)
            is_started = await store.record(Recording(running, _frame(1), is_first=True))
            found.expect(is_started and await store.keep(_ended(lost.id, 1, 2)), "a queued response does not run")
        query = select_rows(func.count()).where(responses_table.c.status.in_(RUNNING))
        left = await stores.database.read(lambda connection: connection.execute(query).scalar_one())
        found.expect(left == 0, "a response is still queued or in progress")
        for response_id, value in known.items():
            response = await store.find(ANN, response_id)
            if value is DELETED:
                found.expect(response is None, "a deleted response is there again")
            elif value == QUEUED:
                has_ended = response is not None and response.status in ("completed", "failed")
                found.expect(has_ended, "an acknowledged background response is missing")
            elif value is not UNKNOWN:
                found.expect(await _is_whole(stores, response_id, *value), "an acknowledged response is not whole")


def _response(
    response_id: str, status: ResponseStatus, size: int = 1, *, is_background: bool = False
) -> StoredResponse:
    body = msgspec.json.encode({"id": response_id, "status": status, "output": [], "text": response_id * size})
    return StoredResponse(response_id, ANN, 1.0, status, body, is_background or status == "queued")


def _request(response_id: str) -> bytes:
    return f"request of {response_id}".encode()


def _frame(number: int) -> RecordedEvents:
    return RecordedEvents(number, encode_frame("response.test", {}, number))


def _items(response_id: str, size: int) -> tuple[StoredItem, ...]:
    return tuple(StoredItem(f"{response_id}_{at}", b"x" * size) for at in range(2))


def _ended(response_id: str, size: int, frames: int | None) -> EndedResponse:
    """`frames` is the number of those that are recorded; None if the response was not recorded."""
    response, (asked, answered) = _response(response_id, "completed", size), _items(response_id, size)
    events = None if frames is None else _frame(frames)
    return EndedResponse(response, (asked,), (answered,), events, is_recorded=frames is not None)


async def _is_whole(stores: Stores, response_id: str, size: int, frames: int) -> bool:
    response = await stores.responses.find(ANN, response_id)
    items = await stores.responses.find_items(ANN, response_id)
    page = await stores.responses.read_events(ANN, response_id, -1)
    if response is None or items is None or page is None:
        return False
    is_same = response.body == _response(response_id, "completed", size).body
    return is_same and items.input + items.output == _items(response_id, size) and count_frames(page.frames) == frames


class ConversationWrites(Writer):
    """Calls that add items to a conversation. Every other one stores a response in the same transaction."""

    async def run(self, stores: Stores, random: Random, acknowledge: Acknowledge) -> None:
        while True:
            conversation = (await stores.conversations.create(ANN, b"{}", ())).id
            acknowledge([conversation, 0])
            for call in range(1, random.randint(2, 30)):
                count = random.randint(1, 5)
                items = tuple(_item(call, at, count) for at in range(count))
                if call % 2:
                    await stores.conversations.append(ANN, conversation, items)
                else:
                    response = _response(f"{conversation}_{call}", "completed")
                    await stores.responses.keep(
                        EndedResponse(response, items, (), conversation=conversation, added=count)
                    )
                acknowledge([conversation, call])

    async def check(self, stores: Stores, known: dict[str, Any], found: Found) -> None:
        for conversation, calls in known.items():
            items = await stores.responses.conversation_items(ANN, conversation)
            if items is None:
                found.problems["an acknowledged conversation is missing"] += 1
                continue
            parts = [tuple(map(int, item.id.split("_")[1:])) for item in items]
            last = parts[-1][0] if parts else 0
            counts = {call: count for call, _, count in parts}
            whole = [_item(call, at, count) for call, count in counts.items() for at in range(count)]
            found.expect(list(counts) == list(range(1, last + 1)) and last >= calls, "acknowledged items are missing")
            found.expect(list(items) == whole, "items of one call are missing or damaged")
            for call in range(2, last + 2, 2):
                response = await stores.responses.find(ANN, f"{conversation}_{call}")
                found.expect((response is not None) == (call <= last), "a response without its items, or the reverse")


def _item(call: int, at: int, count: int) -> StoredItem:
    return StoredItem(f"item_{call}_{at}_{count}", b"%d of %d" % (at, call))


class BatchWrites(Writer):
    """Batches whose lines are answered, sometimes twice at the same time. The next child continues what one leaves."""

    tasks = 1

    async def run(self, stores: Stores, random: Random, acknowledge: Acknowledge) -> None:
        await stores.batches.claim()
        while True:
            for batch in await stores.batches.list_own():
                await self._step(stores, batch, random, acknowledge)
                break
            else:
                blob = await asyncio.to_thread(stores.blobs.add, random.randbytes(100))
                apis: tuple[Api, Api] = ("openai", "anthropic")
                new = NewBatch(
                    api=random.choice(apis),
                    principal=ANN,
                    caller=b"",
                    endpoint="/v1/chat/completions",
                    window="24h",
                    seconds=86400.0,
                    blob=blob,
                    total=(total := random.randint(1, MAX_LINES)),
                )
                batch = await stores.batches.add(new)
                acknowledge([batch.id, total])

    async def _step(self, stores: Stores, batch: StoredBatch, random: Random, acknowledge: Acknowledge) -> None:
        store, step = stores.batches, next_step(batch)
        if step == "write_results":
            await ResultWriter(store, stores.files, stores.blobs).write(batch)
        elif step == "validate":
            await store.remove_lines(batch.id, is_reading=True)
            lines = [InputLine(at, 10 * at, 9, f"n{at}") for at in range(1, batch.total + 1)]
            for some in (lines[::2], lines[1::2]):
                await store.add_lines(batch.id, some)
            await store.note_validated(batch.id, batch.total, (), 0)
        elif waiting := await store.read_waiting(batch.id, FIRST, LINES_AT_ONCE):
            numbers = [line.number for line in waiting for _ in range(random.choice((1, 1, 2)))]
            await asyncio.gather(*(self._answer(stores, batch.id, at, random, acknowledge) for at in numbers))
        else:
            await store.finalize(batch.id)

    async def _answer(
        self, stores: Stores, batch_id: str, number: int, random: Random, acknowledge: Acknowledge
    ) -> None:
        name, status = f"{random.getrandbits(64):x}", random.choice((200, 200, 400))
        result = LineResult(status, name, msgspec.json.encode({"id": name}))
        if await stores.batches.record(batch_id, number, result, Usage(1, 1)):
            acknowledge([f"{batch_id} n{number}", name])

    async def check(self, stores: Stores, known: dict[str, Any], found: Found) -> None:
        await stores.batches.remove_expired()
        answers: dict[str, str] = {}
        for batch in await _all_batches(stores):
            results = await _results(stores, batch)
            answers |= {f"{batch.id} {name}": answer for name, answer in results}
            names = Counter(name for name, _ in results)
            found.expect(len(results) == batch.succeeded + batch.errored, "the counts of a batch differ from its lines")
            found.expect(not names or max(names.values()) == 1, "a line has several results")
            if batch.has_ended:
                is_complete = names.keys() == {f"n{at}" for at in range(1, batch.total + 1)}
                found.expect(is_complete, "a line of a batch that has ended has no result")
            answers[batch.id] = ""
        for name, value in known.items():
            if isinstance(value, int):
                found.expect(name in answers, "an acknowledged batch is missing")
            else:
                found.expect(answers.get(name) == value, "an acknowledged result is missing, or another one")

    async def finish(self, stores: Stores, known: dict[str, Any], found: Found) -> None:
        await stores.batches.claim()
        while own := await stores.batches.list_own():
            await self._step(stores, own[0], Random(1), lambda values: known.update({values[0]: values[1]}))
        await self.check(stores, known, found)
        ended = await _all_batches(stores)
        found.expect(all(batch.state == "completed" for batch in ended), "a batch has not completed")
        found.figures["batches completed"] += len(ended)
        found.figures["batch lines with exactly one result"] += sum(batch.total for batch in ended)


async def _all_batches(stores: Stores) -> Sequence[StoredBatch]:
    pages = [await stores.batches.list(ANN, api, 10_000) for api in ("openai", "anthropic")]
    return [batch for page in pages for batch in page.batches]


async def _results(stores: Stores, batch: StoredBatch) -> list[tuple[str, str]]:
    """The `custom_id` of each line with a result, and the id in its result."""
    if not batch.has_ended:
        lines = await stores.batches.read_results(batch.id, 0, 10_000)
        return [(line.custom_id or "", line.result.request_id) for line in lines if line.result is not None]
    found = []
    principal = ANN if batch.api == "openai" else SERVER_PRINCIPAL
    for file_id in filter(None, (batch.output_file, batch.error_file)):
        file = await stores.files.find(principal, file_id)
        for line in stores.blobs.path(file.digest).read_bytes().splitlines() if file is not None else ():
            entry = msgspec.json.decode(line)
            result = entry["response"]["body"] if batch.api == "openai" else entry["result"]
            found.append((entry["custom_id"], (result.get("message") or result.get("error") or result)["id"]))
    return found
