"""Server processes for the benchmarks."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from tools.ports import free_port

CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
STOP_SECONDS = 20


def pin_to(core: int) -> Callable[[], None] | None:
    """Return a function that moves the process that calls it to one core, if there are several."""
    return (lambda: os.sched_setaffinity(0, {CORES[core]})) if len(CORES) > 1 else None


@contextmanager
def run_server(
    command: Sequence[str],
    url: str,
    *,
    seconds: float = 120,
    is_pinned: bool = False,
    environ: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> Iterator[int]:
    """Start a server, wait until `url` answers, and yield its process id. The whole process group is killed at the end.

    A pinned server runs on the first core. With `log`, the end of its output is printed if the benchmark fails.
    """
    with contextlib.ExitStack() as stack:
        output = subprocess.DEVNULL if log is None else stack.enter_context(log.open("wb"))
        child = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            env=environ,
            start_new_session=True,
            preexec_fn=pin_to(0) if is_pinned else None,
        )
        try:
            _wait_until_ready(url, child, seconds)
            yield child.pid
        except SystemExit:
            if log is not None:
                print(log.read_text(errors="replace")[-3000:], file=sys.stderr)
            raise
        finally:
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(STOP_SECONDS)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


@contextmanager
def run_dragoman(config: Mapping[str, Any], **options: Any) -> Iterator[tuple[int, int]]:
    """Yield the port and the process id. `options` are those of `run_server`."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "dragoman.json"
        path.write_text(json.dumps(config))
        command = [sys.executable, "-m", "dragoman", "serve", "--config", str(path), "--port", str(port)]
        with run_server(command, f"http://127.0.0.1:{port}/ready", **options) as pid:
            yield port, pid


def _wait_until_ready(url: str, child: "subprocess.Popen[bytes]", seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and child.poll() is None:
        try:
            urlopen(url, timeout=2).close()
            return
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"{url} does not answer; exit code {child.poll()}, command {child.args!r}")
