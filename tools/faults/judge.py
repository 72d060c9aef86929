"""Runs one scenario, and judges what the server is afterwards.

It passes where

1. every request ended in a way that its scenario allows, within `REQUEST_SECONDS`;
2. all slots are free and no request waits;
3. it has as many processes as before, and no more open files and threads;
4. memory is back to what it was, and never went beyond the scenario's bound;
5. it is as fast as before: the CPU time of a request and its time to the first token;
6. its log has no traceback;
7. SIGTERM ends it with exit code 0, and leaves no process.

Speed is measured again until it is as before: only what stays slow is a fault, and not a busy machine.
"""

import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from tools.faults.trial import KEY, PROBE, PROBE_MODEL, Baseline, Speed, Trial
from tools.server import Server, is_server_process, run_server

MIB = 2**20
SETTLE_SECONDS = 60.0
MAX_EXTRA = 3
"""Open files and threads by which a server may differ from before."""
MEMORY_SHARE = 0.1
"""What memory may keep of a fault, as a part of itself. A scenario allows some MiB more."""
MAX_SLOWDOWN = 1.5
CPU_SECONDS, LATENCY_SECONDS = 0.0005, 0.02
"""Differences of speed below these are noise."""


class Scenario(NamedTuple):
    inject: Callable[[Trial], Awaitable[None]]
    times: int
    """How often `make faults` injects the fault."""
    sample: int
    """How often the tests do."""
    models: Mapping[str, Any] = {}
    settings: Mapping[str, Any] = {}
    """Of the configuration, beside the models."""
    workers: int = 1
    peak: int = 256
    """MiB by which memory may grow for a while."""
    kept: int = 16
    """MiB by which memory may be larger afterwards."""
    warm_up: Callable[[Trial], Awaitable[None]] | None = None
    """Has the server allocate what it keeps, before it is measured."""
    setup: Callable[[Path], AbstractContextManager["Setup"]] | None = None
    """Makes what the scenario needs, in the folder of the server, and removes it."""


class Setup(NamedTuple):
    """What a scenario adds to a server when it runs."""

    models: Mapping[str, Any] = {}
    """Models that need not work."""
    settings: Mapping[str, Any] = {}
    environment: Mapping[str, str] = {}
    resource: Any = None
    """For the scenario itself."""


class Verdict(NamedTuple):
    problems: list[str]
    lines: list[str]
    """What was measured."""


async def run_scenario(
    name: str, scenario: Scenario, folder: Path, times: int, seed: int, patience: float = 1.0
) -> Verdict:
    """Raise Skipped where it cannot run here."""
    with scenario.setup(folder) if scenario.setup else nullcontext(Setup()) as setup:
        return await _run(name, scenario, setup, folder, times, seed, patience)


async def _run(
    name: str, scenario: Scenario, setup: Setup, folder: Path, times: int, seed: int, patience: float
) -> Verdict:
    begun = time.monotonic()
    config = {
        "models": {PROBE: PROBE_MODEL, **scenario.models, **setup.models},
        "default": PROBE,
        "api_keys": [KEY],
        **scenario.settings,
        **setup.settings,
    }
    environment = {"DRAGOMAN_HOME": str(folder / "home"), **setup.environment}
    with run_server(folder, config, "--workers", str(scenario.workers), env=environment) as server:
        trial = Trial(server, folder, times, Random(seed), patience, setup.resource)
        for model in scenario.models:
            await trial.post(f"/admin/models/{model}/load")
        if scenario.warm_up is not None:
            await scenario.warm_up(trial)
        await trial.open_storage()
        await trial.measure_speed()
        before = await trial.measure()
        seen = set(server.processes())
        async with trial.sampling():
            await scenario.inject(trial)
        seen.update(server.processes())
        after = await _settled(trial, before, scenario.kept * MIB, frozenset(setup.models))
        _judge_usage(trial, before, after, scenario)
        seen.update(server.processes())
        _judge_end(trial, seen)
    lines = [f"{key}: {value}" for key, value in trial.figures.items()]
    lines += [f"{ending}: {count}" for ending, count in sorted(trial.endings.items())]
    lines.append(_comparison(before, after, trial.peak))
    lines.append(f"{name}: {times} times, seed {seed}, {time.monotonic() - begun:.0f} s")
    return Verdict([f"{problem} ({count} times)" for problem, count in trial.problems.most_common()], lines)


async def _settled(trial: Trial, before: Baseline, kept: int, may_fail: frozenset[str]) -> Baseline:
    """Wait until the server is as it was, or until that takes too long."""
    await trial.wait(lambda: _is_idle(trial, may_fail), "all models ready and all slots free", SETTLE_SECONDS)
    deadline = time.monotonic() + SETTLE_SECONDS * trial.patience
    while True:
        after = await trial.measure()
        if time.monotonic() > deadline or not _differences(before, after, kept):
            return after


async def _is_idle(trial: Trial, may_fail: frozenset[str]) -> bool:
    models = (await trial.get("/stats"))["models"]
    for name, model in models.items():
        if model["state"] == "failed" and name not in may_fail:
            await trial.post(f"/admin/models/{name}/load")
    return all(
        model["running"] == 0 and model["waiting"] == 0 and (model["state"] == "ready" or name in may_fail)
        for name, model in models.items()
    )


def _differences(before: Baseline, after: Baseline, kept: int) -> list[str]:
    problems = []
    if after.processes != before.processes:
        problems.append(f"{after.processes} processes, {before.processes} before")
    if after.usage.files > before.usage.files + MAX_EXTRA:
        problems.append(f"{after.usage.files} open files, {before.usage.files} before")
    if after.usage.threads > before.usage.threads + MAX_EXTRA:
        problems.append(f"{after.usage.threads} threads, {before.usage.threads} before")
    if after.usage.memory > before.usage.memory * (1 + MEMORY_SHARE) + kept:
        problems.append(f"{after.usage.memory / MIB:.0f} MiB of memory, {before.usage.memory / MIB:.0f} before")
    if after.speed.cpu > before.speed.cpu * MAX_SLOWDOWN + CPU_SECONDS:
        problems.append(f"{after.speed.cpu * 1000:.2f} ms of CPU for a request, {before.speed.cpu * 1000:.2f} before")
    if after.speed.first_token > before.speed.first_token * MAX_SLOWDOWN + LATENCY_SECONDS:
        problems.append(f"{_milliseconds(after.speed)} to the first token, {_milliseconds(before.speed)} before")
    return problems


def _judge_usage(trial: Trial, before: Baseline, after: Baseline, scenario: Scenario) -> None:
    differences = _differences(before, after, scenario.kept * MIB)
    trial.problems.update(f"afterwards: {problem}" for problem in differences)
    grown, peak = trial.peak - before.usage.memory, scenario.peak * MIB
    trial.expect(grown <= peak, f"memory grew by {grown / MIB:.0f} MiB; at most {peak / MIB:.0f} MiB are allowed")


def _judge_end(trial: Trial, seen: set[int]) -> None:
    server = trial.server
    _judge_log(trial, server)
    try:
        code = server.stop()
        trial.expect(code == 0, f"SIGTERM ended the server with {code}")
    except subprocess.TimeoutExpired as error:
        trial.problems[f"still running {error.timeout:g} s after SIGTERM"] += 1
        return
    left = [pid for pid in seen if is_server_process(pid)]
    trial.expect(not left, f"processes are left: {left}")


def _judge_log(trial: Trial, server: Server) -> None:
    log = server.log.read_text(errors="replace")
    _, found, trace = log.partition("Traceback (most recent call last)")
    trial.expect(not found, f"a traceback in the log: ...{trace.strip()[-300:]}")


def _milliseconds(speed: Speed) -> str:
    return f"{speed.first_token * 1000:.1f} ms"


def _comparison(before: Baseline, after: Baseline, peak: int) -> str:
    return (
        f"before and after: {before.usage.memory / MIB:.0f} and {after.usage.memory / MIB:.0f} MiB"
        f" (at most {peak / MIB:.0f}), {before.usage.files} and {after.usage.files} files,"
        f" {before.speed.cpu * 1000:.2f} and {after.speed.cpu * 1000:.2f} ms of CPU for a request,"
        f" {_milliseconds(before.speed)} and {_milliseconds(after.speed)} to the first token"
    )
