"""Dragoman on a real Ray cluster: two nodes on this machine, SmolLM2 in the replicas, the official SDKs in front.

Run by `make test-ray`; slow.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.context import _get_global_client

from dragoman.config.loading import Flags, load_settings
from dragoman.config.settings import Settings
from dragoman.core.errors import ConfigError
from dragoman.files import sources
from dragoman.ray import app, application

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]

PORT = 8765
STORE = 80 * 1024 * 1024
CONFIG = """
models:
  smollm2: {source: smollm2, layout: as-is, slots: 2, context: 1024, threads: 1,
    ray: {max_replicas: 3, target_ongoing_requests: 1, upscale_delay_s: 1, downscale_delay_s: 3,
      look_back_period_s: 3, metrics_interval_s: 1}}
  pair: {source: smollm2, layout: as-is, slots: 4, context: 2048, threads: 1, ray: {replicas: 2}}
  seldom: {engine: scripted, ray: {min_replicas: 0, num_cpus: 0.1, upscale_delay_s: 0, downscale_delay_s: 2,
      look_back_period_s: 2, metrics_interval_s: 1}}
  tracing: {engine: "tests.ray.engines:TracingEngine", folder: FOLDER, ray: {replicas: 2, num_cpus: 0.5}}
"""
SEA = "You know all about the sea: tides, waves, currents, and the people who sail on it. " * 8
HILLS = "You know all about mountains: rocks, glaciers, passes, and the people who climb them. " * 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tracing")


@pytest.fixture(scope="module")
def config(folder: Path) -> Path:
    path = folder / "dragoman.yaml"
    path.write_text(CONFIG.replace("FOLDER", str(folder)))
    return path


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Yield the address of a cluster with two nodes."""
    made = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False, "object_store_memory": STORE}
    )
    made.add_node(num_cpus=4, object_store_memory=STORE)
    ray.init(address=made.address, log_to_driver=False)
    start_serve()
    yield made.address
    serve.shutdown()
    ray.shutdown()
    made.shutdown()


def start_serve() -> None:
    """Does nothing while Serve runs. The end of `serve run` stops it."""
    serve.start(proxy_location="HeadOnly", http_options={"port": PORT})


@pytest.fixture(scope="module")
def url(cluster: str, config: Path) -> str:
    serve.run(application(load_settings(str(config), Flags(), {})))
    return f"http://127.0.0.1:{PORT}"


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="any", timeout=300, max_retries=0)


def deployments(app_name: str = "default") -> dict[str, Any]:
    found: dict[str, Any] = _get_global_client().get_serve_details()["applications"][app_name]["deployments"]
    return found


def replicas(model: str) -> list[dict[str, Any]]:
    """Return the running replicas of a model."""
    (found,) = [entry for name, entry in deployments().items() if name.endswith(model)]
    return [replica for replica in found["replicas"] if replica["state"] == "RUNNING"]


def pids(model: str) -> set[int]:
    return {replica["pid"] for replica in replicas(model)}


def worker_of(pid: int) -> int:
    """Return the process id of a replica's worker."""
    found = subprocess.run(["pgrep", "-P", str(pid), "-f", "dragoman.ipc.worker_main"], capture_output=True, check=True)
    return int(found.stdout)


def wait_for(seen: Callable[[], object], seconds: float = 180) -> None:
    end = time.monotonic() + seconds
    while not seen():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.2)


def ask(client: openai.OpenAI, model: str, *texts: str, tokens: int = 12) -> tuple[str, int]:
    """Return the text of a complete streamed reply and its cached tokens."""
    roles = ("system", "user", "assistant", "user")
    messages: Any = [
        {"role": role, "content": text} for role, text in zip(roles[2 - len(texts) :], texts, strict=False)
    ]
    stream = client.chat.completions.create(
        model=model, messages=messages, max_tokens=tokens, stream=True, stream_options={"include_usage": True}
    )
    text, cached, ended = "", 0, False
    for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            ended = ended or choice.finish_reason is not None
        if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
            cached = chunk.usage.prompt_tokens_details.cached_tokens or 0
    assert ended, f"cut off after {text!r}"
    return text, cached


def test_official_sdks_stream_from_replicas(client: openai.OpenAI, url: str) -> None:
    text, _ = ask(client, "smollm2", "Write a sentence about the sea.")
    assert text
    claude = anthropic.Anthropic(base_url=url, api_key="any", timeout=300, max_retries=0)
    with claude.messages.stream(
        model="smollm2", max_tokens=8, messages=[{"role": "user", "content": "Hello!"}]
    ) as stream:
        assert "".join(stream.text_stream)
    assert claude.messages.count_tokens(model="smollm2", messages=[{"role": "user", "content": "Hello!"}]).input_tokens
    listed = [model.id for model in client.models.list()]
    assert listed == ["smollm2", "pair", "seldom", "tracing"]


def test_request_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="1024") as caught:
        ask(client, "smollm2", "the sea " * 2000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        ask(client, "unknown", "Hello!")


def test_reply_has_one_request_id(url: str) -> None:
    body = {"model": "tracing", "messages": [{"role": "user", "content": "Hello!"}]}
    for sent in ({}, {"x-request-id": "mine"}):
        reply = httpx.post(f"{url}/v1/chat/completions", json=body, headers=sent, timeout=60)
        (told,) = reply.headers.get_list("x-request-id")
        assert told == sent.get("x-request-id", told)
        assert reply.headers.get_list("x-dragoman-request-id") == [reply.json()["id"]]


def test_entrance_reserves_cpus_only_if_configured(config: Path) -> None:
    def reserved(built: serve.Application) -> object:
        return built._bound_deployment.ray_actor_options["num_cpus"]

    assert reserved(app({"config": str(config)})) == 0
    assert reserved(app({"config": str(config), "entrance_cpus": "1.5"})) == 1.5
    for wrong in ("many", "-1", "nan", "inf"):
        with pytest.raises(ConfigError, match=f"entrance_cpus={wrong}: expected a number of CPUs"):
            app({"config": str(config), "entrance_cpus": wrong})
    with pytest.raises(ConfigError, match="unknown argument 'confg'; expected config=FILE or entrance_cpus=NUMBER"):
        app({"confg": "x"})


def test_replicas_are_on_both_nodes(url: str) -> None:
    wait_for(lambda: len(replicas("tracing")) == 2 and len(replicas("pair")) == 2)
    assert len({replica["node_id"] for model in ("pair", "tracing") for replica in replicas(model)}) == 2


def test_conversation_returns_to_its_replica(client: openai.OpenAI) -> None:
    first = {prompt: ask(client, "tracing", prompt, "One?")[0] for prompt in (SEA, HILLS)}
    assert set(first.values()) == {str(pid) for pid in pids("tracing")}
    for question in ("Two?", "Three?", "Four?"):
        for prompt, pid in first.items():
            assert ask(client, "tracing", prompt, question)[0] == pid
    for prompt in (SEA, HILLS):
        assert ask(client, "pair", prompt, "One?")[1] < 50
    for prompt in (SEA, HILLS, SEA):
        assert ask(client, "pair", prompt, "Two or three?")[1] > 100


def test_busy_replica_shares_its_requests(client: openai.OpenAI) -> None:
    home = ask(client, "tracing", SEA, "One?")[0]
    with ThreadPoolExecutor(12) as pool:
        told = list(pool.map(lambda at: ask(client, "tracing", SEA, f"WAIT {at}?")[0], range(12)))
    assert set(told) == {str(pid) for pid in pids("tracing")}
    assert told.count(home) >= 5


def test_disconnect_cancels_the_generation_in_the_replica(client: openai.OpenAI, folder: Path) -> None:
    stream = client.chat.completions.create(
        model="tracing", messages=[{"role": "user", "content": "Go ON"}], stream=True
    )
    pid = next(chunk.choices[0].delta.content for chunk in stream if chunk.choices and chunk.choices[0].delta.content)
    stream.close()
    wait_for((folder / f"cancelled.{pid}").exists, 15)


def test_another_replica_answers_after_a_death_before_output(client: openai.OpenAI, folder: Path) -> None:
    for trace in folder.glob("asked.*"):
        trace.unlink()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, client, "tracing", "WAIT a moment.")
        wait_for(lambda: list(folder.glob("asked.*")), 15)
        (trace,) = folder.glob("asked.*")
        os.kill(int(trace.suffix[1:]), signal.SIGKILL)
        assert answer.result()[0] not in ("", trace.suffix[1:])
    wait_for(lambda: len(pids("tracing") - {int(trace.suffix[1:])}) == 2)


def test_death_after_output_is_an_error(client: openai.OpenAI) -> None:
    stream = iter(
        client.chat.completions.create(model="tracing", messages=[{"role": "user", "content": "Go ON"}], stream=True)
    )
    pid = int(next(text for chunk in stream if (text := chunk.choices[0].delta.content)))
    os.kill(pid, signal.SIGKILL)
    begun = time.monotonic()
    with pytest.raises(openai.APIError, match="died"):
        for _ in stream:
            pass
    assert time.monotonic() - begun < 10
    wait_for(lambda: len(pids("tracing") - {pid}) == 2)


class Load:
    """Sends requests in several threads and collects the outcome."""

    def __init__(self, client: openai.OpenAI, model: str, threads: int) -> None:
        self.answered = 0
        self.errors: list[openai.APIError] = []
        self.unexpected: list[Exception] = []
        self._client = client
        self._model = model
        self._ending = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(at,), daemon=True) for at in range(threads)]
        for thread in self._threads:
            thread.start()

    def _ask(self, at: int) -> None:
        turn = 0
        while not self._ending.is_set():
            turn += 1
            try:
                ask(self._client, self._model, f"{at}.{turn}: what is the sea like?", tokens=16)
                self.answered += 1
            except openai.APIError as error:
                self.errors.append(error)
            except Exception as error:  # noqa: BLE001 (asserted below)
                self.unexpected.append(error)

    def end(self) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive(), "a request was never answered"
        assert not self.unexpected


def test_replica_killed_under_load(client: openai.OpenAI) -> None:
    wait_for(lambda: len(pids("pair")) == 2)
    load = Load(client, "pair", threads=6)
    wait_for(lambda: load.answered >= 6)
    killed = min(pids("pair"))
    os.kill(killed, signal.SIGKILL)
    after = load.answered
    wait_for(lambda: load.answered >= after + 12)
    wait_for(lambda: len(pids("pair") - {killed}) == 2)
    load.end()
    assert len(load.errors) <= 6, "only its running requests fail"
    assert all("died" in error.message for error in load.errors)
    assert ask(client, "pair", "And now?")[0]


def test_killed_engine_restarts_in_its_replica(client: openai.OpenAI) -> None:
    before = pids("pair")
    load = Load(client, "pair", threads=4)
    wait_for(lambda: load.answered >= 4)
    os.kill(worker_of(min(before)), signal.SIGKILL)
    after = load.answered
    wait_for(lambda: load.answered >= after + 12)
    load.end()
    assert all("died" in error.message for error in load.errors)
    assert len(load.errors) <= 4
    assert pids("pair") == before


def test_entrance_restarts_after_a_kill(client: openai.OpenAI) -> None:
    (entrance,) = pids("entrance")
    os.kill(entrance, signal.SIGKILL)
    wait_for(lambda: pids("entrance") - {entrance})

    def is_back() -> bool:
        try:
            return bool(ask(client, "smollm2", "And now?")[0])
        except openai.APIError:
            return False

    wait_for(is_back)


def test_replicas_scale_with_the_load(client: openai.OpenAI) -> None:
    wait_for(lambda: len(pids("smollm2")) == 1)
    load = Load(client, "smollm2", threads=6)
    wait_for(lambda: len(pids("smollm2")) == 3)
    before = load.answered
    wait_for(lambda: load.answered >= before + 6)
    load.end()
    little = Load(client, "smollm2", threads=1)
    wait_for(lambda: len(pids("smollm2")) == 1)
    little.end()
    assert not load.errors + little.errors, "a replica finishes its replies before it ends"
    assert little.answered


def test_unused_model_scales_to_zero(client: openai.OpenAI) -> None:
    wait_for(lambda: not pids("seldom"))
    assert ask(client, "seldom", "Hello!")[0]


def test_serve_run_reads_the_configuration_from_the_environment(cluster: str, url: str, tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text("models_yaml: models.yaml\napi_keys: [secret]\n")
    models = tmp_path / "models.yaml"
    models.write_text("small: {engine: scripted, nickname: x, ray: {num_cpus: 0.1}}\n")
    log = tmp_path / "log"
    command = [str(Path(sys.executable).with_name("serve")), "run", "--address", cluster, "--name", "small"]
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--route-prefix", "/small", "dragoman.ray:app"],
            env={**os.environ, "DRAGOMAN_CONFIG": str(path)},
            stdout=output,
            stderr=output,
        )
    small = f"{url}/small/v1"
    try:
        # Serve holds a request until a replica is ready.
        wait_for(lambda: httpx.get(f"{small}/models", timeout=60).status_code == 401)
        client = openai.OpenAI(base_url=small, api_key="secret", timeout=60)
        assert ask(client, "small", "Hello!")[0]
        assert f"{models}:1: model small: ignored keys: nickname" in log.read_text()
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


@contextmanager
def deployed(settings: Settings, name: str) -> Iterator[openai.OpenAI]:
    """An application of its own, and a client of it."""
    start_serve()
    serve.run(application(settings), name=name, route_prefix=f"/{name}")
    try:
        with openai.OpenAI(
            base_url=f"http://127.0.0.1:{PORT}/{name}/v1", api_key="any", timeout=300, max_retries=0
        ) as client:
            yield client
    finally:
        serve.delete(name)


SHARED = """
models:
  first: {source: smollm2, layout: as-is, slots: 2, context: 1024, threads: 1, ray: {num_cpus: 0.1}}
  by-path: {source: PATH, layout: as-is, slots: 2, context: 1024, threads: 1, ray: {num_cpus: 0.1}}
  other-context: {source: smollm2, layout: as-is, slots: 2, context: 512, threads: 1, ray: {num_cpus: 0.1}}
aliases: {alias: by-path}
"""


def test_names_of_one_file_share_their_replicas(cluster: str, tmp_path: Path) -> None:
    (tmp_path / "link.gguf").symlink_to(sources.fetch("smollm2"))
    path = tmp_path / "shared.yaml"
    path.write_text(SHARED.replace("PATH", str(tmp_path / "link.gguf")))
    with deployed(load_settings(str(path), Flags(), {}), "shared") as client:
        assert sorted(deployments("shared")) == ["entrance", "model-0-first", "model-1-other-context"]
        assert [model.id for model in client.models.list()] == ["first", "by-path", "other-context"]
        with ThreadPoolExecutor(6) as pool:
            names = ["first", "by-path", "alias"] * 2
            told = list(pool.map(lambda name: ask(client, name, "Count to five.")[0], names))
        assert all(told)
        for name, context in {"first": 1024, "by-path": 1024, "other-context": 512}.items():
            model: Any = client.models.retrieve(name)
            assert (model.id, model.max_model_len, model.state) == (name, context, "ready")
        # The prefix cache is shared too.
        assert ask(client, "first", SEA, "One?")[1] < 50
        assert ask(client, "by-path", SEA, "One or two?")[1] > 100


def test_entrance_on_a_machine_where_the_files_differ(cluster: str, tmp_path: Path) -> None:
    """The entrance does not load a model itself where only the driver sees that two names have one file."""
    link = tmp_path / "link.gguf"
    link.symlink_to(sources.fetch("smollm2"))
    path = tmp_path / "shared.yaml"
    path.write_text(SHARED.replace("PATH", str(link)))
    built = application(load_settings(str(path), Flags(), {}))
    link.unlink()
    start_serve()
    try:
        serve.run(built, name="moved", route_prefix="/moved")
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{PORT}/moved/v1", api_key="any", timeout=300, max_retries=0)
        assert ask(client, "by-path", "Hello!")[0]
        assert "ggml" not in "".join(Path(f"/proc/{pid_of('moved', 'entrance')}/maps").read_text())
        client.close()
    finally:
        serve.delete("moved")


def pid_of(app_name: str, deployment: str) -> int:
    (replica,) = deployments(app_name)[deployment]["replicas"]
    pid: int = replica["pid"]
    return pid


def test_models_of_a_models_yaml(cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights/link.gguf").symlink_to(sources.fetch("smollm2"))
    (tmp_path / "models.yaml").write_text(
        "plain: weights/link.gguf\n"
        "models:\n"
        "  tuned: {path: weights/link.gguf, context: 512, threads: 1, nickname: x, ray: {num_cpus: 0.1, replicas: 2}}\n"
        "  echo: {engine: scripted, ray: {num_cpus: 0.1}}\n"
    )
    (tmp_path / "dragoman.yaml").write_text("models_yaml: models.yaml\nmodels: {echo-too: {engine: scripted}}\n")
    # The replicas have another working directory.
    monkeypatch.chdir(tmp_path)
    with deployed(load_settings(None, Flags(), {}), "listed") as client:
        monkeypatch.chdir("/")
        assert [model.id for model in client.models.list()] == ["echo-too", "plain", "tuned", "echo"]
        for name in ("echo-too", "plain", "tuned", "echo"):
            assert ask(client, name, "Hello!")[0]
        assert len(deployments("listed")["model-2-tuned"]["replicas"]) == 2
        model: Any = client.models.retrieve("tuned")
        assert model.max_model_len == 512
