"""What clients do with a server that `server_killed` kills, and how they check the next one.

Client    one kind of request: `run` sends it, `check` looks at the next server, `finish` after the last kill
"""

import asyncio
import hashlib
import json
import sqlite3
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import httpx

from tools.faults.trial import Trial

CLIENTS_PER_KIND = 3
POLL_SECONDS = 0.05
END_SECONDS = 120.0
"""Time in which all batches end after the last kill."""
MODELS: dict[str, Any] = {
    "fast": {"engine": "scripted", "replies": [{"output": "one two three"}]},
    "paced": {"engine": "scripted", "slots": 8, "tokens_per_second": 20, "replies": [{"output": "word " * 8}]},
    "echo": {"engine": "scripted", "slots": 8, "prefill_seconds": 0.02},
}
CHAT_MODELS = ("fast", "paced")
OWNERS = ("anna", "ben")
BATCH_LINES = (3, 30, 300)
OPEN = "SELECT count(*) FROM ledger WHERE closed IS NULL AND server NOT IN (SELECT id FROM servers)"
RUNNING = "SELECT count(*) FROM responses WHERE status IN ('queued', 'in_progress')"
SUMS = """
SELECT CAST(opened / 86400 AS INTEGER), key, principal, model, count(*), sum(prompt), sum(cached), sum(completion),
    sum(reasoning), sum(cost)
FROM ledger WHERE closed IS NOT NULL GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 3, 4
"""
USAGE = "SELECT * FROM usage ORDER BY 1, 2, 3, 4"


class Client(ABC):
    clients = CLIENTS_PER_KIND
    owner = "anna"
    """The name of the key. The work of "ben" goes on after a restart, so that he has reservations then."""

    @abstractmethod
    async def run(self, http: httpx.AsyncClient, random: Random, known: dict[str, Any]) -> None:
        """Send one request, and note in `known` what the server acknowledges."""

    @abstractmethod
    async def check(self, trial: Trial, http: httpx.AsyncClient, folder: Path, known: dict[str, Any]) -> None:
        """Check on the next server that all of `known` is there."""

    async def finish(self, trial: Trial, http: httpx.AsyncClient, folder: Path, known: dict[str, Any]) -> None:
        """Check after the last kill what only shows at the end. `known` is from all servers."""
        return


class Chats(Client):
    async def run(self, http: httpx.AsyncClient, random: Random, known: dict[str, Any]) -> None:
        body = {"model": random.choice(CHAT_MODELS), "messages": [{"role": "user", "content": "hi"}], "max_tokens": 50}
        reply = await http.post("/v1/chat/completions", json=body)
        if reply.status_code == 200:
            known[reply.headers["x-request-id"]] = reply.json()["usage"]["completion_tokens"]

    async def check(self, trial: Trial, http: httpx.AsyncClient, folder: Path, known: dict[str, Any]) -> None:
        await trial.wait(
            lambda: query(folder, OPEN) == [[(0,)]], "the next server closes the entries of the killed one"
        )
        found = {row[0]: row[1:] for row in query(folder, "SELECT id, status, completion, prompt FROM ledger")[0]}
        for request_id, tokens in known.items():
            status, completion, _ = found.get(request_id, (None, None, None))
            # Its end may not have been written: then it counts as much as it reserved.
            is_there = (status, completion) in ((200, tokens), (0, 50))
            trial.expect(is_there, "a request that was answered is missing in the ledger")
        sums, counted = query(folder, SUMS, USAGE)
        trial.expect(sums == counted, "the sums differ from the entries")


class Uploads(Client):
    async def run(self, http: httpx.AsyncClient, random: Random, known: dict[str, Any]) -> None:
        content = random.randbytes(random.choice((10, 5000, 300_000)))
        files, data = {"file": ("a.bin", content)}, {"purpose": "user_data"}
        reply = await http.post("/v1/files", files=files, data=data)
        if reply.status_code == 200:
            known[reply.json()["id"]] = hashlib.sha256(content).hexdigest()

    async def check(self, trial: Trial, http: httpx.AsyncClient, folder: Path, known: dict[str, Any]) -> None:
        for file_id, digest in known.items():
            reply = await http.get(f"/v1/files/{file_id}/content")
            is_same = reply.status_code == 200 and hashlib.sha256(reply.content).hexdigest() == digest
            trial.expect(is_same, f"an acknowledged file is a {reply.status_code} after the restart")
        for path in (folder / "dragoman.db-blobs").glob("??/*"):
            try:
                is_whole = hashlib.sha256(path.read_bytes()).hexdigest() == path.name
            except FileNotFoundError:
                # A batch has ended, and does not need its input any more.
                continue
            trial.expect(is_whole, "a file is half written")


class Background(Client):
    """Background responses. Most are read to their end before the next one."""

    owner = "ben"

    async def run(self, http: httpx.AsyncClient, random: Random, known: dict[str, Any]) -> None:
        model = random.choice(CHAT_MODELS)
        body = {"model": model, "input": "hi", "background": True}
        reply = await http.post("/v1/responses", json=body)
        if reply.status_code != 200:
            return
        response = reply.json()
        known[response["id"]] = MODELS[model]["replies"][0]["output"].strip()
        is_read = random.random() < 0.8
        while is_read and response.get("status") in ("queued", "in_progress"):
            await asyncio.sleep(POLL_SECONDS)
            path = f"/v1/responses/{response['id']}"
            response = (await http.get(path)).json()

    async def check(self, trial: Trial, http: httpx.AsyncClient, folder: Path, known: dict[str, Any]) -> None:
        await trial.wait(lambda: query(folder, RUNNING) == [[(0,)]], "the next server ends all responses")
        for response_id, text in known.items():
            reply = await http.get(f"/v1/responses/{response_id}")
            response = reply.json()
            if reply.status_code != 200 or response["status"] not in ("completed", "failed"):
                trial.problems[f"an acknowledged response is a {reply.status_code} after the restart"] += 1
            elif response["status"] == "completed":
                said = response["output"][0]["content"][0]["text"].strip()
                trial.expect(said == text, "a background response has another text")


class BatchClient(Client):
    """A batch, then another one when it has ended. A batch goes on over many kills."""

    clients = 1
    owner = "ben"

    async def run(self, http: httpx.AsyncClient, random: Random, known: dict[str, Any]) -> None:
        count = random.choice(BATCH_LINES)
        batch = await self._create(http, [{"role": "user", "content": f"text of n{at}"} for at in range(count)])
        if batch is None:
            await asyncio.sleep(POLL_SECONDS)
            return
        known[batch] = count
        while not await self._has_ended(http, batch):  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)

    async def check(self, trial: Trial, http: httpx.AsyncClient, folder: Path, known: dict[str, Any]) -> None:
        for batch in known:
            reply = await http.get(f"{self.path}/{batch}")
            trial.expect(reply.status_code == 200, f"an acknowledged batch is a {reply.status_code} after the restart")

    async def finish(self, trial: Trial, http: httpx.AsyncClient, folder: Path, known: dict[str, Any]) -> None:
        for batch, count in known.items():
            await trial.wait(lambda: self._has_ended(http, batch), "a batch ends after the last kill", END_SECONDS)  # noqa: B023
            answers = await self._read(http, batch)
            expected = Counter((f"n{at}", f"text of n{at}") for at in range(count))
            trial.expect(Counter(answers) == expected, "a line of a batch is not answered exactly once")
        trial.figures[f"batches of {self.path}"] = f"{len(known)} with {sum(known.values())} lines"

    async def _has_ended(self, http: httpx.AsyncClient, batch: str) -> bool:
        reply = (await http.get(f"{self.path}/{batch}")).json()
        return bool(reply.get("status", reply.get("processing_status")) in ("completed", "failed", "expired", "ended"))

    @property
    @abstractmethod
    def path(self) -> str: ...

    @abstractmethod
    async def _create(self, http: httpx.AsyncClient, messages: list[dict[str, str]]) -> str | None:
        """Return the id of the batch; None if the server refuses it."""

    @abstractmethod
    async def _read(self, http: httpx.AsyncClient, batch: str) -> list[tuple[str, str]]:
        """The `custom_id` and the text of each answer."""


class OpenAIBatchClient(BatchClient):
    path = "/v1/batches"

    async def _create(self, http: httpx.AsyncClient, messages: list[dict[str, str]]) -> str | None:
        url = "/v1/chat/completions"
        lines = [
            {"custom_id": f"n{at}", "method": "POST", "url": url, "body": {"model": "echo", "messages": [message]}}
            for at, message in enumerate(messages)
        ]
        content = "\n".join(map(json.dumps, lines))
        reply = await http.post("/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"})
        if reply.status_code != 200:
            return None
        body = {"input_file_id": reply.json()["id"], "endpoint": url, "completion_window": "24h"}
        reply = await http.post(self.path, json=body)
        return str(reply.json()["id"]) if reply.status_code == 200 else None

    async def _read(self, http: httpx.AsyncClient, batch: str) -> list[tuple[str, str]]:
        file_id = (await http.get(f"{self.path}/{batch}")).json().get("output_file_id")
        output = (await http.get(f"/v1/files/{file_id}/content")).text if file_id else ""
        entries = [(entry["custom_id"], entry["response"]["body"]) for entry in map(json.loads, output.splitlines())]
        return [(name, body["choices"][0]["message"]["content"]) for name, body in entries]


class AnthropicBatchClient(BatchClient):
    path = "/v1/messages/batches"

    async def _create(self, http: httpx.AsyncClient, messages: list[dict[str, str]]) -> str | None:
        requests = [
            {"custom_id": f"n{at}", "params": {"model": "echo", "max_tokens": 50, "messages": [message]}}
            for at, message in enumerate(messages)
        ]
        reply = await http.post(self.path, json={"requests": requests})
        return str(reply.json()["id"]) if reply.status_code == 200 else None

    async def _read(self, http: httpx.AsyncClient, batch: str) -> list[tuple[str, str]]:
        output = (await http.get(f"{self.path}/{batch}/results")).text
        entries = [(entry["custom_id"], entry["result"]) for entry in map(json.loads, output.splitlines())]
        return [(name, result["message"]["content"][0]["text"]) for name, result in entries if "message" in result]


Known = defaultdict[str, dict[str, Any]]
"""What was acknowledged, by the name of the client."""
CLIENTS: dict[str, Client] = {
    "chats": Chats(),
    "uploads": Uploads(),
    "background responses": Background(),
    "batches": OpenAIBatchClient(),
    "message batches": AnthropicBatchClient(),
}


def query(folder: Path, *statements: str) -> list[list[Any]]:
    """The rows of each statement, of one state of the database."""
    with closing(sqlite3.connect(f"file:{folder / 'dragoman.db'}?mode=ro", uri=True)) as connection:
        connection.execute("BEGIN")
        return [connection.execute(statement).fetchall() for statement in statements]
