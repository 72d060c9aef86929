"""The fuzzer: a share of it runs with the tests, and its oracle sees defects that are planted."""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tools.fuzz import gguf, ipc, requests, schemas, templates
from tools.fuzz.cases import ANY, HttpCase, Input, RawCase, Request, SocketCase
from tools.fuzz.cases import OK as SUCCESS
from tools.fuzz.client import Malformed, Reply, read_replies, read_reply
from tools.fuzz.isolation import LocalRun
from tools.fuzz.monitor import MIB, Monitor, log_problem, memory_growth
from tools.fuzz.oracle import Judgement, judge, judge_raw
from tools.fuzz.shapes import Wrong
from tools.fuzz.state import Book, commit_seed, make_finding, regressions
from tools.fuzz.targets import HTTP_TARGETS, TARGETS
from tools.fuzz.websocket import check_socket, read_received
from tools.server import Server
from tools.websocket import BINARY, CLOSE, PING, PONG, TEXT, frame

from tests.support.server_process import Running

ROOT = Path(__file__).parents[2]
CHAT = Request("POST", "/v1/chat/completions", headers=(("content-type", "application/json"),))
STREAM = msgspec.structs.replace(CHAT, stream=True)
FAULTY = msgspec.structs.replace(STREAM, fault=True)
MESSAGES = Request("POST", "/v1/messages")
RESPONSES = Request("POST", "/v1/responses")
REQUEST_ID = {b"x-request-id": b"a", b"request-id": b"a"}
JSON = {b"content-type": b"application/json", **REQUEST_ID}
EVENTS = {b"content-type": b"text/event-stream; charset=utf-8", **REQUEST_ID}


def fuzz(*arguments: str, folder: Path) -> None:
    command = [sys.executable, "-m", "tools.fuzz", "--folder", str(folder), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"seed {commit_seed()}\n{done.stdout}{done.stderr}"
    assert "findings" in done.stdout


@pytest.mark.timeout(900)
def test_twenty_thousand_requests_on_the_scripted_engine_without_a_finding(tmp_path: Path) -> None:
    fuzz("--engine", "scripted", "--requests", "20000", folder=tmp_path)


@pytest.mark.timeout(900)
def test_five_hundred_requests_on_smollm2_without_a_finding(tmp_path: Path, smollm2_path: Path) -> None:
    fuzz("--engine", "smollm2", "--requests", "500", folder=tmp_path)


# Cases.


CASES: list[Callable[[str, int], object]] = [
    *(partial(target.case, "scripted") for target in HTTP_TARGETS.values()),
    *(target.case for target in (schemas, templates, gguf, ipc)),
]


@pytest.mark.parametrize("case", CASES)
def test_case_depends_only_on_seed_and_number(case: Callable[[str, int], object]) -> None:
    first, again, other = ([case(seed, number) for number in range(50)] for seed in "sst")
    assert first == again
    assert first != other


def test_requests_reach_every_route_and_protocol() -> None:
    asked = {
        (request.method, request.path.partition("?")[0])
        for number in range(4000)
        for request in requests.case("scripted", "s", number).requests
    }
    for path, _, _ in requests.ROUTES:
        assert ("POST", path) in asked
    for path in requests.GETS:
        assert ("GET", path.partition("?")[0]) in asked


# The oracle: what is right passes, and every planted defect is found.

CHOICE = {"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": "stop", "logprobs": None}
USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
COMPLETION = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [CHOICE], "usage": USAGE}
ERROR = {"error": {"message": "no", "type": "invalid_request_error", "param": None, "code": "invalid_value"}}
ANTHROPIC_ERROR = {"type": "error", "error": {"type": "invalid_request_error", "message": "no"}, "request_id": "a"}


def reply(status: int, body: Any, headers: dict[bytes, bytes] = JSON) -> Reply:
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return Reply(status, headers, data, len(data))


def stream(body: bytes) -> Reply:
    return reply(200, body, EVENTS)


def chunk(content: str | None = "a", finish: str | None = None, index: int = 0) -> bytes:
    choice = {"index": index, "delta": {} if content is None else {"content": content}, "finish_reason": finish}
    payload = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"


DONE = b"data: [DONE]\n\n"
END = chunk(None, "stop")
ERROR_FRAME = b"data: " + msgspec.json.encode(ERROR) + b"\n\n"


def event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: ".encode() + msgspec.json.encode({"type": kind, **fields}) + b"\n\n"


MESSAGE: dict[str, Any] = {
    "id": "m",
    "type": "message",
    "role": "assistant",
    "model": "m",
    "content": [],
    "stop_reason": None,
    "stop_sequence": None,
    "usage": {"input_tokens": 1, "output_tokens": 1},
}
START = event("message_start", message=MESSAGE)
BLOCK = event("content_block_start", index=0, content_block={"type": "text", "text": ""})
DELTA = event("content_block_delta", index=0, delta={"type": "text_delta", "text": "a"})
STOP = event("content_block_stop", index=0)
LAST = event("message_delta", delta={"stop_reason": "end_turn", "stop_sequence": None}, usage={"output_tokens": 1})
OVER = event("message_stop")


def expecting(request: Request, *statuses: int) -> Request:
    return msgspec.structs.replace(request, expect=frozenset(statuses))


def failed(message: str) -> Reply:
    return reply(400, {"error": ERROR["error"] | {"message": message}})


RIGHT = {
    "a reply": (CHAT, reply(200, COMPLETION)),
    "a stream": (STREAM, stream(chunk() + END + DONE)),
    "an error": (expecting(CHAT, 400), reply(400, ERROR)),
    "an error of Messages": (expecting(MESSAGES, 400), reply(400, ANTHROPIC_ERROR)),
    "a stream of Messages": (MESSAGES, stream(START + BLOCK + DELTA + STOP + LAST + OVER)),
    "a stream that fails on purpose": (FAULTY, stream(chunk() + ERROR_FRAME)),
}
WRONG = {
    "an unexpected status": (CHAT, reply(400, ERROR)),
    "an unexpected 500": (msgspec.structs.replace(CHAT, expect=ANY), reply(500, ERROR)),
    "no request id": (CHAT, reply(200, COMPLETION, {b"content-type": b"application/json"})),
    "a reply that is no JSON": (CHAT, reply(200, b"hello")),
    "a reply without choices": (CHAT, reply(200, COMPLETION | {"choices": []})),
    "a reply of another protocol": (MESSAGES, reply(200, COMPLETION)),
    "a reply without a finish reason": (CHAT, reply(200, COMPLETION | {"choices": [CHOICE | {"finish_reason": None}]})),
    "another content type": (CHAT, reply(200, COMPLETION, {b"content-type": b"text/html", **REQUEST_ID})),
    "no stream where one was asked for": (STREAM, reply(200, COMPLETION)),
    "an error of the other protocol": (expecting(CHAT, 400), reply(400, ANTHROPIC_ERROR)),
    "an error of the other protocol, in Messages": (expecting(MESSAGES, 400), reply(400, ERROR)),
    "an error without a message": (expecting(CHAT, 400), failed(" ")),
    "an error with a traceback": (expecting(CHAT, 400), failed("Traceback (most recent call last)")),
    "a very long error": (expecting(CHAT, 400), failed("a" * 5000)),
    "a wrong type of error": (expecting(MESSAGES, 404), reply(404, ANTHROPIC_ERROR)),
    "503 without Retry-After": (expecting(CHAT, 503), reply(503, ERROR)),
    "405 without Allow": (expecting(CHAT, 405), reply(405, ERROR)),
    "501 that asks for a retry": (expecting(CHAT, 501), reply(501, ERROR)),
    "a stream without [DONE]": (STREAM, stream(chunk() + END)),
    "a stream without an end": (STREAM, stream(chunk() + DONE)),
    "a stream that is cut inside a frame": (STREAM, stream(chunk() + END + DONE[:-1])),
    "a stream that goes on after its end": (STREAM, stream(END + chunk() + DONE)),
    "an empty stream": (STREAM, stream(b"")),
    "a stream with an error frame": (STREAM, stream(chunk() + ERROR_FRAME)),
    "a stream with a choice missing": (STREAM, stream(chunk(None, "stop", 1) + DONE)),
    "a stream that goes on after an error": (FAULTY, stream(ERROR_FRAME + END + DONE)),
    "Messages without message_stop": (MESSAGES, stream(START + BLOCK + DELTA + STOP + LAST)),
    "Messages without message_start": (MESSAGES, stream(BLOCK + DELTA + STOP + LAST + OVER)),
    "Messages with a block that does not end": (MESSAGES, stream(START + BLOCK + DELTA + LAST + OVER)),
    "Messages with a delta outside a block": (MESSAGES, stream(START + DELTA + LAST + OVER)),
    "Responses without an end": (RESPONSES, stream(event("response.output_text.delta", sequence_number=0))),
}


@pytest.mark.parametrize("name", [*RIGHT, *WRONG])
def test_oracle_finds_what_is_wrong(name: str) -> None:
    assert (judge(*(RIGHT | WRONG)[name]) is None) == (name in RIGHT)


RAW = b"HTTP/1.1 200 OK\r\nx-request-id: a\r\ncontent-length: 2\r\n\r\nhi"


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: a\n\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nbad name: a\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx-request-id: a\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 1\r\n\r\na",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nab\r\n0\r\n\r\n",
        RAW + b"more than that\r\n\r\n",
    ],
)
def test_client_refuses_a_malformed_response(data: bytes) -> None:
    with pytest.raises(Malformed):
        read_replies(data)


def test_client_reads_a_response_only_when_it_is_complete() -> None:
    chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2;\r\nhi\r\n0\r\n\r\n".replace(b";", b"")
    for whole in (RAW, chunked):
        assert [read_reply(whole[:at], "GET") for at in range(len(whole))] == [None] * len(whole)
        read = read_reply(whole, "GET")
        assert read is not None
        assert read.body == b"hi"


def test_raw_case_with_other_statuses_than_expected_is_found() -> None:
    replies, rest = read_replies(RAW + RAW)
    assert judge_raw(RawCase((), (SUCCESS, SUCCESS)), replies, rest) is None
    assert judge_raw(RawCase((), (SUCCESS,)), replies, rest) is not None
    assert judge_raw(RawCase((), (frozenset({400}), SUCCESS)), replies, rest) is not None
    assert judge_raw(RawCase(()), replies, RAW[:30]) is not None


# WebSockets.


def server_frame(opcode: int, payload: Any) -> bytes:
    """A frame of a server: without a mask."""
    return frame(opcode, payload if isinstance(payload, bytes) else msgspec.json.encode(payload), mask=None)


SWITCHED = b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\n\r\n"
RESPONSE = {"id": "resp_1", "object": "response", "created_at": 1, "model": "m", "output": [], "tools": []}
RESPONSE |= {"parallel_tool_calls": True, "tool_choice": "auto", "status": "completed"}
RESPONSE_EVENTS = [
    server_frame(TEXT, {"type": f"response.{kind}", "response": RESPONSE, "sequence_number": number, "stream_id": "a"})
    for number, kind in enumerate(("created", "in_progress", "completed"))
]
REFUSED = server_frame(TEXT, {"type": "error", "status": 400, **ERROR})
CLOSED = server_frame(CLOSE, b"\x03\xe8")
ONE_ANSWER = SocketCase((), 1, 1, frozenset({1000}))
PONGED = server_frame(PONG, b"")
RIGHT_SOCKETS = {
    "a response": SWITCHED + b"".join(RESPONSE_EVENTS) + PONGED + CLOSED,
    "an error": SWITCHED + PONGED + REFUSED + server_frame(PING, b"") + CLOSED,
}
WRONG_SOCKETS = {
    "no WebSocket": RAW,
    "no answer": SWITCHED + PONGED + CLOSED,
    "two answers": SWITCHED + PONGED + REFUSED + REFUSED + CLOSED,
    "no pong": SWITCHED + REFUSED + CLOSED,
    "no close frame": SWITCHED + PONGED + REFUSED,
    "another code": SWITCHED + PONGED + REFUSED + server_frame(CLOSE, b"\x03\xf3"),
    "a frame after the close frame": SWITCHED + PONGED + REFUSED + CLOSED + PONGED,
    "an incomplete frame": SWITCHED + PONGED + REFUSED + CLOSED[:-1],
    "a masked frame": SWITCHED + frame(PONG) + REFUSED + CLOSED,
    "a binary message": SWITCHED + PONGED + server_frame(BINARY, {"type": "error"}) + CLOSED,
    "text that is no JSON": SWITCHED + PONGED + server_frame(TEXT, b"data: {}") + CLOSED,
    "a response without a beginning": SWITCHED + PONGED + b"".join(RESPONSE_EVENTS[1:]) + CLOSED,
    "a response without an end": SWITCHED + PONGED + b"".join(RESPONSE_EVENTS[:2]) + REFUSED + CLOSED,
    "an error without a code": SWITCHED + PONGED + REFUSED.replace(b"invalid_value", b"") + CLOSED,
    "an unknown status": SWITCHED + PONGED + server_frame(TEXT, {"type": "error", "status": 302, **ERROR}) + CLOSED,
}


@pytest.mark.parametrize("name", [*RIGHT_SOCKETS, *WRONG_SOCKETS])
def test_oracle_of_websockets_finds_what_is_wrong(name: str) -> None:
    try:
        check_socket(ONE_ANSWER, read_received((RIGHT_SOCKETS | WRONG_SOCKETS)[name]))
    except (Malformed, Wrong):
        assert name in WRONG_SOCKETS
    else:
        assert name in RIGHT_SOCKETS


# The monitor.


def test_growing_memory_is_found_and_flat_memory_is_not() -> None:
    flat, peak = [100 * MIB] * 40, [100 * MIB] * 30 + [500 * MIB] + [100 * MIB] * 9
    assert memory_growth(flat) is None
    assert memory_growth(peak) is None
    assert memory_growth([(100 + 8 * at) * MIB for at in range(40)]) is not None


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ('{"level": "warning", "message": "x"}', None),
        ('{"level": "error", "message": "x", "request_id": "r"}', "log"),
        ('{"level": "warning", "message": "x", "exception": "Traceback ..."}', "traceback"),
        ("Traceback (most recent call last):", "log"),
        ("thread '<unnamed>' panicked at src/lib.rs:1", "log"),
        ("load: something the model says", None),
    ],
)
def test_errors_and_tracebacks_in_the_log_are_found(line: str, kind: str | None) -> None:
    found = log_problem(line)
    assert (None if found is None else found[0].kind) == kind


def test_monitor_sees_a_server_that_died_and_its_last_words(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_bytes(b"")
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    monitor = Monitor(Server(process, 0, log))
    assert monitor.check() == []
    log.write_text("ERROR it is over\n")
    process.kill()
    process.wait()
    assert [judgement.kind for judgement, _ in monitor.check()] == ["log", "died"]
    assert process.stdin is not None
    process.stdin.close()


def test_monitor_sees_that_a_server_is_not_ready(scripted: Running) -> None:
    server = Server(scripted.process, scripted.port, scripted.log)
    assert Monitor(server).check_ready() == []
    server.port = 1
    assert [judgement.kind for judgement in Monitor(server).check_ready()] == ["not ready"]


# State.


def test_run_is_resumed_where_it_stopped(tmp_path: Path) -> None:
    Book("s", tmp_path).note_progress("scripted", "http", 4000)
    assert Book("s", tmp_path).next_number("scripted", "http") == 0
    assert Book("t", tmp_path, resume=True).next_number("scripted", "http") == 0
    resumed = Book(None, tmp_path, resume=True)
    assert resumed.next_number("scripted", "http") == 4000
    assert resumed.state.seed == "s"
    resumed.finish()
    assert Book(None, tmp_path, resume=True).next_number("scripted", "http") == 0


def test_findings_of_one_defect_are_saved_once_with_their_command(tmp_path: Path) -> None:
    book = Book("s", tmp_path)
    case = HttpCase((CHAT,))
    findings = [
        make_finding("requests", "scripted", "s", number, case, Judgement("status 500", f"request {number} failed"))
        for number in (7, 8)
    ]
    assert not book.is_known(findings[0])
    file = book.add(findings[0])
    assert book.is_known(findings[1])
    assert b"status 500" in file.read_bytes()
    assert findings[0].command.endswith("requests --engine scripted --seed s --only 7")
    assert msgspec.json.decode(findings[0].case, type=HttpCase) == case


@pytest.mark.parametrize("target", TARGETS)
def test_corpus_can_be_read(target: str) -> None:
    for regression in regressions(target):
        assert isinstance(regression.case, HttpCase | RawCase | Input)


def test_a_crash_of_an_in_process_case_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    book = Book("s", tmp_path)
    run = LocalRun("ipc", "s", book, log=lambda text: None)
    real = sys.executable
    crashing = tmp_path / "python"
    crashing.write_text(f'#!/bin/sh\nif [ "$5" -lt 3 ]; then echo "$5"; echo 2; kill -SEGV $$; fi\nexec {real} "$@"\n')
    crashing.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(crashing))
    summary = run.run(range(6))
    assert summary.findings == 1
    assert [finding.number for finding in book.findings.values()] == [2]
    assert next(iter(book.findings.values())).kind == "crash"
