"""How batches run, with apps in this process: retries, expiry, rights, budgets, a storage that fails."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import update

from dragoman import Engine, create_app
from dragoman.config.sections import Budget, KeyLimits, Keys, Storage
from dragoman.config.settings import Limits, Settings
from dragoman.core.errors import EngineDied, EngineFailed, Unavailable
from dragoman.core.request import GenerationRequest
from dragoman.protocols.batches import encode_anthropic_batch, encode_batch
from dragoman.server.app import App
from dragoman.storage.batch_states import MAX_FAILURES, StoredBatch
from dragoman.storage.keys import KeyStore
from dragoman.storage.tables import batches
from tests.support.batches import ENDED, chat_line, jsonl, message_request
from tests.support.requests import CHAT, PATIENCE, in_process

Client = httpx.AsyncClient


class Tried(Engine):
    """Replies with the text of the user, and fails as the first word says, so many times as the second one says."""

    def __init__(self) -> None:
        self.tries: dict[str, int] = {}
        self.order: list[str] = []
        self.running = self.most = 0
        self.held: asyncio.Event | None = None

    async def generate(self, request: GenerationRequest) -> AsyncIterator[str]:
        text = request.last_user_text
        self.order.append(text)
        self.tries[text] = tries = self.tries.get(text, 0) + 1
        kind, _, rest = text.partition(" ")
        if kind in FAILURES and tries <= int(rest.split()[0]):
            raise FAILURES[kind]("not now")
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await (asyncio.sleep(0.01) if self.held is None else self.held.wait())
        finally:
            self.running -= 1
        yield text


FAILURES: dict[str, Callable[[str], Exception]] = {"busy": Unavailable, "died": EngineDied, "failed": EngineFailed}


@asynccontextmanager
async def serve_app(engine: Engine, folder: Path, **settings: Any) -> AsyncIterator[tuple[App, Client]]:
    storage = Storage(address=str(folder / "dragoman.db"), blobs=str(folder / "blobs"))
    keys = settings.pop("keys", Keys(store=str(folder / "keys.db")))
    app = create_app(engine, settings=Settings(models_dir=(), storage=storage, keys=keys, **settings))
    try:
        async with in_process(app, timeout=PATIENCE) as client:
            yield app, client
    finally:
        await app.stop()


async def submit(client: Client, lines: list[Any], endpoint: str = CHAT, **headers: str) -> str:
    upload = await client.post(
        "/v1/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", jsonl(lines))}, headers=headers
    )
    fields = {"input_file_id": upload.json()["id"], "endpoint": endpoint, "completion_window": "24h"}
    created = await client.post("/v1/batches", json=fields, headers=headers)
    assert created.status_code == 200, created.text
    batch_id: str = created.json()["id"]
    return batch_id


async def show(client: Client, batch_id: str, **headers: str) -> Any:
    return (await client.get(f"/v1/batches/{batch_id}", headers=headers)).json()


async def until(condition: Callable[[], Any]) -> Any:
    async with asyncio.timeout(PATIENCE):
        while not (found := condition()):  # noqa: ASYNC110 (the batch does not notify the test)
            await asyncio.sleep(0.01)
        return found


async def finish(client: Client, batch_id: str, **headers: str) -> Any:
    async with asyncio.timeout(PATIENCE):
        while (batch := await show(client, batch_id, **headers))["status"] not in ENDED:  # noqa: ASYNC110 (a poll)
            await asyncio.sleep(0.02)
        return batch


async def results(client: Client, batch: Any, **headers: str) -> dict[str, Any]:
    """The lines of both result files, by `custom_id`."""
    found: dict[str, Any] = {}
    for file in filter(None, (batch["output_file_id"], batch["error_file_id"])):
        text = (await client.get(f"/v1/files/{file}/content", headers=headers)).text
        found |= {entry["custom_id"]: entry for entry in map(json.loads, text.splitlines())}
    return found


async def test_transient_failures_are_retried_and_others_are_final(tmp_path: Path) -> None:
    engine = Tried()
    texts = ["hello", "busy 2 times", "died 1 time", f"died {MAX_FAILURES} times", "failed 1 time"]
    async with serve_app(engine, tmp_path) as (_, client):
        # The pauses between five tries are seven seconds together.
        batch = await finish(client, await submit(client, [chat_line(text, text, model="tried") for text in texts]))
        found = await results(client, batch)
    statuses = {name: entry["response"]["status_code"] for name, entry in found.items()}
    assert statuses == dict(zip(texts, (200, 200, 200, 502, 500), strict=True))
    assert engine.tries == dict(zip(texts, (1, 3, 2, MAX_FAILURES, 1), strict=True))
    assert (batch["request_counts"]["completed"], batch["request_counts"]["failed"]) == (3, 2)


async def test_number_of_running_lines_is_limited_for_all_batches_together(tmp_path: Path) -> None:
    engine = Tried()
    async with serve_app(engine, tmp_path, limits=Limits(batch_lines=3)) as (_, client):
        made = [
            await submit(client, [chat_line(f"{at}", f"{name} {at}", model="tried") for at in range(20)])
            for name in ("first", "second")
        ]
        for batch_id in made:
            assert (await finish(client, batch_id))["request_counts"]["completed"] == 20
    assert engine.most == 3


async def test_lines_with_a_common_prompt_run_one_after_the_other(tmp_path: Path) -> None:
    engine = Tried()
    names = [f"{'abc'[at % 3] * 300} {at}" for at in range(18)]
    async with serve_app(engine, tmp_path, limits=Limits(batch_lines=1)) as (_, client):
        await finish(client, await submit(client, [chat_line(name[-9:], name, model="tried") for name in names]))
    letters = [text[0] for text in engine.order]
    assert len(letters) == 18
    assert len([at for at in range(1, 18) if letters[at] != letters[at - 1]]) == 2


async def test_expired_batch_reports_what_was_not_run(tmp_path: Path) -> None:
    engine = Tried()
    async with serve_app(engine, tmp_path, limits=Limits(batch_lines=2)) as (app, client):
        first = await submit(client, [chat_line("done", model="tried")])
        await finish(client, first)
        engine.held = asyncio.Event()
        lines = [chat_line(f"n{at}", f"n{at}", model="tried") for at in range(5)]
        batch_id = await submit(client, lines)
        await until(lambda: engine.running == 2)
        requests = {"requests": [message_request("m", model="tried")]}
        other = (await client.post("/v1/messages/batches", json=requests)).json()["id"]
        now = update(batches).where(batches.c.ended.is_(None)).values(expires=0.0)
        await app.database.write(lambda connection: connection.execute(now) and None)
        # As after a restart: the batch is read again.
        for run, _ in app.batch_runner._runs.values():
            run.interrupt()
        batch = await finish(client, batch_id)
        assert batch["status"] == "expired"
        assert batch["expired_at"]
        found = await results(client, batch)
        assert {entry["error"]["code"] for entry in found.values()} == {"batch_expired"}
        assert len(found) == 5
        await until(lambda: not engine.running)
        async with asyncio.timeout(PATIENCE):
            while not (shown := (await client.get(f"/v1/messages/batches/{other}")).json())["ended_at"]:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert shown["request_counts"]["expired"] == 1


async def test_batch_pauses_while_the_storage_is_full_and_goes_on_afterwards(tmp_path: Path) -> None:
    engine = Tried()
    async with serve_app(engine, tmp_path, limits=Limits(batch_lines=2)) as (app, client):
        engine.held = asyncio.Event()
        lines = [chat_line(f"n{at}", f"n{at} " + "x" * 20_000, model="tried") for at in range(30)]
        batch_id = await submit(client, lines)
        await until(lambda: engine.running == 2)

        async def limit_pages(count: int) -> None:
            await app.database.write(
                lambda connection: connection.exec_driver_sql(f"PRAGMA max_page_count = {count}").close()
            )

        await limit_pages(1)
        engine.held.set()
        await until(lambda: len(engine.order) >= 2 and not engine.running)
        # Depending on the free pages, several lines may still be recorded.
        await until(lambda: len(engine.order) - app.telemetry.metrics.batch_lines["succeeded"] >= 2)
        assert len(engine.order) < 30
        shown = await show(client, batch_id)
        fields = {"input_file_id": shown["input_file_id"], "endpoint": CHAT, "completion_window": "24h"}
        metadata = {f"key {at}": "x" * 512 for at in range(16)}
        refused = await client.post("/v1/batches", json=fields | {"metadata": metadata})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "storage_unavailable")
        assert refused.headers["retry-after"]
        await limit_pages(1_000_000)
        batch = await finish(client, batch_id)
        assert batch["request_counts"]["completed"] == 30
        assert len(await results(client, batch)) == 30
    # The result of every line was kept until it was recorded.
    assert set(engine.tries.values()) == {1}


async def test_lines_have_the_rights_of_the_caller(tmp_path: Path) -> None:
    engine, store = Tried(), KeyStore(tmp_path / "keys.db")
    narrow, _ = store.create("user:ann", routes=("files", "batches", "chat"), models=("tried",))
    revoked, key = store.create("user:bob")
    async with serve_app(engine, tmp_path) as (_, client):
        ann = {"authorization": f"Bearer {narrow}"}
        refused = await client.post(
            "/v1/batches",
            json={"input_file_id": "file-0", "endpoint": "/v1/embeddings", "completion_window": "24h"},
            headers=ann,
        )
        assert refused.status_code == 403
        batch_id = await submit(client, [chat_line("a", model="tried"), chat_line("b", model="other")], **ann)
        found = await results(client, await finish(client, batch_id, **ann), **ann)
        assert {name: entry["response"]["status_code"] for name, entry in found.items()} == {"a": 200, "b": 404}
        bob = {"authorization": f"Bearer {revoked}"}
        assert (await client.get(f"/v1/batches/{batch_id}", headers=bob)).status_code == 404
        engine.held = asyncio.Event()
        lines = [chat_line(f"n{at}", f"n{at}", model="tried") for at in range(40)]
        batch_id = await submit(client, lines, **bob)
        await until(lambda: engine.running)
        store.revoke(key.id)
        engine.held.set()
        fresh = {"authorization": f"Bearer {store.create('user:bob')[0]}"}
        batch = await finish(client, batch_id, **fresh)
        found = await results(client, batch, **fresh)
    statuses = [entry["response"]["status_code"] for entry in found.values()]
    assert set(statuses) <= {200, 401}
    assert len(statuses) == 40


async def test_spent_budget_is_the_final_error_of_a_line(tmp_path: Path) -> None:
    engine = Tried()
    budget = Budget(principal="*", per="day", tokens=1)
    async with serve_app(engine, tmp_path, budgets=(budget,)) as (_, client):
        batch = await finish(client, await submit(client, [chat_line("a", model="tried")]))
        [entry] = (await results(client, batch)).values()
    assert entry["response"]["status_code"] == 429
    assert entry["response"]["body"]["error"]["code"] == "insufficient_quota"
    assert not engine.tries


async def test_lines_do_not_count_for_the_rate_of_a_key(tmp_path: Path) -> None:
    engine = Tried()
    keys = Keys(store=str(tmp_path / "keys.db"), limits=KeyLimits(requests_per_minute=4))
    settings = {"keys": keys, "api_keys": ("sk-0123456789",)}
    key = {"authorization": "Bearer sk-0123456789"}
    async with serve_app(engine, tmp_path, **settings) as (_, client):
        lines = [chat_line(f"n{at}", f"n{at}", model="tried") for at in range(10)]
        batch = await finish(client, await submit(client, lines, **key), **key)
        assert batch["request_counts"]["completed"] == 10


async def test_bad_body_of_a_line_is_the_answer_of_its_endpoint(tmp_path: Path) -> None:
    async with serve_app(Tried(), tmp_path) as (_, client):
        lines = [chat_line("a", model="tried", temperature="hot"), b'{"custom_id": "b", "method": "POST", "url": "x"}']
        batch = await finish(client, await submit(client, [*lines, chat_line("c", model="tried")]))
        found = await results(client, batch)
    assert found["a"]["response"]["body"]["error"]["param"] == "temperature"
    assert found["b"]["response"] is None


@pytest.mark.parametrize("is_memory", [True, False])
async def test_app_without_batches_does_not_open_a_storage_in_memory(tmp_path: Path, is_memory: bool) -> None:
    storage = Storage(address="memory" if is_memory else str(tmp_path / "d.db"), blobs=str(tmp_path))
    app = create_app(Tried(), settings=Settings(models_dir=(), storage=storage))
    async with in_process(app) as client:
        await client.get("/v1/models")
        await until(lambda: app.batch_runner._polling is not None)
        await asyncio.sleep(0)
        assert not (is_memory and app.database.is_open)
        empty = (await client.get("/v1/batches")).json()
        assert (empty["data"], empty["has_more"]) == ([], False)
    await app.stop()


def test_what_only_the_server_needs_is_not_shown() -> None:
    fields: dict[str, Any] = {"created": 0.0, "expires": 1.0, "state": "validating", "endpoint": CHAT}
    entry = StoredBatch(
        id="batch_0", api="openai", principal="user:x", server="srv-x", caller=b"x", source="x", digest="x", **fields
    )
    for encoded in (encode_batch(entry), encode_anthropic_batch(entry)):
        assert not {"caller", "principal", "server", "digest", "source"} & set(encoded)
