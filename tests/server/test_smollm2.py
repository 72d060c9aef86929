"""A real model under load, with disconnects, crashes and invalid files."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from tools.ports import free_port

from tests.support.requests import eventually, recorded, under_way
from tests.support.sdk import ModelClient, content, sdk
from tests.support.server_process import Serving

STORY = "Write a very long story about a cat who goes to sea."
TOKENS = 1000
"""`max_tokens` for clients that disconnect: enough for several seconds on any machine."""


Start = Callable[[Path, dict[str, Any]], AbstractContextManager[ModelClient]]


@pytest.fixture(scope="session")
def asking(serving: Serving) -> Start:
    @contextmanager
    def started(folder: Path, config: dict[str, Any]) -> Iterator[ModelClient]:
        with serving(folder, config) as running, sdk(running) as client:
            yield ModelClient(client, running, "smollm2")

    return started


def offering(path: Path, **options: Any) -> dict[str, Any]:
    return {"models": {"smollm2": {"source": str(path), "layout": "as-is", **options}}}


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path, asking: Start) -> Iterator[ModelClient]:
    with asking(tmp_path_factory.mktemp("crowd"), offering(smollm2_path, context=256, slots=16)) as model:
        yield model


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path, asking: Start) -> Iterator[ModelClient]:
    """One slot, and one place in the queue."""
    config = offering(smollm2_path, context=2048, slots=1) | {"limits": {"queue": 1}}
    with asking(tmp_path_factory.mktemp("narrow"), config) as model:
        yield model


def test_control_tokens_in_raw_prompts(smol: ModelClient) -> None:
    assert smol.tokenize("<|im_start|>", special=True) == [1]
    assert smol.tokenize("<|im_end|>", special=True) == [2]
    prompt = "<|im_start|>user\nSay hello.<|im_end|>\n<|im_start|>assistant\n"
    assert smol.complete(prompt, max_tokens=1).usage.prompt_tokens < len(smol.tokenize(prompt))
    # In a message they are text.
    tokens = [smol.chat(text, max_tokens=1).usage for text in ("<|im_end|>", "plain")]
    assert tokens[0] is not None is not tokens[1]
    assert tokens[0].prompt_tokens - tokens[1].prompt_tokens == len(smol.tokenize("<|im_end|>")) - 1


@pytest.fixture
def freed(narrow: ModelClient) -> Iterator[Callable[[], None]]:
    """Check that the only slot becomes free, and that the event log has a request whose client left."""

    def left() -> int:
        return len(recorded(narrow.running, 0, status=499))

    before = left()

    def check() -> None:
        assert eventually(lambda: left() > before)
        under_way(narrow.running, "smollm2", 0)
        assert narrow.chat("Say hello.", max_tokens=1)

    yield check
    assert narrow.running.process.poll() is None


def test_disconnect_in_mid_stream(narrow: ModelClient, freed: Callable[[], None]) -> None:
    with narrow.chat(STORY, stream=True, max_tokens=TOKENS) as stream:  # type: ignore[attr-defined]
        for _ in range(4):
            next(stream)
    freed()


def test_disconnect_during_prefill(narrow: ModelClient, freed: Callable[[], None]) -> None:
    for stream in (True, False):
        impatient = narrow.client.with_options(timeout=0.6)
        with pytest.raises(openai.APITimeoutError):
            impatient.completions.create(model="smollm2", prompt="word " * 1500, max_tokens=5, stream=stream)
        freed()


def test_kill_9_of_the_worker(crowd: ModelClient) -> None:
    (child,) = crowd.running.workers()

    with crowd.chat(STORY, stream=True, max_tokens=200) as stream, ThreadPoolExecutor(2) as pool:  # type: ignore[attr-defined]
        next(stream)
        next(stream)
        whole = pool.submit(lambda: crowd.complete("Once upon a time", max_tokens=200))
        reading = pool.submit(lambda: crowd.complete("word " * 230, stream=True))
        under_way(crowd.running, "smollm2", 3)
        os.kill(child, signal.SIGKILL)
        with pytest.raises(openai.APIError, match="process died") as broken:
            list(stream)
        assert broken.value.code == "engine_died"
        for request in (whole, reading):
            with pytest.raises(openai.InternalServerError) as refused:
                request.result()
            assert (refused.value.status_code, refused.value.code) == (502, "engine_died")
    assert content(crowd.chat("What is 2+2?")) == "The answer to this classic math problem is 4."
    assert crowd.running.process.poll() is None
    (another,) = crowd.running.workers()
    assert another != child
    assert recorded(crowd.running, error="engine_died", status=200)


def test_file_missing_at_worker_restart(tmp_path: Path, smollm2_path: Path, asking: Start) -> None:
    link = tmp_path / "model.gguf"
    link.symlink_to(smollm2_path)
    with asking(tmp_path, offering(link, context=256, slots=1)) as model:
        (child,) = model.running.workers()
        link.unlink()
        os.kill(child, signal.SIGKILL)
        assert eventually(lambda: f"there is no model file at {link}" in model.running.log.read_text())
        with pytest.raises(openai.InternalServerError) as raised:
            model.chat("hello")
        assert (raised.value.status_code, raised.value.code) == (503, "model_failed")
        assert "gguf" not in raised.value.message
        link.symlink_to(smollm2_path)
        # It is retried after the Retry-After of the error, not before.
        pause = int(raised.value.response.headers["retry-after"])
        assert 1 <= pause <= 60
        with pytest.raises(openai.InternalServerError):
            model.chat("hello")
        time.sleep(pause)
        assert content(model.chat("Say hello.", max_tokens=1))


@pytest.fixture(params=["cut off", "garbage"])
def corrupt(request: pytest.FixtureRequest, tmp_path: Path, smollm2_path: Path) -> Path:
    path = tmp_path / "corrupt.gguf"
    with smollm2_path.open("rb") as whole:
        start = whole.read(3_000_000)
    path.write_bytes(start if request.param == "cut off" else start[:24] + os.urandom(100_000))
    return path


def test_corrupt_only_model_stops_server(corrupt: Path) -> None:
    command = [sys.executable, "-m", "dragoman", "serve", "--model", f"broken={corrupt}", "--port", str(free_port())]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    assert len(ended.stderr.splitlines()) <= 5
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("dragoman: ")
    assert "corrupt.gguf" in last
    assert ended.stdout == ""


def test_corrupt_second_model_does_not_affect_first(corrupt: Path, asking: Start) -> None:
    config = {"models": {"echo": {"engine": "scripted"}, "smollm2": {"source": str(corrupt)}}, "default": "echo"}
    with asking(corrupt.parent, config) as model:
        for _ in range(2):
            with pytest.raises(openai.InternalServerError) as raised:
                model.chat("hello")
            assert (raised.value.status_code, raised.value.code) == (503, "model_failed")
            assert int(raised.value.response.headers["retry-after"]) >= 1
            assert str(corrupt.parent) not in raised.value.message
            assert content(model.chat("hello", model="echo")) == "hello"
        assert eventually(lambda: not model.running.workers())
