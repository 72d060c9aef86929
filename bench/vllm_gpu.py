"""Measures vLLM on one GPU: alone, through Dragoman and through its own server.

    python -m bench.vllm_gpu FOLDER [--only NAME ...] [--streams N ...] [--rounds N] [--json FILE]

FOLDER is a model in Hugging Face's layout. Without weights they are random, which takes as long to compute. All
subjects have the same engine arguments, and use the GPU one after the other.

    offline      `LLM.generate` of all prompts at once: what the engine can do
    dragoman     our defaults
    serve        `vllm serve`, its defaults
    serve-4      the same with --api-server-count 4
    serve-10     the same with --stream-interval 10

Each level has N streams of 128 tokens in and 128 out, which begin at the same moment; medians of the rounds are shown.
`chat` is 64 streams with a prompt of 4,000 tokens and tools, in requests per second. CPU seconds are those of the
server and all its children; those of vLLM's engine process, which all servers have, are shown beside them. The clients
are several processes. Their own limit is `ceiling`: what they receive from servers that have every frame ready.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, NamedTuple

from tools.ports import free_port

from bench.servers import run_dragoman, run_server
from dragoman.loadtest.target import Target

NAME = "bench"
PROMPT, REPLY = 128, 128
CHAT_STREAMS, CHAT_TOKENS, CHAT_REPLY = 64, 4000, 32
CLIENTS = max(2, min(8, (os.cpu_count() or 2) // 2))
START_SECONDS = 420
SILENCE_SECONDS = 60.0
TOKENS = range(1000, 20000)
FIRST = re.compile(rb'"(?:text|content)": ?"[^"]')
USAGE = re.compile(rb'"completion_tokens": ?(\d+)')
VARIANTS: Mapping[str, Sequence[str]] = {
    "serve": (),
    "serve-4": ("--api-server-count", "4"),
    "serve-10": ("--stream-interval", "10"),
}


class Seen(NamedTuple):
    """One reply, in seconds of one clock for all processes."""

    begun: float
    first: float
    ended: float
    tokens: int
    frames: int
    status: int


class Figures(NamedTuple):
    tokens_per_second: float
    requests_per_second: float
    ttft_p50: float
    ttft_p99: float
    tokens_per_frame: float
    cpu_per_million: float
    engine_cpu_per_million: float
    failed: int


class Reading:
    """Finds the first token, the frames and the usage with as little work as possible."""

    def __init__(self) -> None:
        self.first = 0.0
        self.frames = 0
        self.tail = b""

    def feed(self, data: bytes, now: float) -> None:
        if not self.first and FIRST.search(data):
            self.first = now
        self.frames += data.count(b"data: ")
        self.tail = (self.tail + data)[-2000:]

    @property
    def tokens(self) -> int:
        return int(found[-1]) if (found := USAGE.findall(self.tail)) else 0


def client(pipe: Pipe) -> None:
    """Run the jobs from the pipe: send all requests of a job at once, and return the replies."""
    with contextlib.suppress(ImportError):
        import uvloop

        uvloop.install()
    asyncio.run(_client(pipe))


async def _client(pipe: Pipe) -> None:
    loop = asyncio.get_running_loop()
    while (job := await loop.run_in_executor(None, pipe.recv)) is not None:
        url, route, bodies, moment = job
        target = Target(url, None, NAME, SILENCE_SECONDS)
        # Open one connection for each request before the measurement.
        await asyncio.gather(*(target.request("GET", "models", lambda *_: None) for _ in bodies))
        await asyncio.sleep(max(0.0, moment - time.perf_counter()))
        seen = await asyncio.gather(*(_ask(target, route, body) for body in bodies))
        await target.transport.aclose()
        pipe.send([tuple(each) for each in seen])


async def _ask(target: Target, route: str, body: bytes) -> Seen:
    reading = Reading()
    begun = time.perf_counter()
    status = await target.request("POST", route, reading.feed, body)
    ended = time.perf_counter()
    return Seen(begun, reading.first or ended, ended, reading.tokens, reading.frames, status)


class Load:
    """The client processes."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes: list[Pipe] = []
        self.processes = []
        for _ in range(CLIENTS):
            here, there = context.Pipe()
            process = context.Process(target=client, args=(there,), daemon=True)
            process.start()
            self.pipes.append(here)
            self.processes.append(process)

    def ask(self, url: str, route: str, bodies: Sequence[bytes]) -> list[Seen]:
        moment = time.perf_counter() + 0.3 + len(bodies) / 2000
        for at, pipe in enumerate(self.pipes):
            pipe.send((url, route, bodies[at :: len(self.pipes)], moment))
        return [Seen(*seen) for pipe in self.pipes for seen in pipe.recv()]

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(5)


def completion(seed: int) -> bytes:
    numbers = random.Random(seed)
    prompt = [numbers.choice(TOKENS) for _ in range(PROMPT)]
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    body = {"model": NAME, "prompt": prompt, "max_tokens": REPLY, "ignore_eos": True, "temperature": 1.0, **usage}
    return json.dumps(body).encode()


def chat(seed: int) -> bytes:
    """Return a request like an agent's: long instructions and tools that all share, and a question of its own."""
    numbers = random.Random(7)
    words = [f"rule{numbers.randrange(100)}" for _ in range(CHAT_TOKENS // 5)]
    parameters = {"type": "object", "properties": {"path": {"type": "string"}, "line": {"type": "integer"}}}
    tools = [
        {"type": "function", "function": {"name": f"tool_{at}", "description": "Reads.", "parameters": parameters}}
        for at in range(12)
    ]
    messages = [
        {"role": "system", "content": " ".join(words)},
        {"role": "user", "content": f"Question {seed}: " + " ".join(str(numbers.random()) for _ in range(10))},
    ]
    body = {"model": NAME, "messages": messages, "tools": tools, "max_tokens": CHAT_REPLY, "ignore_eos": True}
    return json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()


class CpuSeconds(NamedTuple):
    """CPU seconds of a server with all its children, and of vLLM's engine process among them."""

    total: float
    engine: float


def cpu_seconds(pid: int) -> CpuSeconds:
    """Return what the running processes have used so far."""
    processes: dict[int, tuple[int, float, bool]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            is_engine = "EngineCore" in (path / "cmdline").read_text()
            processes[int(path.name)] = (int(fields[1]), seconds, is_engine)
    tree = {pid}
    while more := {child for child, (parent, *_) in processes.items() if parent in tree and child not in tree}:
        tree |= more
    counted = [processes[one] for one in tree if one in processes]
    return CpuSeconds(sum(one[1] for one in counted), sum(one[1] for one in counted if one[2]))


def measure_round(load: Load, url: str, pid: int, route: str, bodies: Sequence[bytes]) -> Figures:
    before = cpu_seconds(pid)
    seen = load.ask(url, route, bodies)
    after = cpu_seconds(pid)
    good = [one for one in seen if one.status == 200 and one.tokens]
    if not good:
        raise SystemExit(f"no request succeeded: status {seen[0].status}")
    seconds = max(one.ended for one in good) - min(one.begun for one in good)
    tokens = sum(one.tokens for one in good)
    first = sorted(one.first - one.begun for one in good)
    return Figures(
        tokens / seconds,
        len(good) / seconds,
        statistics.median(first),
        first[min(len(first) - 1, len(first) * 99 // 100)],
        tokens / sum(one.frames for one in good),
        (after.total - before.total) / tokens * 1e6,
        (after.engine - before.engine) / tokens * 1e6,
        len(seen) - len(good),
    )


def medians(rounds: Sequence[Figures]) -> Figures:
    return Figures(*(statistics.median(values) for values in zip(*rounds, strict=True)))


def measure_server(load: Load, url: str, pid: int, streams: Sequence[int], rounds: int) -> dict[str, Figures]:
    """Measure all levels of one server. The first round of each does not count: it compiles and fills caches."""
    found = {}
    for count in streams:
        bodies = [[completion(1000 * turn + at) for at in range(count)] for turn in range(rounds + 1)]
        runs = [measure_round(load, url, pid, "completions", part) for part in bodies]
        found[str(count)] = medians(runs[1:])
        print(f"  {count:4} streams: {format_figures(found[str(count)])}", flush=True)
    bodies = [[chat(1000 * turn + at) for at in range(CHAT_STREAMS)] for turn in range(rounds + 1)]
    runs = [measure_round(load, url, pid, "chat/completions", part) for part in bodies]
    found["chat"] = medians(runs[1:])
    print(f"  chat: {format_figures(found['chat'])}", flush=True)
    return found


def format_figures(figures: Figures) -> str:
    return (
        f"{figures.tokens_per_second:8,.0f} tok/s  {figures.requests_per_second:6.1f} req/s  "
        f"TTFT p50 {figures.ttft_p50 * 1000:6.0f} ms p99 {figures.ttft_p99 * 1000:6.0f} ms  "
        f"{figures.tokens_per_frame:5.2f} tok/frame  {figures.cpu_per_million:6.1f} CPU s per million tokens, "
        f"{figures.engine_cpu_per_million:.1f} of them vLLM's engine process"
        + (f"  {figures.failed} FAILED" if figures.failed else "")
    )


def engine_args(folder: Path) -> dict[str, Any]:
    weights = any(folder.glob("*.safetensors"))
    common: dict[str, Any] = {"max_model_len": 8192, "gpu_memory_utilization": 0.8, "max_num_seqs": 512}
    return common if weights else common | {"load_format": "dummy"}


@contextlib.contextmanager
def server(name: str, folder: Path, scratch: Path) -> Iterator[tuple[int, int]]:
    """Run one of the servers and yield its port and process id."""
    log, arguments = scratch / f"{name}.log", engine_args(folder)
    if name == "dragoman":
        model = {"engine": "vllm", "path": str(folder), "args": arguments, "format": "hermes"}
        with run_dragoman({"models": {NAME: model}}, seconds=START_SECONDS, log=log) as started:
            yield started
        return
    port = free_port()
    given = [part for key, value in arguments.items() for part in (f"--{key.replace('_', '-')}", str(value))]
    given += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--served-model-name", NAME]
    given += ["--port", str(port), "--host", "127.0.0.1", *VARIANTS[name]]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder), *given]
    with run_server(command, f"http://127.0.0.1:{port}/health", seconds=START_SECONDS, log=log) as pid:
        yield port, pid


OFFLINE = """
import json, random, sys, time
from vllm import LLM, SamplingParams
folder, args, streams, rounds, size, reply = json.loads(sys.argv[1])
if __name__ == "__main__":
    llm = LLM(model=folder, **args)
    wanted = SamplingParams(max_tokens=reply, ignore_eos=True, temperature=1.0)
    for count in streams:
        speeds = []
        for turn in range(rounds + 1):
            numbers = random.Random(turn)
            drawn = [[numbers.randrange(1000, 20000) for _ in range(size)] for _ in range(count)]
            prompts = [{"prompt_token_ids": tokens} for tokens in drawn]
            begun = time.perf_counter()
            made = llm.generate(prompts, wanted, use_tqdm=False)
            speeds.append(sum(len(one.outputs[0].token_ids) for one in made) / (time.perf_counter() - begun))
        print("SPEED", count, sorted(speeds[1:])[len(speeds[1:]) // 2], flush=True)
"""


def offline(folder: Path, streams: Sequence[int], rounds: int, scratch: Path) -> dict[str, float]:
    script = scratch / "offline.py"
    script.write_text(OFFLINE)
    arguments = json.dumps([str(folder), engine_args(folder), list(streams), rounds, PROMPT, REPLY])
    done = subprocess.run([sys.executable, str(script), arguments], capture_output=True, text=True, check=False)
    speeds = dict(line.split()[1:] for line in done.stdout.splitlines() if line.startswith("SPEED"))
    if not speeds:
        raise SystemExit(done.stderr[-3000:])
    for count, speed in speeds.items():
        print(f"  {count:>4} streams: {float(speed):8,.0f} tok/s", flush=True)
    return {count: float(speed) for count, speed in speeds.items()}


async def _stub(port: int) -> None:
    """Serve replies whose frames are all ready, with one write for each."""
    frame = (
        b'data: {"id":"cmpl-1","object":"text_completion","model":"bench","choices":[{"index":0,"text":" word"}]}\n\n'
    )
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":128,"completion_tokens":%d}}\n\n' % REPLY

    def chunk(data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data)

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head)
            await reader.readexactly(int(length[1]) if length else 0)
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            for _ in range(REPLY):
                writer.write(chunk(frame))
                await asyncio.sleep(0)
            writer.write(chunk(usage) + b"0\r\n\r\n")
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(reply, "127.0.0.1", port, reuse_port=True, backlog=1024)
    await server.serve_forever()


def stub(port: int) -> None:
    asyncio.run(_stub(port))


def ceiling(load: Load, streams: int) -> float:
    port = free_port()
    context = multiprocessing.get_context("spawn")
    servers = [context.Process(target=stub, args=(port,), daemon=True) for _ in range(CLIENTS)]
    for one in servers:
        one.start()
    time.sleep(2)
    url = f"http://127.0.0.1:{port}"
    runs = [
        measure_round(load, url, os.getpid(), "completions", [completion(at) for at in range(streams)]) for _ in "123"
    ]
    for one in servers:
        one.kill()
    return medians(runs).tokens_per_second


def measure_subject(name: str, load: Load, options: argparse.Namespace, scratch: Path) -> Any:
    if name == "ceiling":
        speed = ceiling(load, max(options.streams))
        print(f"  {speed:,.0f} tok/s by {CLIENTS} clients", flush=True)
        return speed
    if name == "offline":
        return offline(options.folder, options.streams, options.rounds, scratch)
    begun = time.monotonic()
    with server(name, options.folder, scratch) as (port, pid):
        print(f"  ready after {time.monotonic() - begun:.0f} s", flush=True)
        figures = measure_server(load, f"http://127.0.0.1:{port}", pid, options.streams, options.rounds)
        return {level: one._asdict() for level, one in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    names = ["ceiling", "offline", "dragoman", *VARIANTS]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 64, 256, 512])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="the file for the figures, written after each server")
    arguments = parser.parse_args()
    load = Load()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in arguments.only:
            print(f"{name}:", flush=True)
            found[name] = measure_subject(name, load, arguments, Path(scratch))
            if arguments.json:
                arguments.json.write_text(json.dumps(found, indent=1))
    load.close()


if __name__ == "__main__":
    main()
