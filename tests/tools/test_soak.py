"""Short runs of the soak tests, and what they would notice."""

import json
import os
import subprocess
import sys
from array import array
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tools.soak.growth import growth
from tools.soak.mix import MIX, outcome
from tools.soak.streams import Lateness

KINDS = {kind.name: kind for kind in MIX}
ERROR = json.dumps({"error": {"message": "no"}}).encode()
PATIENT = ("--lateness-ms", "5000", "--memory-share", "0.5")
"""The bounds of time and growth are for an hour on a quiet machine."""


def run_soak(*arguments: str, seconds: float) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tools.soak", "--minutes", str(seconds / 60), *PATIENT, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_THREAD_LIMIT": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(600)
def test_mixed_load_on_smollm2(smollm2_path: Path) -> None:
    printed = run_soak("mixed", "--workers", "1", "--clients", "3", seconds=5)
    lines = {line[:20].strip(): line[20:].split() for line in printed.splitlines()}
    for kind in MIX:
        answered, refused, busy, left, wrong, lost = map(int, lines[kind.name])
        assert answered + refused + busy + left >= 1, kind.name
        assert wrong == lost == 0


@pytest.mark.timeout(600)
def test_paced_streams_with_and_without_front_ends() -> None:
    printed = run_soak("streams", "--streams", "30", seconds=3)
    assert printed.count("30 streams, 12,000 tokens, 0 errors") == 2
    assert printed.count("passed") == 2


def test_lateness_is_measured_against_the_earliest_token() -> None:
    found = Lateness()
    found.add(array("d", [10.3, 10.1, 10.25, 10.3]), rate=10)
    assert [found.quantile(share) for share in (0.5, 0.75, 1.0)] == pytest.approx([0.0, 0.05, 0.3], abs=2e-4)
    punctual = Lateness()
    for begun in (3.0, 7.0):
        punctual.add(array("d", [begun, begun + 0.1, begun + 0.2]), rate=10)
    assert punctual.count == 6
    assert punctual.quantile(1.0) < 0.001


def chunk(**choice: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "finish_reason": None, **choice}]}).encode() + b"\n\n"


def call(index: int, arguments: str) -> bytes:
    return chunk(delta={"tool_calls": [{"index": index, "function": {"arguments": arguments}}]})


DONE = b"data: [DONE]\n\n"
STOP = chunk(delta={}, finish_reason="stop")
CALLED = chunk(delta={}, finish_reason="tool_calls")
TWO_CALLS = [{"function": {"arguments": '{"word": "a"}'}}, {"function": {"arguments": '{"word": "b"}'}}]
MESSAGE = {"index": 0, "finish_reason": "tool_calls", "message": {"content": None, "tool_calls": TWO_CALLS}}
WHOLE = json.dumps({"choices": [MESSAGE]}).encode()
SHAPED = {"stream": True, "response_format": {}}
CALLING = {"stream": True, "tools": []}


@pytest.mark.parametrize(
    ("kind", "asked", "status", "body", "name"),
    [
        ("chat", {}, 503, ERROR, "busy"),
        ("chat", {}, 400, ERROR, "wrong"),
        ("chat", {}, 500, b"oops", "lost"),
        ("chat", {}, 200, b"", "lost"),
        ("bad request", {}, 400, ERROR, "refused"),
        ("bad request", {}, 500, ERROR, "wrong"),
        ("bad request", {}, 200, b"{}", "wrong"),
        ("chat, stream", {"stream": True}, 200, STOP + DONE, "answered"),
        ("chat, stream", {"stream": True}, 200, STOP, "lost"),
        ("chat, stream", {"stream": True}, 200, chunk(delta={"content": "a"}), "lost"),
        ("chat, stream", {"stream": True}, 200, STOP + b"data: " + ERROR + b"\n\n", "wrong"),
        ("chat, n=2", {"stream": True, "n": 2}, 200, STOP + DONE, "lost"),
        ("chat, schema", SHAPED, 200, chunk(delta={"content": '{"name": "A", "age": 3}'}) + STOP + DONE, "answered"),
        ("chat, schema", SHAPED, 200, chunk(delta={"content": '{"name": "A"}'}) + STOP + DONE, "wrong"),
        ("chat, tools", CALLING, 200, call(0, '{"word"') + call(0, ': "a"}') + CALLED + DONE, "answered"),
        ("chat, tools", CALLING, 200, call(0, '{"word": 1}') + call(1, '{"word"') + CALLED + DONE, "wrong"),
        ("chat, tools", {"tools": []}, 200, WHOLE, "answered"),
        ("messages", {}, 200, b'{"stop_reason": null}', "lost"),
        ("messages, stream", {"stream": True}, 200, b'data: {"type": "message_stop"}\n\n', "answered"),
        ("messages, stream", {"stream": True}, 200, b'data: {"type": "message_delta"}\n\n', "lost"),
        ("responses", {}, 200, b'{"status": "completed"}', "answered"),
        ("responses", {}, 200, b'{"status": "in_progress"}', "lost"),
        ("embeddings", {"input": ["a", "b"]}, 200, b'{"data": [{"embedding": [1]}]}', "lost"),
    ],
)
def test_outcome_of_a_reply(kind: str, asked: dict[str, Any], status: int, body: bytes, name: str) -> None:
    assert outcome(KINDS[kind], asked, status, body).name == name


def test_growth_is_noticed_and_a_short_peak_is_not() -> None:
    flat, rising, peak = [100] * 30, list(range(100, 130)), [100] * 25 + [500] + [100] * 4
    assert growth("memory", flat, 3).problem is None
    assert growth("memory", peak, 3).problem is None
    assert growth("memory", rising, 3).problem == "memory grew: 114, then 124"


def test_same_seed_gives_the_same_requests() -> None:
    for kind in MIX:
        assert kind.body(Random(3)) == kind.body(Random(3))
