"""The soak test in little: it runs, it holds, and it would see what does not."""

import json
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
from bench.mix import MIX, outcome
from bench.soak import growth

KINDS = {kind.name: kind for kind in MIX}
ERROR = json.dumps({"error": {"message": "no"}}).encode()
SECONDS = 20


def test_twenty_seconds_hold(smollm2_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.soak", "--minutes", str(SECONDS / 60)],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        cwd=Path(__file__).parents[1],
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("it holds\n")
    lines = {line[:20].strip(): line[20:].split() for line in done.stdout.splitlines()}
    for kind in MIX:
        answered, refused, busy, left, wrong, lost = map(int, lines[kind.name])
        assert answered + refused + busy + left >= 1, kind.name
        assert wrong == lost == 0


def chunk(**choice: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "finish_reason": None, **choice}]}).encode() + b"\n\n"


def call(index: int, arguments: str) -> bytes:
    return chunk(delta={"tool_calls": [{"index": index, "function": {"arguments": arguments}}]})


DONE = b"data: [DONE]\n\n"
STOP = chunk(delta={}, finish_reason="stop")
CALLED = chunk(delta={}, finish_reason="tool_calls")
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
        ("messages", {}, 200, b'{"stop_reason": null}', "lost"),
        ("messages, stream", {"stream": True}, 200, b'data: {"type": "message_stop"}\n\n', "answered"),
        ("messages, stream", {"stream": True}, 200, b'data: {"type": "message_delta"}\n\n', "lost"),
        ("responses", {}, 200, b'{"status": "completed"}', "answered"),
        ("responses", {}, 200, b'{"status": "in_progress"}', "lost"),
        ("embeddings", {"input": ["a", "b"]}, 200, b'{"data": [{"embedding": [1]}]}', "lost"),
    ],
)
def test_what_becomes_of_a_request(kind: str, asked: dict[str, Any], status: int, body: bytes, name: str) -> None:
    assert outcome(KINDS[kind], asked, status, body).name == name


def test_two_calls_of_a_whole_reply_are_two() -> None:
    calls = [{"function": {"arguments": '{"word": "a"}'}}, {"function": {"arguments": '{"word": "b"}'}}]
    choice = {"index": 0, "finish_reason": "tool_calls", "message": {"content": None, "tool_calls": calls}}
    body = json.dumps({"choices": [choice]}).encode()
    assert outcome(KINDS["chat, tools"], {"tools": []}, 200, body).name == "answered"


def test_growth_is_seen_and_a_short_peak_is_not() -> None:
    flat, rising, peak = [100] * 30, list(range(100, 130)), [100] * 25 + [500] + [100] * 4
    assert growth("memory", flat, 3)[2] is None
    assert growth("memory", peak, 3)[2] is None
    assert growth("memory", rising, 3) == (114.5, 124.5, "memory grew: 114, then 124")


def test_the_mix_is_the_same_for_the_same_seed() -> None:
    for kind in MIX:
        assert kind.body(Random(3)) == kind.body(Random(3))
