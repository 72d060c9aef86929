"""A few of each kind of fault. `make faults` injects them by the hundreds."""

import asyncio
from pathlib import Path

import pytest
from tools.client import Result, read_reply
from tools.faults.judge import run_scenario
from tools.faults.scenarios import SCENARIOS
from tools.faults.trial import Skipped

PATIENCE = 10.0
"""Factor of the time bounds: the machine may have other work."""
OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
CONTENT = b'data: {"choices":[{"delta":{"content":"hi"},"finish_reason":null}]}\n\n'
FINISH = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
ERROR = b'{"error":{"message":"no"}}'
DONE = b"data: [DONE]\n\n"


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(tmp_path: Path, name: str) -> None:
    scenario = SCENARIOS[name]
    scenario = scenario._replace(workers=min(2, scenario.workers))
    try:
        verdict = asyncio.run(run_scenario(name, scenario, tmp_path, scenario.sample, seed=1, patience=PATIENCE))
    except Skipped as reason:
        pytest.skip(str(reason))
    assert not verdict.problems, "\n".join([*verdict.problems, *verdict.lines])


@pytest.mark.parametrize(
    ("received", "ending"),
    [
        (OK + chunked(CONTENT, FINISH, DONE) + b"0\r\n\r\n", "answered"),
        (OK + chunked(CONTENT, FINISH, DONE), "answered"),
        (OK + chunked(CONTENT, FINISH), "cut"),
        (OK + chunked(CONTENT)[:-20], "cut"),
        (OK + chunked(CONTENT, DONE) + b"0\r\n\r\n", "wrong"),
        (OK + chunked(CONTENT, b"data: " + ERROR + b"\n\n") + b"0\r\n\r\n", "error frame"),
        (OK + chunked(CONTENT, b"data: " + ERROR + b"\n\n", DONE) + b"0\r\n\r\n", "wrong"),
        (b"HTTP/1.1 503 Busy\r\ncontent-length: %d\r\n\r\n" % len(ERROR) + ERROR, "error"),
        (b"HTTP/1.1 500 Oops\r\ncontent-length: 4\r\n\r\noops", "wrong"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 40\r\n\r\n{}", "cut"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", "wrong"),
        (b"", "cut"),
    ],
)
def test_ending_of_a_request(received: bytes, ending: str) -> None:
    assert read_reply(received).ending == ending


def test_text_and_error_message_of_a_reply() -> None:
    assert read_reply(OK + chunked(CONTENT, FINISH, DONE)).text == "hi"
    assert read_reply(b"HTTP/1.1 503 Busy\r\ncontent-length: %d\r\n\r\n" % len(ERROR) + ERROR) == Result(
        "error", 503, "no"
    )
