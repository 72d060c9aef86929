"""Measures the upstream engine: latency per request and CPU time per token.

    python -m bench.relay [--quick] [--litellm COMMAND]

The upstream is a Dragoman with the scripted engine. In front of it runs Dragoman with `engine: upstream` and, with
`--litellm`, the LiteLLM proxy. Install that in an environment of its own:

    python -m venv litellm && litellm/bin/pip install 'litellm[proxy]'
    python -m bench.relay --litellm litellm/bin/litellm

Tokens come at a steady pace, so that each is passed on alone. CPU time is that of the proxy, including the kernel's
part. The latency is the time to the first token, less that of the upstream alone. All servers share one core, and the
client has the other. Rounds alternate; medians are shown.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tools.ports import free_port

from bench.frontend import CHUNK, Stream, cpu_times, run, run_connections, run_scripted
from bench.servers import pin_to, run_dragoman, run_server

NAME = "scripted"


class Cost(NamedTuple):
    """Seconds."""

    first_token: float
    per_token: float
    user_per_token: float
    """Without the kernel's work of receiving and sending."""


def run_relay(protocol: str, upstream: int) -> AbstractContextManager[tuple[int, int]]:
    model = {"engine": "upstream", "url": f"http://127.0.0.1:{upstream}", "protocol": protocol}
    return run_dragoman({"models": {NAME: model}, "limits": {"keepalive_seconds": 3600}}, is_pinned=True)


@contextmanager
def run_litellm(command: str, upstream: int) -> Iterator[tuple[int, int]]:
    port = free_port()
    params = {"model": f"openai/{NAME}", "api_base": f"http://127.0.0.1:{upstream}/v1", "api_key": "none"}
    config = {"model_list": [{"model_name": NAME, "litellm_params": params}]}
    quiet = {"LITELLM_LOG": "ERROR", "LITELLM_MODE": "PRODUCTION", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    # Like Dragoman here: on loopback, for a few minutes, without a key.
    quiet["LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY"] = "true"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "litellm.yaml"
        path.write_text(json.dumps(config))
        arguments = [command, "--config", str(path), "--host", "127.0.0.1", "--port", str(port)]
        url = f"http://127.0.0.1:{port}/health/liveliness"
        with run_server(arguments, url, is_pinned=True, environ=os.environ | quiet) as pid:
            yield port, pid


async def cpu_per_token(port: int, pid: int, streams: int) -> tuple[float, float]:
    await first_tokens(port, 3)
    begun = cpu_times(pid)
    count = await run_connections(Stream, port, streams)
    user, kernel = (after - before for before, after in zip(begun, cpu_times(pid), strict=True))
    return (user + kernel) / count, user / count


async def first_tokens(port: int, times: int) -> list[float]:
    """Return the seconds to the first token of requests that are sent one after the other."""
    loop, taken = asyncio.get_running_loop(), []
    for _ in range(times):
        first: asyncio.Future[float] = loop.create_future()
        begun = time.perf_counter()
        transport, stream = await loop.create_connection(
            partial(Stream, partial(_note_second, first)), "127.0.0.1", port
        )
        taken.append(await first - begun)
        stream.done.cancel()
        transport.close()
    return taken


def _note_second(first: "asyncio.Future[float]", frames: int) -> None:
    """The first frame has the role, and some servers send it before there is a token."""
    if frames >= 2 and not first.done():
        first.set_result(time.perf_counter())


class Proxy(NamedTuple):
    """A proxy in front of an upstream with a steady pace, and of one that replies at once: ports and process ids."""

    paced: tuple[int, int]
    at_once: tuple[int, int]


def measure(proxies: Mapping[str, Proxy], rounds: int, streams: int, times: int) -> dict[str, Cost]:
    """Return the medians of rounds in which the proxies take turns."""
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
    if pin := pin_to(1):
        pin()
    rounds, streams, tokens, times = (1, 10, 60, 20) if options.quick else (3, 20, 200, 40)
    # All tokens differ: LiteLLM ends a stream with a hundred equal ones, because the model seems to repeat itself.
    reply = [{"output": "".join(f"{number:{CHUNK}}" for number in range(tokens))}]
    with ExitStack() as stack:
        slow, _ = stack.enter_context(run_scripted(replies=reply, tokens_per_second=20))
        fast, _ = stack.enter_context(run_scripted(replies=reply))
        proxies = {
            f"Dragoman, {protocol} upstream": in_front(stack, partial(run_relay, protocol), slow, fast)
            for protocol in options.protocols.split(",")
        }
        if options.litellm:
            proxies["LiteLLM proxy"] = in_front(stack, partial(run_litellm, options.litellm), slow, fast)
        alone = statistics.median(run(first_tokens(fast, times)))
        print(f"the upstream itself: first token after {alone * 1e3:.2f} ms")
        print(f"\n  {'in front of it':<28}{'added to a request':>20}{'CPU per token':>16}{'user space':>12}")
        costs = measure(proxies, rounds, streams, times)
    for name, cost in costs.items():
        print(f"  {name:<28}{(cost.first_token - alone) * 1e3:>17.2f} ms{cost.per_token * 1e6:>13.0f} us", end="")
        print(f"{cost.user_per_token * 1e6:>9.0f} us")
    if options.litellm:
        theirs, ours = costs["LiteLLM proxy"], costs["Dragoman, chat upstream"]
        overall, user = theirs.per_token / ours.per_token, theirs.user_per_token / ours.user_per_token
        print(f"\nCPU per token, LiteLLM to Dragoman: {overall:.1f}, in user space {user:.1f}   (target: 10)")


if __name__ == "__main__":
    main()
