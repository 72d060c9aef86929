"""Several front ends behave like one server and survive the death of one."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from dragoman.config.loading import Flags, load_settings
from dragoman.core.errors import ConfigError
from dragoman.server.serve import default_workers
from tests.server.test_connections import listened_on
from tests.support.anthropic_sdk import anthropic_sdk
from tests.support.openai_sdk import sdk
from tests.support.requests import CHAT, HELLO, PATIENCE, ask, eventually, frames, refused, talking, text_of, under_way
from tests.support.server_process import Running, serving, serving_at

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
TOOL: Any = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
NUMBERS = "".join(f"{number:04} " for number in range(40))
IN_WORKER = {"engine": "scripted", "crash_after": 100_000}
ENDLESS = {"tokens_per_second": 20, "replies": [{"output": "tick" * 12_000}]}
MODELS: dict[str, Any] = {
    "echo": {"engine": "scripted"},
    "in-worker": IN_WORKER,
    "caller": {"engine": "scripted", "format": "hermes", "replies": [{"match": "weather", "output": CALL}]},
    "single": {"engine": "scripted", "slots": 1, **ENDLESS},
    "single-in-worker": IN_WORKER | {"slots": 1, **ENDLESS},
    "endless": {"engine": "scripted", **ENDLESS},
    "endless-in-worker": IN_WORKER | ENDLESS,
    "numbers": IN_WORKER | {"chunk": 5, "tokens_per_second": 20, "replies": [{"output": NUMBERS}]},
    "failing": {"engine": "scripted", "fail_after": 2, "replies": [{"output": "one two three four"}]},
    "dying": {"engine": "scripted", "crash_after": 2, "replies": [{"output": "one two three four"}]},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    config = {"models": MODELS, "limits": {"request_seconds": 100}}
    with serving(tmp_path_factory.mktemp("pair"), config, "--workers", "2") as running:
        yield running


def front_of(running: Running, client: httpx.Client) -> int | None:
    """Return the front end that has this client's connection."""
    port = client.get("/health").extensions["network_stream"].get_extra_info("client_addr")[1]
    ends = f":{running.port:04X}", f":{port:04X}"
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inode = next(line[9] for line in lines if line[1].endswith(ends[0]) and line[2].endswith(ends[1]))
    for pid in running.fronts():
        if any(_points_to(entry, f"socket:[{inode}]") for entry in Path(f"/proc/{pid}/fd").iterdir()):
            return pid
    return None


def _points_to(entry: Path, target: str) -> bool:
    try:
        return str(entry.readlink()) == target
    except OSError:
        return False


@contextmanager
def each(running: Running, headers: dict[str, str] | None = None) -> Iterator[list[httpx.Client]]:
    """Yield a client for each front end."""
    with ExitStack() as stack:
        found: dict[int, httpx.Client] = {}
        deadline = time.monotonic() + PATIENCE
        while len(found) < len(running.fronts()) or len(found) < 2:
            assert time.monotonic() < deadline, found
            client = stack.enter_context(talking(running, headers))
            pid = front_of(running, client)
            if pid is not None:
                found.setdefault(pid, client)
        yield [found[pid] for pid in sorted(found)]


def test_default_workers() -> None:
    assert [default_workers(cpus) for cpus in (1, 2, 7, 8, 12, 16, 64)] == [1, 1, 1, 2, 3, 4, 4]


def test_front_ends_share_the_port(pair: Running) -> None:
    assert len(pair.fronts()) == 2
    with each(pair) as clients:
        for client in clients:
            assert text_of(ask(client, CHAT)) == "hello"


@pytest.mark.parametrize("model", ["echo", "in-worker"])
def test_openai_sdk(pair: Running, model: str) -> None:
    for _ in range(4):
        with sdk(pair) as client:
            words: Any = [{"role": "user", "content": "one two STOP three"}]
            whole = client.chat.completions.create(model=model, messages=words, n=2, stop="STOP")
            assert [choice.message.content for choice in whole.choices] == ["one two "] * 2
            assert whole.usage is not None
            assert whole.usage.prompt_tokens == 5
            stream = client.chat.completions.create(model=model, messages=words, stream=True)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "one two STOP three"
            assert client.completions.create(model=model, prompt="abc").choices[0].text == "abc"
            assert {entry.id for entry in client.models.list()} == set(MODELS)


def test_tools_and_anthropic_sdk(pair: Running) -> None:
    for _ in range(4):
        with sdk(pair) as client, anthropic_sdk(pair) as other:
            asked: Any = {"messages": [{"role": "user", "content": "the weather?"}], "model": "caller"}
            told = client.chat.completions.create(**asked, tools=[{"type": "function", "function": TOOL}])
            calls = told.choices[0].message.tool_calls
            assert calls is not None
            assert json.loads(calls[0].function.arguments) == {"city": "Paris"}
            tool: Any = {"name": "weather", "input_schema": TOOL["parameters"]}
            message = other.messages.create(**asked, max_tokens=99, tools=[tool])
            assert [block.type for block in message.content] == ["tool_use"]
            with other.messages.stream(
                model="echo", max_tokens=99, messages=[{"role": "user", "content": "hi!"}]
            ) as one:
                assert one.get_final_text() == "hi!"


def test_errors(pair: Running) -> None:
    with each(pair) as clients:
        for client in clients:
            refused(ask(client, CHAT, model="gone"), 404, param="model")
            refused(ask(client, CHAT, messages=[{"role": "unknown"}]), 400, param="messages[0].role")
            refused(ask(client, CHAT, n=1000), 400, param="n")
            refused(ask(client, CHAT, model="failing"), 500)
            refused(client.get("/v1/nothing"), 404)
            assert client.get(CHAT).headers["allow"] == "POST"
            refused(client.post(CHAT, content=b"{}", headers={"content-type": "text/plain"}), 415)
            refused(client.get("/health", headers={"host": "evil.example"}), 400)
            stream = client.post(CHAT, json={"messages": HELLO, "model": "failing", "stream": True}).text
            assert "[DONE]" not in stream
            assert json.loads(stream.strip().rpartition("data: ")[2])["error"]["type"] == "inference_error"
            strict = client.post(CHAT, json={"messages": HELLO, "top_k": 3}, headers={"x-dragoman-strict": "true"})
            refused(strict, 400, param="top_k")
            assert ask(client, CHAT, top_k=3).headers["x-dragoman-ignored"] == "top_k"
            hasty = client.post(
                CHAT, json={"messages": HELLO, "model": "endless"}, headers={"x-dragoman-timeout": "0.3"}
            )
            refused(hasty, 504, code="deadline_exceeded")


def test_responses_are_shared(pair: Running) -> None:
    with each(pair) as (one, other):
        first = one.post("/v1/responses", json={"model": "echo", "input": "remember me"}).json()
        assert other.get(f"/v1/responses/{first['id']}").json()["output"] == first["output"]
        body = {"model": "echo", "input": "more", "previous_response_id": first["id"]}
        second = other.post("/v1/responses", json=body).json()
        assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
        refused(
            one.post("/v1/responses", json=body | {"previous_response_id": "resp_gone"}),
            404,
            param="previous_response_id",
        )
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
            assert eventually(lambda: other.get("/stats").json()["models"][model]["waiting"] == 1)
            assert not waiting.done()
        assert text_of(waiting.result()) == "tick"
        assert eventually(lambda: other.get("/stats").json()["models"][model]["running"] == 0)


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
    keys = {"limits": {"requests_per_minute": 5, "concurrency": 2}}
    config = {
        "models": {"echo": {"engine": "scripted"}, "endless": MODELS["endless"]},
        "api_keys": ["a", "b"],
        "keys": keys,
    }
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


async def streamed_text(client: httpx.AsyncClient, model: str, leave_after: int | None = None) -> tuple[str, str]:
    """Return the text and how the stream ended."""
    text, end = "", "cut off"
    try:
        async with client.stream("POST", CHAT, json={"messages": HELLO, "model": model, "stream": True}) as reply:
            if reply.status_code != 200:
                return "", json.loads(await reply.aread())["error"]["message"]
            pieces = 0
            async for line in reply.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    return text, "done"
                frame = json.loads(line.removeprefix("data: "))
                if "error" in frame:
                    return text, frame["error"]["message"]
                text += frame["choices"][0]["delta"].get("content") or ""
                pieces += 1
                if pieces == leave_after:
                    return text, "left"
    except httpx.TransportError:
        end = "reset"
    return text, end


def many(running: Running) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=running.url, trust_env=False, timeout=PATIENCE, limits=limits)


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
    with talking(pair) as client:
        assert eventually(lambda: client.get("/stats").json()["models"]["numbers"]["running"] == 0)


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
        ends = {end for _, end in told}
        assert ends == {"done", "reset"}
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


def test_killed_engine_fails_every_stream(pair: Running) -> None:
    async def whole() -> list[tuple[str, str]]:
        async with many(pair) as client:
            tasks = [asyncio.create_task(streamed_text(client, "endless-in-worker")) for _ in range(64)]
            await asyncio.to_thread(under_way, pair, "endless-in-worker", 64)
            for pid in pair.workers():
                os.kill(pid, signal.SIGKILL)
            return await asyncio.gather(*tasks)

    for text, end in asyncio.run(whole()):
        assert "process died" in end
        assert ("tick" * 12_000).startswith(text)
    with each(pair) as clients:
        for client in clients:
            assert text_of(ask(client, CHAT, model="in-worker")) == "hello"


def test_reload_applies_to_all_front_ends(tmp_path: Path) -> None:
    config: dict[str, Any] = {"models": {"echo": {"engine": "scripted"}}}
    file = tmp_path / "dragoman.json"
    with serving(tmp_path, config, "--workers", "2") as running, each(running) as clients:
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


def test_smollm2(tmp_path: Path, smollm2_path: Path) -> None:
    spec = {"source": str(smollm2_path), "context": 1024, "slots": 4, "layout": "as-is", "threads": 2}
    with serving(tmp_path, {"models": {"smollm2": spec}}, "--workers", "2") as running, each(running) as clients:
        asked = {"messages": [{"role": "user", "content": "Count to five."}], "temperature": 0, "max_tokens": 12}
        whole = [client.post(CHAT, json=asked).json()["choices"][0]["message"]["content"] for client in clients]
        assert whole[0] == whole[1]
        for client in clients:
            told = frames(client.post(CHAT, json=asked | {"stream": True}).text)
            assert "".join(frame["choices"][0]["delta"].get("content") or "" for frame in told[:-1]) == whole[0]
        with anthropic_sdk(running) as other:
            message = other.messages.create(model="smollm2", max_tokens=5, messages=[{"role": "user", "content": "hi"}])
            assert message.usage.output_tokens == 5
        with sdk(running) as asking, pytest.raises(openai.BadRequestError, match="context length"):
            asking.chat.completions.create(model="smollm2", messages=[{"role": "user", "content": "word " * 2000}])


def test_engine_in_the_parent_pauses_for_a_slow_client(tmp_path: Path) -> None:
    config = {"models": {"counting": {"engine": "tests.support.engines:Counting"}}}
    body = {"messages": HELLO, "stream": True}
    with serving(tmp_path, config, "--workers", "2") as running, talking(running) as one, talking(running) as other:

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


def test_unix_socket_is_shared(tmp_path: Path) -> None:
    def connect(port: int) -> httpx.Client:
        assert listened_on(tmp_path / "s")
        return httpx.Client(
            base_url="http://localhost", transport=httpx.HTTPTransport(uds=str(tmp_path / "s")), timeout=60
        )

    config = {"models": {"echo": {"engine": "scripted"}}}
    with serving_at(tmp_path, config, connect, "--workers", "2", "--socket", str(tmp_path / "s")) as (running, client):
        assert text_of(ask(client, CHAT)) == "hello"
        assert len(running.fronts()) == 2
        assert running.stop() == 0
    assert not (tmp_path / "s").exists()


def test_invalid_number_of_workers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--workers 0: expected a number from 1"):
        load_settings(None, Flags(workers=0), {})
