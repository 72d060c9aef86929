"""Runs llama.cpp's server in its own process: `python -m tests.support.llamacpp PORT MODEL`."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import xllamacpp
from tools.ports import free_port


@contextmanager
def llamacpp(model: Path) -> Iterator[str]:
    """Yield its address once the model is loaded."""
    port = free_port()
    command = [sys.executable, "-m", "tests.support.llamacpp", str(port), str(model)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(process, f"{url}/health")
        yield url
    finally:
        process.kill()
        process.wait()


def _wait(process: "subprocess.Popen[bytes]", url: str) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(url, trust_env=False, timeout=60).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError("llama.cpp's server did not start")


def main(port: str, model: str) -> None:
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.port = int(port)
    params.n_parallel = 1
    params.n_ctx = 1024
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 2
    server = xllamacpp.Server(params)
    assert server is not None
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
