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
from dragoman.core.embeddings import Embedding
from dragoman.core.engine import ModelInfo
from dragoman.core.events import Finished, Started, TextDelta, Usage
from dragoman.core.request import GenerationRequest, Message, Sampling, Text, Tool
from dragoman.ipc import worker_messages as worker
from dragoman.ipc.link import Link
from dragoman.server.frontends import messages as front
from dragoman.server.model_lease import LeaseRequest
from dragoman.server.telemetry import RequestRecord
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
    to_child: list[worker.ToWorker] = [
        worker.Start("scripted", "m", {}),
        worker.Generate(1, REQUEST),
        worker.CancelRequest(1),
        worker.Render(2, REQUEST),
        worker.CountTokens(3, REQUEST),
        worker.Tokenize(4, "text", True),
        worker.Detokenize(5, (1, 2)),
        worker.Embed(6, ("a", (1, 2))),
    ]
    to_parent: list[worker.ToParent] = [
        worker.Loading(0.5),
        worker.Ready((ModelInfo("m"),), frozenset({"chat"}), "cpu", 2),
        worker.StartFailed("no", True),
        worker.Step(progress, 0.1),
        worker.Answer(1, tokens=(1, 2)),
        worker.Answer(2, embeddings=(Embedding.of([0.5, 0.5], 2),)),
        worker.Answer(3, failure=FAILURE),
    ]
    to_front: list[front.ToFrontEnd] = [
        front.StartFrontEnd(1, Settings()),
        front.ShutdownNotice(),
        front.Ping(),
        front.QuotaEntered("r", ()),
        front.ErrorReply("r", FAILURE),
        front.SlotGranted("r"),
        front.RelayReply("r", 200, [(b"a", b"b")], b"{}"),
        front.StoreReply("r"),
        front.ProgressBatch(progress),
    ]
    from_front: list[front.ToParent | front.StartGeneration] = [
        front.Listening(),
        front.EnterQuota("r", b"Bearer x", b""),
        front.AcquireLease("r", "p", None, LeaseRequest("m", (), None, False), None, None),
        front.StartGeneration("r", 1, REQUEST),
        front.CancelGeneration("r", 1),
        front.ReleaseLease("r", 3, 0.5),
        front.RequestEnded(RequestRecord(id="r", route="POST /x")),
        front.Relay("r", {"type": "http", "path": "/x"}, b"{}"),
        front.FindResponse("r", "p", "resp_1"),
    ]
    return {
        "child": tuple(map(worker.encode, to_child)),
        "parent": tuple(map(worker.encode, to_parent)),
        "front": tuple(map(front.encode, to_front)),
        "from front": tuple(map(front.encode, from_front)),
    }


def _mutated(random: Random, frame: bytes) -> bytes:
    """With a header that fits, mostly."""
    body = frame[worker.HEADER.size :]
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
    while len(data) - at >= worker.HEADER.size:
        (length,) = worker.HEADER.unpack_from(data, at)
        end = at + worker.HEADER.size + length
        if end > len(data):
            break
        found.append(data[at + worker.HEADER.size : end])
        at = end
    return found


def _decode_to_parent(body: bytes) -> None:
    for decode in (worker.decode_to_parent, worker.decode_to_forwarder):
        try:
            message = decode(body)
        except msgspec.MsgspecError as error:
            message = worker.decode_in_parts(body, error)
        if isinstance(message, worker.PackedStep):
            for part in message.progress:
                worker.decode_progress(part)


def _decode_to_front(body: bytes) -> None:
    try:
        front.decode_to_frontend(memoryview(body))
    except msgspec.MsgspecError as error:
        front.decode_in_parts(memoryview(body), error)


def _decode_from_front(body: bytes) -> None:
    message = front.decode_to_parent(memoryview(body))
    if isinstance(message, front.RawStartGeneration):
        front.decode_request(message.request)


REFUSALS = (msgspec.MsgspecError, UnicodeDecodeError)
"""The second for text that is not UTF-8, which no process of ours can send."""
READERS: dict[str, Callable[[bytes], object]] = {
    "child": worker.decode_to_worker,
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
    link = Link(lambda body: found.append(bytes(body)), lambda: None)
    for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        if begin < end:
            link.data_received(data[begin:end])
    return found


def _read_by_child(data: bytes) -> str:
    start = worker.encode(worker.Start("scripted", "m", {}))
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
