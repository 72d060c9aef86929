"""Target `ipc`: frames between the server, its workers and its front ends, mutated and cut.

A frame is decoded or refused. However a stream of frames is cut, the same messages come out of it.
A worker that reads a frame it cannot decode ends; one that reads the end of its input ends too.
"""

import asyncio
import base64
import functools
import struct
import subprocess
import sys
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec

from dragoman.config.settings import Settings
from dragoman.core.engine import ModelInfo
from dragoman.core.events import Finished, Started, TextDelta, Usage
from dragoman.core.request import GenerationRequest, Message, Sampling, Text, Tool
from dragoman.ipc import messages as worker
from dragoman.ipc.engine_client import make_method_call
from dragoman.ipc.framing import HEADER, MessageConnection, encode
from dragoman.ipc.worker_main import ARGUMENTS
from dragoman.server.frontends import messages as front
from dragoman.server.model_lease import LeaseRequest
from dragoman.server.telemetry.metrics import RequestRecord
from tools.fuzz import values
from tools.fuzz.cases import random_for
from tools.fuzz.shapes import Wrong

CHILDREN = 0.001
"""The share of the cases in which a real worker reads the frames: it takes a second."""
CHILD_SECONDS = 80.0
REQUEST = GenerationRequest(
    id="r1",
    model="m",
    messages=(Message("user", (Text("hello"),)), Message("assistant", (Text("hi"),))),
    tools=(Tool("t", "d", {"type": "object", "properties": {"a": {"type": "string"}}}),),
    sampling=Sampling(temperature=0.5, logit_bias={3: 1.0}),
    max_tokens=8,
)
EVENTS = (Started(3), TextDelta("a"), Finished("stop", usage=Usage(prompt=3, completion=1)))
FAILURE = worker.Failure("BadRequest", "no", "messages")


@functools.cache
def samples() -> dict[str, tuple[bytes, ...]]:
    """Frames of every kind, by their reader."""
    progress = (worker.GenerationProgress(1, EVENTS), worker.GenerationProgress(2, ended=True, failure=FAILURE))
    questions = (
        make_method_call("count_tokens", REQUEST),
        make_method_call("tokenize", "text", True),
        make_method_call("tokenize_text", "text", True),
        make_method_call("token_texts", (1,)),
        make_method_call("embed", ("a", (1, 2))),
    )
    to_child: list[worker.ToWorker] = [
        worker.Start("scripted", "m", {}),
        worker.Generate(1, REQUEST),
        worker.Cancel(1),
        *questions,
    ]
    to_parent: list[worker.ToParent] = [
        worker.Loading(0.5),
        worker.EngineInfo((ModelInfo("m"),), frozenset({"chat"}), "cpu", 2),
        worker.StartFailed("no", True),
        worker.Step(progress, 0.1),
        worker.MethodResult(1, worker.pack((1, 2))),
        worker.MethodResult(3, failure=FAILURE),
    ]
    to_front: list[front.ToFrontEnd] = [
        front.Configure(Settings()),
        front.Stop("announced"),
        worker.Ping(),
        worker.MethodResult(1, worker.pack(front.LeaseReply(failure=FAILURE))),
        worker.MethodResult(2, worker.pack(front.RelayReply(200, [(b"a", b"b")], b"{}"))),
        worker.Step(progress),
    ]
    lease = front.AcquireLease("p", None, LeaseRequest("m", (), None, False), None, None)
    calls = (
        worker.Generate(1, REQUEST),
        worker.Cancel(1),
        make_method_call("enter_quota", b"Bearer x", b""),
        make_method_call("acquire_lease", lease),
        make_method_call("relay", {"type": "http", "path": "/x"}, b"{}"),
        make_method_call("find_response", "p", "resp_1"),
        *questions,
    )
    from_front: list[msgspec.Struct] = [
        front.Listening(),
        *(front.RequestCall("r", call) for call in calls),
        front.ReleaseLease("r", 3, 0.5),
        front.RequestEnded(RequestRecord(id="r", route="POST /x")),
    ]
    return {
        "child": tuple(map(encode, to_child)),
        "parent": tuple(map(encode, to_parent)),
        "front": tuple(map(encode, to_front)),
        "from front": tuple(map(encode, from_front)),
    }


def _mutated(random: Random, frame: bytes) -> bytes:
    """With a header that fits, mostly."""
    body = frame[HEADER.size :]
    if random.random() < 0.5:
        content = msgspec.msgpack.decode(body)
        holder = [content]
        values.mutate(random, holder, random.randint(1, 3))
        try:
            body = msgspec.msgpack.encode(holder[0] if holder else None)
        except (TypeError, ValueError, OverflowError):
            body = values.damage(random, body)
    else:
        body = values.damage(random, body)
    length = len(body)
    if random.random() < 0.05:
        length = random.choice((0, 1, length + 1, max(0, length - 1), 2**20))
    return struct.pack("<I", length) + body


def case(seed: str, number: int) -> Any:
    random = random_for("ipc", seed, number)
    reader = random.choice(list(samples()))
    frames = [random.choice(samples()[reader]) for _ in range(random.randint(1, 3))]
    at = random.randrange(len(frames))
    frames[at] = _mutated(random, frames[at])
    data = b"".join(frames)
    cuts = sorted(random.randrange(len(data) + 1) for _ in range(random.randint(0, 5)))
    return {
        "reader": reader,
        "data": base64.b64encode(data).decode(),
        "cuts": cuts,
        "child": reader == "child" and random.random() < CHILDREN * len(samples()),
    }


def _split(data: bytes) -> list[bytes]:
    """The bodies of all frames that are complete."""
    found, at = [], 0
    while len(data) - at >= HEADER.size:
        (length,) = HEADER.unpack_from(data, at)
        end = at + HEADER.size + length
        if end > len(data):
            break
        found.append(data[at + HEADER.size : end])
        at = end
    return found


def _decode_to_child(body: bytes) -> None:
    message = worker.decode_to_worker(body)
    if isinstance(message, worker.MethodCall):
        _decode_arguments(message)


def _decode_arguments(method_call: worker.MethodCall) -> None:
    decoder = ARGUMENTS.get(method_call.method) or front.ARGUMENTS.get(method_call.method)
    if decoder is not None:
        decoder.decode(method_call.arguments)


def _decode_to_parent(body: bytes) -> None:
    for decode in (worker.decode_to_parent, worker.decode_to_forwarder):
        message: object
        try:
            message = decode(body)
        except msgspec.MsgspecError:
            message = worker.decode_packed_step(body)
        if isinstance(message, worker.PackedStep):
            for part in message.progress:
                worker.decode_progress(part)


def _decode_to_front(body: bytes) -> None:
    try:
        front.decode_to_frontend(memoryview(body))
    except msgspec.MsgspecError:
        worker.decode_packed_step(memoryview(body))


def _decode_from_front(body: bytes) -> None:
    message = front.decode_to_parent(memoryview(body))
    if isinstance(message, front.RawRequestCall):
        if isinstance(message.call, worker.RawGenerate):
            worker.decode_request(message.call.request)
        elif isinstance(message.call, worker.MethodCall):
            _decode_arguments(message.call)


REFUSALS = (msgspec.MsgspecError, UnicodeDecodeError)
"""The second for text that is not UTF-8, which no process of ours can send."""
READERS: dict[str, Callable[[bytes], object]] = {
    "child": _decode_to_child,
    "parent": _decode_to_parent,
    "front": _decode_to_front,
    "from front": _decode_from_front,
}


def check(value: Any) -> str:
    data = base64.b64decode(value["data"])
    if value["child"]:
        return _read_by_child(data)
    bodies = _split(data)
    outcome = "decoded"
    for body in bodies:
        try:
            READERS[value["reader"]](body)
        except REFUSALS:
            outcome = "refused"
    linked = _runner().run(_linked(data, value["cuts"]))
    if linked != bodies:
        raise Wrong(f"cut at {value['cuts']}: {len(linked)} messages instead of {len(bodies)}")
    return outcome


@functools.cache
def _runner() -> asyncio.Runner:
    return asyncio.Runner()


async def _linked(data: bytes, cuts: list[int]) -> list[bytes]:
    """What a link makes of the data, in pieces."""
    found: list[bytes] = []
    link = MessageConnection(lambda body: found.append(bytes(body)), lambda: None)
    for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        if begin < end:
            link.data_received(data[begin:end])
    return found


def _read_by_child(data: bytes) -> str:
    start = encode(worker.Start("scripted", "m", {}))
    child = subprocess.Popen(
        [sys.executable, "-m", "dragoman.ipc.worker_main"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        child.communicate(start + data, timeout=CHILD_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise Wrong(f"the worker does not end within {CHILD_SECONDS:g} s of the end of its input") from error
    finally:
        child.kill()
        child.wait()
    return f"child {child.returncode}"
