"""Chat requests over a plain socket, and the way each of them ends.

A request ends in one of these ways:

    answered     status 200 and a complete reply
    error        another status, with the protocol's error body
    error frame  a stream that ends with the protocol's error frame
    cut          the connection closed before the reply was complete
    wrong        a reply that is not valid, or an error without an error body
    hung         none of these within the time limit

Every request has a connection of its own.
"""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

CHAT = "/v1/chat/completions"
DONE = b"data: [DONE]\n\n"
Ending = Literal["answered", "error", "error frame", "cut", "wrong", "hung"]


class Result(NamedTuple):
    ending: Ending
    status: int | None = None
    text: str = ""
    """The content of the reply, or the message of the error."""
    first_token: float | None = None
    """Seconds from connecting to the first piece of content."""
    seconds: float = 0.0

    @property
    def label(self) -> str:
        return f"error {self.status}" if self.ending == "error" else self.ending


def chat_body(model: str, text: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": model, "stream": True, "messages": [{"role": "user", "content": text}], **fields}


def request_bytes(body: Mapping[str, Any] | bytes, path: str = CHAT, key: str | None = None) -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        "Connection: close",
        f"Content-Length: {len(content)}",
        *([f"Authorization: Bearer {key}"] if key else []),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


async def ask(
    port: int, body: Mapping[str, Any], *, path: str = CHAT, key: str | None = None, timeout: float = 60
) -> Result:
    return await send(port, request_bytes(body, path, key), timeout)


async def send(port: int, request: bytes, timeout: float = 60) -> Result:
    """Send the bytes of a request and read until the server closes the connection."""
    begun = time.monotonic()
    received = bytearray()
    first: float | None = None
    try:
        async with asyncio.timeout(timeout):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(request)
                while piece := await reader.read(65536):
                    received += piece
                    if first is None and has_content(received):
                        first = time.monotonic() - begun
            finally:
                writer.close()
    except TimeoutError:
        return Result("hung", text=f"{bytes(received[-200:])!r}", seconds=time.monotonic() - begun)
    except OSError as error:
        if not received:
            return Result("cut", text=repr(error), seconds=time.monotonic() - begun)
    return read_reply(bytes(received))._replace(first_token=first, seconds=time.monotonic() - begun)


def has_content(received: bytes | bytearray) -> bool:
    """Whether a stream has content or a tool call already. The frame with the role does not count."""
    return b'"delta":{"content":"' in received or b'"tool_calls":[' in received


def read_reply(received: bytes) -> Result:
    head, _, rest = received.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 ") or len(head) == len(received):
        return Result("wrong" if received else "cut", text=f"{received[:200]!r}")
    status = int(head.split(b" ")[1])
    body, is_complete = _body(head.lower(), rest)
    try:
        if status != 200:
            return Result("error", status, str(json.loads(body)["error"]["message"]))
        is_stream = b"content-type: text/event-stream" in head.lower()
        return _stream(body) if is_stream else _whole(body, is_complete)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        return Result("wrong" if is_complete else "cut", status, f"{error!r}: {body[-200:]!r}")


def _body(head: bytes, rest: bytes) -> tuple[bytes, bool]:
    """The body, and whether all of it has arrived."""
    if b"\r\ntransfer-encoding: chunked" in head:
        return _unchunked(rest)
    _, found, length = head.partition(b"\r\ncontent-length: ")
    return rest, bool(found) and len(rest) == int(length.partition(b"\r\n")[0])


def _unchunked(data: bytes) -> tuple[bytes, bool]:
    pieces: list[bytes] = []
    at = 0
    while (end := data.find(b"\r\n", at)) >= 0:
        size = int(data[at:end], 16)
        if size == 0:
            return b"".join(pieces), True
        pieces.append(data[end + 2 : end + 2 + size])
        at = end + 2 + size + 2
    return b"".join(pieces), False


def frames(body: bytes) -> list[Any]:
    """The payloads of the complete frames of a stream, without the end mark."""
    complete = body[: body.rfind(b"\n\n") + 2]
    lines = [line[6:] for line in complete.split(b"\n") if line.startswith(b"data: ")]
    return [json.loads(line) for line in lines if line != b"[DONE]"]


def _stream(body: bytes) -> Result:
    payloads = frames(body)
    if failed := next((payload["error"] for payload in payloads if "error" in payload), None):
        is_last = not body.endswith(DONE)
        return Result("error frame" if is_last else "wrong", 200, str(failed["message"]))
    choices = [choice for payload in payloads for choice in payload["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    if not body.endswith(DONE):
        return Result("cut", 200, text)
    return Result("answered" if _has_finished(choices) else "wrong", 200, text)


def _whole(body: bytes, is_complete: bool) -> Result:
    if not is_complete:
        return Result("cut", 200, f"{body[-200:]!r}")
    choices = json.loads(body)["choices"]
    text = "".join(choice["message"].get("content") or "" for choice in choices)
    return Result("answered" if _has_finished(choices) else "wrong", 200, text)


def _has_finished(choices: Sequence[Mapping[str, Any]]) -> bool:
    return any(choice["finish_reason"] for choice in choices)
