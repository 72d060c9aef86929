"""A model and its adapters over HTTP: two names, one process, one copy of the weights."""

import concurrent.futures
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.engines.lora_files import write_adapter
from tests.support.requests import CHAT, ask, talking, text_of
from tests.support.server_process import Running, Serving


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path, serving: Serving) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("adapters")
    write_adapter(folder / "chance.gguf")
    adapters = {"smollm2-chance": "./chance.gguf", "smollm2-mute": {"path": "./chance.gguf", "scale": 0}}
    model = {
        "source": str(smollm2_path),
        "context": 512,
        "slots": 2,
        "cache_sequences": 0,
        "layout": "as-is",
        "adapters": adapters,
    }
    config = {"models": {"smollm2": model}, "aliases": {"tuned": "smollm2-chance"}, "memory": "4GiB"}
    with serving(folder, config) as running:
        yield running


def answer(running: Running, model: str) -> httpx.Response:
    with talking(running) as client:
        return ask(client, CHAT, model=model, temperature=0, max_completion_tokens=12)


def test_model_and_adapters_are_listed(served: Running) -> None:
    with talking(served) as client:
        listed = client.get("/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["smollm2", "smollm2-chance", "smollm2-mute"]
    assert len({(model["state"], model["max_model_len"], model["format"]) for model in listed}) == 1


def test_adapters_answer_differently_at_the_same_time(served: Running) -> None:
    names = ["smollm2", "smollm2-chance", "smollm2-mute", "tuned", "SMOLLM2-chance", "smollm2"]
    with concurrent.futures.ThreadPoolExecutor(len(names)) as pool:
        replies = list(pool.map(lambda name: answer(served, name), names))
    texts = [text_of(reply) for reply in replies]
    assert texts[0] == texts[2] == texts[5]
    assert texts[1] == texts[3] == texts[4] != texts[0]
    tuned = "smollm2-chance"
    assert [reply.json()["model"] for reply in replies] == ["smollm2", tuned, "smollm2-mute", tuned, tuned, "smollm2"]


def test_weights_are_loaded_once(served: Running, smollm2_path: Path) -> None:
    (child,) = served.workers()
    smaps = Path(f"/proc/{child}/smaps").read_text()
    maps = re.findall(r"^[0-9a-f]+-[0-9a-f]+ .*\.gguf$((?:\n(?![0-9a-f]+-).*)*)", smaps, re.MULTILINE)
    resident = [int(found) * 1024 for block in maps for found in re.findall(r"^Rss: +(\d+) kB", block, re.MULTILINE)]
    size = smollm2_path.stat().st_size
    assert 0.5 * size < sum(resident) < 1.1 * size


def test_memory_is_counted_once(served: Running) -> None:
    with talking(served) as client:
        told = client.get("/admin/models").json()
    memory = [model["memory"] for model in told["data"]]
    assert len(memory) == 3
    assert told["used"] == pytest.approx(memory[0], rel=0.05)
