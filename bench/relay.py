"""What it costs to pass a model on: latency per request and CPU per token of the upstream engine.

    python -m bench.relay [--quick] [--litellm COMMAND]

One Dragoman with the scripted engine is the upstream; in front of it stand Dragoman with `engine: upstream`, and, where
`--litellm` names its command, the LiteLLM proxy. That is not among the packages of this project: install it on its own,

    python -m venv litellm && litellm/bin/pip install 'litellm[proxy]'
    python -m bench.relay --litellm litellm/bin/litellm

Tokens come at a steady pace, so that each has to be passed on alone. CPU is the proxy's own, the kernel's part of it
included. The latency of a request is the time to its first token, with the upstream's own taken off. Cores as in
bench/frontend.py: all servers share one, and whoever asks has the other. Rounds alternate; medians are shown.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import URLError
from urllib.request import urlopen

from tools.ports import free_port

from bench import frontend
from bench.frontend import CHUNK, Stream, cpu_times, pinned, process, run

NAME = "scripted"


class Cost(NamedTuple):
    """Seconds."""

    first_token: float
    per_token: float
    user_per_token: float
    """Without the kernel's work of receiving and sending."""


@contextmanager
def relay(protocol: str, upstream: int) -> Iterator[tuple[int, int]]:
    model = {"engine": "upstream", "url": f"http://127.0.0.1:{upstream}", "protocol": protocol}
    with served({"models": {NAME: model}, "limits": {"keepalive_seconds": 3600}}) as served_at:
        yield served_at


@contextmanager
def served(config: dict[str, Any]) -> Iterator[tuple[int, int]]:
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "dragoman.json"
        path.write_text(json.dumps(config))
        command = [sys.executable, "-m", "dragoman", "serve", "--config", str(path), "--port", str(port)]
        with process(command, port) as pid:
            yield port, pid


@contextmanager
def litellm(command: str, upstream: int) -> Iterator[tuple[int, int]]:
    port = free_port()
    params = {"model": f"openai/{NAME}", "api_base": f"http://127.0.0.1:{upstream}/v1", "api_key": "none"}
    config = {"model_list": [{"model_name": NAME, "litellm_params": params}]}
    quiet = {"LITELLM_LOG": "ERROR", "LITELLM_MODE": "PRODUCTION", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    # As ours here: on loopback, for a few minutes, without a key.
    quiet["LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY"] = "true"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "litellm.yaml"
        path.write_text(json.dumps(config))
        command_line = [command, "--config", str(path), "--host", "127.0.0.1", "--port", str(port)]
        child = subprocess.Popen(
            command_line,
            preexec_fn=pinned(0),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | quiet,
        )
        try:
            wait_for(f"http://127.0.0.1:{port}/health/liveliness", 120)
            yield port, child.pid
        finally:
            child.terminate()
            child.wait(10)


def wait_for(url: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            urlopen(url, timeout=1).close()
            return
        except (URLError, OSError):
            time.sleep(0.2)
    raise SystemExit(f"nobody answers at {url}")


async def cpu_per_token(port: int, pid: int, streams: int) -> tuple[float, float]:
    loop = asyncio.get_running_loop()
    await first_tokens(port, 3)
    begun = cpu_times(pid)
    opened = [await loop.create_connection(Stream, "127.0.0.1", port) for _ in range(streams)]
    counts = await asyncio.gather(*(stream.done for _, stream in opened))
    user, kernel = (after - before for before, after in zip(begun, cpu_times(pid), strict=True))
    return (user + kernel) / sum(counts), user / sum(counts)


async def first_tokens(port: int, times: int) -> list[float]:
    """Seconds to the first token, one request after the other."""
    taken = []
    for _ in range(times):
        first: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        begun = time.perf_counter()

        follow = partial(Stream, partial(_note_second, first))
        transport, stream = await asyncio.get_running_loop().create_connection(follow, "127.0.0.1", port)
        taken.append(await first - begun)
        stream.done.cancel()
        transport.close()
    return taken


def _note_second(first: "asyncio.Future[float]", frames: int) -> None:
    """The first frame tells the role; servers that send it alone have not said anything yet."""
    if frames >= 2 and not first.done():
        first.set_result(time.perf_counter())


class Proxy(NamedTuple):
    """The same proxy in front of an upstream with a pace, and of one that answers at once: ports and process ids."""

    paced: tuple[int, int]
    at_once: tuple[int, int]


def measured(proxies: Mapping[str, Proxy], rounds: int, streams: int, times: int) -> dict[str, Cost]:
    """Medians, the proxies taking turns: what else the machine does is no one's fault alone."""
    found: dict[str, list[Cost]] = {name: [] for name in proxies}
    for _ in range(rounds):
        for name, proxy in proxies.items():
            first = statistics.median(run(first_tokens(proxy.at_once[0], times)))
            found[name].append(Cost(first, *run(cpu_per_token(*proxy.paced, streams))))
    return {name: Cost(*map(statistics.median, zip(*costs, strict=True))) for name, costs in found.items()}


def in_front(stack: ExitStack, start: Callable[[int], AbstractContextManager[tuple[int, int]]], *below: int) -> Proxy:
    return Proxy(*(stack.enter_context(start(upstream)) for upstream in below))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter streams")
    parser.add_argument("--litellm", metavar="COMMAND", help="the command of the LiteLLM proxy")
    parser.add_argument("--protocols", default="chat,messages,responses", help="of the upstream, for Dragoman")
    options = parser.parse_args()
    if pin := pinned(1):
        pin()
    rounds, streams, tokens, times = (1, 10, 60, 20) if options.quick else (3, 20, 200, 40)
    # No two tokens alike: LiteLLM takes a hundred equal ones for a model that has lost its way, and breaks off.
    reply = [{"output": "".join(f"{number:{CHUNK}}" for number in range(tokens))}]
    with ExitStack() as stack:
        slow, _ = stack.enter_context(frontend.dragoman(replies=reply, tokens_per_second=20))
        fast, _ = stack.enter_context(frontend.dragoman(replies=reply))
        proxies = {
            f"Dragoman, {protocol} upstream": in_front(stack, partial(relay, protocol), slow, fast)
            for protocol in options.protocols.split(",")
        }
        if options.litellm:
            proxies["LiteLLM proxy"] = in_front(stack, partial(litellm, options.litellm), slow, fast)
        alone = statistics.median(run(first_tokens(fast, times)))
        print(f"the upstream itself: first token after {alone * 1e3:.2f} ms")
        print(f"\n  {'in front of it':<28}{'added to a request':>20}{'CPU per token':>16}{'user space':>12}")
        costs = measured(proxies, rounds, streams, times)
    for name, cost in costs.items():
        print(f"  {name:<28}{(cost.first_token - alone) * 1e3:>17.2f} ms{cost.per_token * 1e6:>13.0f} us", end="")
        print(f"{cost.user_per_token * 1e6:>9.0f} us")
    if options.litellm:
        theirs, ours = costs["LiteLLM proxy"], costs["Dragoman, chat upstream"]
        overall, user = theirs.per_token / ours.per_token, theirs.user_per_token / ours.user_per_token
        print(f"\nCPU per token, LiteLLM to Dragoman: {overall:.1f}, in user space {user:.1f}   (target: 10)")


if __name__ == "__main__":
    main()
