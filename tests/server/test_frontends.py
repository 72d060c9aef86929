"""Several front ends behave like one server and survive the death of one."""

import asyncio
import json
import os
import signal
import ssl
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from dragoman.config.loading import Flags, load_settings
from dragoman.core.errors import ConfigError
from dragoman.server.serve import default_workers
from tests.support.certificates import write_certificate
from tests.support.frontends import each, many, streamed_text
from tests.support.requests import (
    CHAT,
    COMPLETIONS,
    HELLO,
    ask,
    eventually,
    refused,
    talking,
    text_of,
    under_way,
)
from tests.support.server_process import Running, serving, serving_at

NUMBERS = "".join(f"{number:04} " for number in range(40))
SPOKEN = "".join(f"{at} " for at in range(60))
IN_WORKER = {"engine": "scripted", "crash_after": 100_000}
ENDLESS = {"tokens_per_second": 20, "replies": [{"output": "tick" * 12_000}]}
ECHO: dict[str, Any] = {"echo": {"engine": "scripted"}}
MODELS: dict[str, Any] = ECHO | {
    "in-worker": IN_WORKER,
    "single": {"engine": "scripted", "slots": 1, **ENDLESS},
    "single-in-worker": IN_WORKER | {"slots": 1, **ENDLESS},
    "endless": {"engine": "scripted", **ENDLESS},
    "numbers": IN_WORKER | {"chunk": 5, "tokens_per_second": 20, "replies": [{"output": NUMBERS}]},
    "short": {"engine": "scripted", "context": 20},
    "short-in-worker": IN_WORKER | {"context": 20},
    "counting": {"engine": "tests.support.engines:Counting"},
    "obedient": {"engine": "tests.ipc.engines:Obedient"},
    "obedient-in-worker": {"engine": "tests.ipc.engines:Apart"},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    config = {"models": MODELS, "limits": {"request_seconds": 100}}
    with serving(tmp_path_factory.mktemp("pair"), config, "--workers", "2") as running:
        yield running


def test_number_of_workers() -> None:
    assert [default_workers(cpus) for cpus in (1, 2, 7, 8, 12, 16, 64)] == [1, 1, 1, 2, 3, 4, 4]
    with pytest.raises(ConfigError, match="--workers 0: expected int >= 1"):
        load_settings(None, Flags(workers=0), {})


@pytest.mark.parametrize("model", ["short", "short-in-worker"])
def test_prompt_that_is_too_long_is_refused_before_another_is_answered(pair: Running, model: str) -> None:
    with each(pair) as clients:
        for client in clients:
            reply = ask(client, COMPLETIONS, model=model, prompt=["fits", "x " * 100], stream=True)
            assert "maximum context length is 20 tokens" in refused(reply, 400, param="prompt")


def test_responses_are_shared(pair: Running) -> None:
    with each(pair) as (one, other):
        first = one.post("/v1/responses", json={"model": "echo", "input": "remember me"}).json()
        assert other.get(f"/v1/responses/{first['id']}").json()["output"] == first["output"]
        body = {"model": "echo", "input": "more", "previous_response_id": first["id"]}
        second = other.post("/v1/responses", json=body).json()
        assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
        unknown = one.post("/v1/responses", json=body | {"previous_response_id": "resp_gone"})
        refused(unknown, 400, param="previous_response_id")
        items = one.get(f"/v1/responses/{second['id']}/input_items").json()["data"]
        assert [item["content"][0]["text"] for item in items] == ["more", "remember me", "remember me"]
        stream = one.post("/v1/responses", json={"model": "echo", "input": "x", "stream": True}).text
        assert "event: response.completed" in stream


@pytest.mark.parametrize("model", ["single", "single-in-worker"])
def test_disconnect_frees_the_slot_for_another_front_end(pair: Running, model: str) -> None:
    body = {"model": model, "messages": HELLO, "stream": True}
    with each(pair) as (one, other), ThreadPoolExecutor(1) as pool:
        with one.stream("POST", CHAT, json=body) as stream:
            reader = stream.iter_lines()
            assert next(reader)
            waiting = pool.submit(ask, other, CHAT, model=model, max_tokens=1)
            under_way(pair, model, 1, waiting=1)
            assert not waiting.done()
        assert text_of(waiting.result()) == "tick"
        under_way(pair, model, 0)


def test_statistics_cover_all_front_ends(tmp_path: Path) -> None:
    config = {"models": {"echo": {"engine": "scripted", "tokens_per_second": 50}}}
    with serving(tmp_path, config, "--workers", "2") as running, each(running) as clients:
        for client in clients:
            for _ in range(3):
                assert text_of(ask(client, CHAT, messages=[{"role": "user", "content": "x" * 40}])) == "x" * 40
        for client in clients:
            told = client.get("/stats").json()["models"]["echo"]
            assert (told["requests"], told["completion_tokens"]) == (6, 60)
            page = client.get("/metrics").text
            gaps = page.partition('dragoman_inter_token_seconds_count{model="echo"} ')[2].partition("\n")[0]
            # Tokens in the first event of a reply have no gap.
            assert 6 < float(gaps) <= 54
            assert told["inter_token"]["mean"] > 0.004
        clients[0].close()
        assert running.stop() == 0
        events = running.events()
        requests = [event for event in events if event["event"] == "request"]
        assert len([event for event in requests if event["route"] == f"POST {CHAT}"]) == 6
        assert events[-1]["requests"] == len(requests)
        assert len({event["id"] for event in requests}) == len(requests)


def test_key_limits_cover_all_front_ends(tmp_path: Path) -> None:
    limits = {"requests_per_minute": 5, "concurrency": 2}
    config = {"models": ECHO | {"endless": MODELS["endless"]}, "api_keys": ["a", "b"], "keys": {"limits": limits}}
    with serving(tmp_path, config, "--workers", "2") as running:
        with each(running) as clients:
            for client in clients:
                refused(ask(client, CHAT), 401)
                refused(client.get("/v1/models"), 401)
        with each(running, {"x-api-key": "a"}) as clients:
            left = [ask(clients[at % 2], CHAT).headers["x-ratelimit-remaining-requests"] for at in range(5)]
            assert left == ["4", "3", "2", "1", "0"]
            for client in clients:
                told = ask(client, CHAT)
                refused(told, 429, code="rate_limit_exceeded")
                assert told.headers["x-ratelimit-remaining-requests"] == "0"
                assert int(told.headers["retry-after"]) > 1
            assert clients[0].get("/stats").json()["limited"] == {"requests": 2}
        with each(running, {"authorization": "Bearer b"}) as (one, other), ExitStack() as stack:
            body = {"messages": HELLO, "model": "endless", "stream": True}
            streams = [stack.enter_context(client.stream("POST", CHAT, json=body)) for client in (one, other)]
            # A discarded reader closes its connection.
            readers = [stream.iter_lines() for stream in streams]
            assert all(next(reader) for reader in readers)
            with talking(running, {"x-api-key": "b"}) as third:
                assert "2 requests at a time" in refused(ask(third, CHAT), 429)
                stack.close()
                assert eventually(lambda: ask(third, CHAT).status_code == 200)


def test_five_hundred_streams_are_ordered_and_complete(pair: Running) -> None:
    async def whole() -> list[tuple[str, str]]:
        async with many(pair) as client:
            leaving = [5 if at % 8 == 0 else None for at in range(512)]
            return await asyncio.gather(*(streamed_text(client, "numbers", after) for after in leaving))

    told = asyncio.run(whole())
    for at, (text, end) in enumerate(told):
        if at % 8 == 0:
            assert end == "left"
            assert NUMBERS.startswith(text)
        else:
            assert (text, end) == (NUMBERS, "done")
    under_way(pair, "numbers", 0)


@pytest.mark.parametrize("model", ["obedient", "obedient-in-worker"])
def test_invalid_event_fails_only_its_request(pair: Running, model: str) -> None:
    async def whole() -> list[tuple[str, str]]:
        async with many(pair) as client:
            await streamed_text(client, model, content="count 1")
            before = pair.fronts(), pair.workers()
            # Enough connections to reach both front ends.
            contents = ["slowly 60", "wrong 1", "wrong 100000000", "eos 1"] * 8
            results = await asyncio.gather(*(streamed_text(client, model, content=text) for text in contents))
            assert (pair.fronts(), pair.workers()) == before
            return results

    results = asyncio.run(whole())
    under_way(pair, model, 0)
    assert results[::4] == [(SPOKEN, "done")] * 8
    ends = [end for at, (_, end) in enumerate(results) if at % 4]
    assert ends == ["the engine failed (ValidationError); see the server log"] * 24
    assert "engine output cannot be decoded" in pair.log.read_text()


def test_killed_front_end_does_not_affect_the_others(tmp_path: Path) -> None:
    models = {name: MODELS[name] for name in ("echo", "numbers", "single-in-worker")}
    with serving(tmp_path, {"models": models}, "--workers", "2") as running:
        victim, other = running.fronts()

        def many_run() -> bool:
            with talking(running) as client:
                return bool(client.get("/stats").json()["models"]["numbers"]["running"] >= 20)

        async def whole() -> list[tuple[str, str]]:
            async with many(running) as client:
                tasks = [asyncio.create_task(streamed_text(client, "numbers")) for _ in range(40)]
                tasks.append(asyncio.create_task(streamed_text(client, "single-in-worker")))
                assert await asyncio.to_thread(eventually, many_run)
                os.kill(victim, signal.SIGKILL)
                told = await asyncio.gather(*tasks[:-1])
                tasks[-1].cancel()
                return told

        told = asyncio.run(whole())
        assert {end for _, end in told} == {"done", "reset"}
        assert all(text == NUMBERS for text, end in told if end == "done")
        assert eventually(lambda: len(running.fronts()) == 2)
        assert other in running.fronts()
        with each(running) as clients:
            for client in clients:
                assert text_of(ask(client, CHAT)) == "hello"
            for name in models:
                under_way(running, name, 0)
        assert "a front end died with" in running.log.read_text()
        assert "Traceback" not in running.log.read_text()


def test_reload_applies_to_all_front_ends(tmp_path: Path) -> None:
    file = tmp_path / "dragoman.json"
    with serving(tmp_path, {"models": ECHO}, "--workers", "2") as running, each(running) as clients:
        changed = {"models_dir": [], "models": {"other": {"engine": "scripted"}}, "limits": {"choices": 2}}
        file.write_text(json.dumps(changed | {"cors": {"origins": ["https://app.example"]}, "workers": 3}))
        assert clients[0].post("/admin/reload").json()["restart_needed"] == []
        for client in clients:
            reply = client.post(CHAT, json={"messages": HELLO}, headers={"origin": "https://app.example"})
            assert reply.json()["model"] == "other"
            assert reply.headers["access-control-allow-origin"] == "https://app.example"
            refused(ask(client, CHAT, n=3), 400, param="n")
        file.write_text(json.dumps(changed | {"api_keys": ["secret"]}))
        running.process.send_signal(signal.SIGHUP)
        assert eventually(lambda: running.log.read_text().count("read again") == 2)
        for client in clients:
            refused(ask(client, CHAT), 401)


def test_engine_in_the_parent_pauses_for_a_slow_client(pair: Running) -> None:
    body = {"model": "counting", "messages": HELLO, "stream": True}
    with talking(pair) as one, talking(pair) as other:

        def made() -> int:
            told = other.post("/v1/messages/count_tokens", json={"model": "counting", "messages": HELLO})
            count: int = told.json()["input_tokens"]
            return count

        def is_still() -> bool:
            before = made()
            time.sleep(0.2)
            return made() == before > 0

        with one.stream("POST", CHAT, json=body) as stream:
            assert eventually(is_still)
            before = made()
            assert any(made() > before for at, _ in enumerate(stream.iter_raw()) if at % 50 == 49)


def test_each_front_end_speaks_tls(tmp_path: Path) -> None:
    certificate = Path(write_certificate(tmp_path).certificate)
    trusted, whole = ssl.create_default_context(cafile=certificate), certificate.read_bytes()
    config = {"models": ECHO, "tls": {"certificate": "server.pem", "key": "server.key"}}

    def connect(port: int) -> httpx.Client:
        return httpx.Client(base_url=f"https://localhost:{port}", verify=trusted, trust_env=False, timeout=30)

    def talk_to_each(running: Running) -> None:
        """Send requests that each front end answers itself and requests that it relays."""
        with each(running, connect=lambda: connect(running.port)) as clients:
            for client in clients:
                assert text_of(ask(client, CHAT)) == "hello"
                assert ask(client, CHAT, stream=True).text.endswith("data: [DONE]\n\n")
                assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["echo"]

    with serving_at(tmp_path, config, connect, "--workers", "2") as (running, _):
        talk_to_each(running)
        certificate.write_text("no certificate")
        os.kill(running.fronts()[0], signal.SIGKILL)
        assert eventually(lambda: "cannot be used for TLS" in running.log.read_text())
        certificate.write_bytes(whole)
        assert eventually(lambda: len(running.fronts()) == 2)
        talk_to_each(running)
        assert running.stop() == 0
        assert f"https://127.0.0.1:{running.port}" in running.log.read_text()
        assert "Traceback" not in running.log.read_text()
