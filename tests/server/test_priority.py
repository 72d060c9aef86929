"""Requests with batch priority: `service_tier: "flex"`, keys with this priority, and batch jobs."""

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from dragoman import create_app
from dragoman.config.sections import KeyLimits, Keys
from dragoman.config.settings import Limits, Settings
from dragoman.engines.scripted import ScriptedEngine, ScriptedOptions
from dragoman.server.app_calls import RequestJob, call_app, job_scope
from dragoman.server.auth.callers import Caller
from tests.support.requests import CHAT, COMPLETIONS, HELLO, ask, frames, recorded, refused, talk, under_way
from tests.support.sdk import sdk
from tests.support.server_process import Running, server_fixture

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
KEY = "sk-0123456789abcdef"
ENDLESS = [{"role": "user", "content": "endless"}]
QUEUE = 2
server = server_fixture(
    {
        "models": {
            "busy": {
                "engine": "scripted",
                "slots": 2,
                "tokens_per_second": 20,
                "replies": [{"match": "endless", "output": "tick" * 12_000}, {"output": "hello"}],
            },
            "free": {"engine": "scripted"},
        },
        "default": "free",
        "limits": {"queue": QUEUE},
    }
)


def test_interactive_requests_are_served_at_once_while_flex_requests_wait(
    server: Running, client: httpx.Client
) -> None:
    def ask_flex(_: int) -> httpx.Response:
        return ask(client, CHAT, model="busy", service_tier="flex")

    body = {"model": "busy", "messages": ENDLESS, "service_tier": "flex", "stream": True}
    with ThreadPoolExecutor(QUEUE) as pool:
        with client.stream("POST", CHAT, json=body) as running:
            pieces = running.iter_raw()
            next(pieces)
            waiting = [pool.submit(ask_flex, number) for number in range(QUEUE)]
            under_way(server, "busy", 1, waiting=QUEUE)
            refusal = ask_flex(QUEUE)
            assert "2 requests wait" in refused(refusal, 429, code="resource_unavailable")
            assert refusal.headers["retry-after"]
            interactive = [ask(client, CHAT, model="busy") for _ in range(3)]
            under_way(server, "busy", 1, waiting=QUEUE)
        replies = [future.result() for future in waiting]
    assert [reply.status_code for reply in (*interactive, *replies)] == [200] * 5
    assert [reply.json().get("service_tier") for reply in (*interactive, *replies)] == [None] * 3 + ["flex"] * QUEUE
    for reply in interactive:
        (record,) = recorded(server, id=reply.json()["id"])
        assert record["queue_us"] == 0


TIERS = [(None, None), ("auto", "default"), ("default", "default"), ("flex", "flex")]


@pytest.mark.parametrize(("asked", "named"), TIERS)
def test_a_reply_names_its_service_tier(server: Running, asked: Any, named: str | None) -> None:
    fields: dict[str, Any] = {"model": "free", **({} if asked is None else {"service_tier": asked})}
    with sdk(server) as client:
        chats: Any = client.chat.completions
        reply = chats.with_raw_response.create(messages=HELLO, **fields)
        assert "x-dragoman-ignored" not in reply.headers
        assert reply.parse().service_tier == named
        assert {chunk.service_tier for chunk in chats.create(messages=HELLO, stream=True, **fields)} == {named}
        response = client.responses.create(input="hello", **fields)
        assert response.service_tier == (named or "default")


@pytest.mark.parametrize(("asked", "named"), TIERS)
def test_a_completion_names_its_service_tier(client: httpx.Client, asked: str | None, named: str | None) -> None:
    fields = {} if asked is None else {"service_tier": asked}
    assert ask(client, COMPLETIONS, **fields).json().get("service_tier") == named
    *chunks, _ = frames(ask(client, COMPLETIONS, stream=True, **fields).text)
    assert {chunk.get("service_tier") for chunk in chunks} == {named}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_other_service_tiers_are_reported_as_ignored(client: httpx.Client, path: str) -> None:
    reply = ask(client, path, service_tier="priority")
    assert reply.status_code == 200
    assert reply.headers["x-dragoman-ignored"] == "service_tier"
    assert reply.json().get("service_tier") == ("default" if path == RESPONSES else None)


@pytest.mark.parametrize("tier", ["auto", "standard_only"])
def test_messages_are_interactive(client: httpx.Client, tier: str) -> None:
    reply = ask(client, MESSAGES, service_tier=tier)
    assert "x-dragoman-ignored" not in reply.headers
    assert reply.json()["usage"]["service_tier"] == "standard"


def test_requests_of_a_key_with_batch_priority() -> None:
    settings = Settings(api_keys=(KEY,), keys=Keys(limits=KeyLimits(priority="batch")), hosts=("localhost",))

    async def script(client: httpx.AsyncClient) -> list[Any]:
        headers = {"authorization": f"Bearer {KEY}"}
        chat = await client.post(CHAT, headers=headers, json={"messages": HELLO, "service_tier": "default"})
        message = await client.post(MESSAGES, headers=headers, json={"messages": HELLO, "max_tokens": 5})
        return [chat.json(), message.json()]

    chat, message = talk(create_app(ScriptedEngine(), settings=settings), script)
    assert chat["service_tier"] == "flex"
    assert message["usage"]["service_tier"] == "batch"


def test_batch_jobs_wait_without_limits() -> None:
    settings = Settings(limits=Limits(queue=0, queue_seconds=0.001))
    jobs = [RequestJob(Caller("user:anna"), f"job-{number}", is_batch=True) for number in range(4)]

    async def run() -> Sequence[Any]:
        options = ScriptedOptions(slots=1, tokens_per_second=50)
        app = create_app(ScriptedEngine("m", options), settings=settings)
        body = json.dumps({"model": "m", "messages": HELLO}).encode()
        # Loads the model.
        await call_app(app, job_scope(jobs[0], CHAT), body, asyncio.Event())
        replies = await asyncio.gather(*(call_app(app, job_scope(job, CHAT), body, asyncio.Event()) for job in jobs))
        await app.stop()
        return replies

    replies = asyncio.run(run())
    assert [reply.status for reply in replies] == [200] * 4
    assert {json.loads(reply.body)["service_tier"] for reply in replies} == {"flex"}
