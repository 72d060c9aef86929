"""A server that plays scripted bytes, and a table of answers that real servers have been seen to give.

A script answers one request: bytes to write, seconds to wait, or one of the acts below. Each request gets the next
script of its path; the last one repeats. A row of the table has the result that a client must report, and the number
of attempts that it may make. The rows are chat completions, with or without streaming.
"""

import asyncio
import gzip
import json
import socket
import ssl
import struct
import threading
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from dragoman.core.errors import (
    AnswerTimeout,
    BadAnswer,
    ContextTooLong,
    DragomanError,
    MalformedToolCall,
    ModelLoading,
    ModelNotFound,
    QuotaExhausted,
    RateLimited,
    ServerFailed,
    StreamCutOff,
    Unauthorized,
    Unavailable,
    Unreachable,
)
from dragoman.core.request import Part, Reasoning, Text, ToolCall

Act = Literal["close", "reset", "hang"]
"""Close the connection; reset it; send nothing more until the client disconnects."""
Step = bytes | float | Act
Script = Sequence[Step]
Playable = Iterable[Step] | Callable[[str, bytes], Iterable[Step]]
"""A script, or a function that makes one from the head and the body of the request."""
CHAT = "/v1/chat/completions"
SILENCE = 0.8
"""Client timeout in seconds for a server that hangs."""


class BadServer:
    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self.scripts: dict[str, Sequence[Playable]] = {}
        self.requests: defaultdict[str, list[bytes]] = defaultdict(list)
        """The bodies, by path."""
        self.heads: list[str] = []
        """In lower case, one for each request."""
        self.connections = 0
        self.left = threading.Event()
        """Set when a client disconnects while the server hangs or writes."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._connected, "127.0.0.1", 0, ssl=self._tls), self._loop
        ).result(60)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *error: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def silence(self) -> float:
        """Client timeout in seconds: long unless a script hangs, because a loaded machine is slow."""
        played = (script for scripts in self.scripts.values() for script in scripts)
        hangs = any("hang" in script for script in played if not callable(script))
        return SILENCE if hangs else 60.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}" if self._tls is None else f"https://localhost:{self.port}"

    def play(self, *scripts: Playable, path: str = CHAT) -> None:
        """Play only this from now on."""
        self.scripts = {}
        self.requests.clear()
        self.connections = 0
        self.left.clear()
        self.also(*scripts, path=path)

    def also(self, *scripts: Playable, path: str) -> None:
        self.scripts[path] = scripts

    async def _stop(self) -> None:
        self._server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # Their connections close in the next turn of the loop.
        await asyncio.sleep(0)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while await self._answered(reader, writer):
                pass
        except ConnectionError:
            self.left.set()
        except (asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _answered(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection stays open for another request."""
        sent = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        head = sent.lower()
        self.heads.append(head)
        path = head.split(" ")[1].partition("?")[0]
        length = next((line for line in head.split("\r\n") if line.startswith("content-length:")), "content-length: 0")
        body = await reader.readexactly(int(length.partition(":")[2]))
        script = self.script_for(path)
        self.requests[path].append(body)
        return await self._played(script(sent, body) if callable(script) else script, reader, writer)

    def script_for(self, path: str) -> Playable:
        """The script of the next request; `heads` has its head already."""
        scripts = self.scripts.get(path, [NOT_FOUND])
        return scripts[min(len(self.requests[path]), len(scripts) - 1)]

    async def _played(self, script: Iterable[Step], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        for step in script:
            if isinstance(step, bytes):
                writer.write(step)
                await writer.drain()
            elif isinstance(step, float):
                await asyncio.sleep(step)
            elif step == "hang":
                await reader.read()
                self.left.set()
                return False
            else:
                if step == "reset":
                    linger = struct.pack("ii", 1, 0)
                    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                return False
        return True


def head(status: str = "200 OK", **headers: str) -> bytes:
    named = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {status}\r\n{named}\r\n".encode()


def whole(body: bytes, status: str = "200 OK", content_type: str | None = "application/json", **headers: str) -> bytes:
    typed = {} if content_type is None else {"content_type": content_type}
    return head(status, content_length=str(len(body)), **typed, **headers) + body


def answer(payload: Any, status: str = "200 OK", **headers: str) -> Script:
    return [whole(json.dumps(payload).encode(), status, **headers)]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


STREAM_HEAD = head(content_type="text/event-stream", transfer_encoding="chunked")
LAST = b"0\r\n\r\n"


def stream(*pieces: bytes | float | Act) -> list[bytes | float | Act]:
    """A complete stream of these pieces."""
    return [*cut(*pieces), LAST]


def cut(*pieces: bytes | float | Act) -> list[bytes | float | Act]:
    """An incomplete stream."""
    return [STREAM_HEAD, *(chunk(piece) if isinstance(piece, bytes) else piece for piece in pieces)]


def frame(payload: Any) -> bytes:
    return b"data: " + (payload if isinstance(payload, bytes) else json.dumps(payload).encode()) + b"\n\n"


def delta(**fields: Any) -> bytes:
    return frame({"choices": [{"index": 0, "delta": fields, "finish_reason": None}]})


def finish(reason: str = "stop", **fields: Any) -> bytes:
    return frame({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}], **fields})


def call(arguments: str, **fields: Any) -> bytes:
    name = fields.pop("name", None)
    function = {"arguments": arguments} | ({"name": name} if name else {})
    return delta(tool_calls=[{**fields, "function": function}])


DONE = frame(b"[DONE]")
HEL, LO, END = delta(content="Hel"), delta(content="lo"), finish()
GREETING = HEL + LO + END + DONE
HELLO = stream(HEL, LO, END, DONE)
REPLY = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}]}
NOT_FOUND = answer({"detail": "Not Found"}, "404 Not Found")
USED = {"prompt_tokens": 3, "completion_tokens": 2}
SAID = (Text("Hello"),)
CALLS = (ToolCall("a", "f", '{"x": 1}'), ToolCall("b", "f", '{"x": 2}'))


def refused(status: str, message: str = "no", code: str | None = None, **headers: str) -> Script:
    return answer({"error": {"message": message, "code": code}}, status, **headers)


@dataclass(frozen=True)
class Row:
    """`made` is the parts of the reply, or the error; `arrived` the part of the reply that the error contains."""

    name: str
    scripts: Sequence[Script]
    made: tuple[Part, ...] | type[DragomanError] = SAID
    attempts: int = 1
    arrived: tuple[Part, ...] = field(default=())


def row(
    name: str,
    script: Script,
    made: tuple[Part, ...] | type[DragomanError] = SAID,
    *then: Script,
    attempts: int = 1,
    arrived: tuple[Part, ...] = (),
) -> Row:
    return Row(name, [script, *then], made, attempts, arrived)


def without_ids(parts: Sequence[Part]) -> list[Part]:
    """Return the parts without the ids of tool calls, which the client may generate."""
    return [ToolCall("", part.name, part.arguments) if isinstance(part, ToolCall) else part for part in parts]


def retried(name: str, script: Script) -> Row:
    """The second attempt succeeds."""
    return row(name, script, SAID, HELLO, attempts=2)


def zipped(data: bytes) -> bytes:
    return gzip.compress(data)


GZIP_HEAD = head(content_type="text/event-stream", transfer_encoding="chunked", content_encoding="gzip")
ZIPPED_HEAD = head(content_type="application/json", transfer_encoding="chunked", content_encoding="gzip")
BLANKS = [chunk(zipped(b" " * 100_000_000))]
BARE = zlib.compress(json.dumps(REPLY).encode())[2:-4]
TWICE = zipped(zipped(b" " * 100_000_000))
FACE = delta(content="né 😀").decode().encode()
HALF, OTHER = delta(content="\ud83d"), delta(content="\ude00")
RAW_FACE = 'data: {"choices": [{"index": 0, "delta": {"content": "né 😀"}}]}\n\n'.encode()
MIDDLE = RAW_FACE.index("😀".encode()) + 2
LOST = (Text("Hel"),)
SOON = {"retry_after": "0"}

ROWS = [
    # valid answers
    row("a stream", HELLO),
    row("all in one piece", stream(GREETING)),
    row("byte by byte", stream(*(bytes([byte]) for byte in GREETING))),
    row("a character in two pieces", stream(RAW_FACE[:MIDDLE], 0.05, RAW_FACE[MIDDLE:], END), (Text("né 😀"),)),
    row("escaped surrogates", stream(FACE, END), (Text("né 😀"),)),
    row("a character in two frames", stream(HALF, OTHER, LO, END), (Text("😀lo"),)),
    row("half a character, and the other missing", stream(HALF, LO, HALF, END), (Text("\ufffdlo\ufffd"),)),
    row("the other half alone", stream(delta(content="\ude00a😀"), LO, END), (Text("\ufffda😀lo"),)),
    row(
        "half a character in a thought", stream(delta(reasoning="a\ud83d"), LO, END), (Reasoning("a\ufffd"), Text("lo"))
    ),
    row("CRLF", stream(GREETING.replace(b"\n", b"\r\n"))),
    row("CRLF, cut between", stream(*GREETING.replace(b"\n", b"\r\n").replace(b"\n", b"\n|").split(b"|")[:-1])),
    row("CR", stream(GREETING.replace(b"\n", b"\r"))),
    row("comments", stream(b": hello\n\n", HEL, b":\n", b": keepalive\n\n", LO, END, DONE)),
    row("a byte order mark", stream(b"\xef\xbb", b"\xbf" + GREETING)),
    row("data on several lines", stream(b'data: {"choices":\ndata: [{"delta": {"content": "Hello"}}]}\n\n', END, DONE)),
    row("no blank after the colon", stream(GREETING.replace(b"data: ", b"data:"))),
    row("ids, retries and events", stream(b"id: 1\nevent: message\nretry: 5\n" + HEL, LO, END, DONE)),
    row("no empty line at the end", stream(HEL, LO, END.rstrip())),
    row("no end mark", stream(HEL, LO, END)),
    row("the end of the connection is the end", [head(content_type="text/event-stream") + GREETING, "close"]),
    row("a length", [whole(GREETING, content_type="text/event-stream")]),
    row("plain text", [whole(GREETING, content_type="text/plain")]),
    row("no type", [whole(GREETING, content_type=None)]),
    row("a stream that says it is JSON", [whole(GREETING)]),
    row("JSON", answer(REPLY)),
    row("JSON that says it is a stream", [whole(json.dumps(REPLY).encode(), content_type="text/event-stream")]),
    row("gzip", [GZIP_HEAD, chunk(zipped(GREETING)), LAST]),
    row("deflate without a head", [whole(BARE, content_encoding="deflate")]),
    row("gzip, it says, and is not", [whole(json.dumps(REPLY).encode(), content_encoding="none")]),
    row("blanks first", [whole(b" \n" * 100_000 + json.dumps(REPLY).encode())]),
    row("gzip in two pieces", [GZIP_HEAD, *map(chunk, (zipped(GREETING)[:20], zipped(GREETING)[20:])), LAST]),
    row("JSON in deflate", [whole(zlib.compress(json.dumps(REPLY).encode()), content_encoding="deflate")]),
    row("hints before the answer", [head("103 Early Hints"), 0.05, *HELLO]),
    row("slowly", stream(HEL, 0.2, LO, 0.2, END, 0.2, DONE)),
    row("usage in every chunk", stream(HEL, frame({"choices": [], "usage": USED}), LO, finish(usage=USED), DONE)),
    row("a thought", stream(delta(reasoning="Hmm"), HEL, LO, END, DONE), (Reasoning("Hmm"), *SAID)),
    row("calls", stream(call('{"x": 1}', id="a", name="f"), call('{"x": 2}', id="b", name="f"), END), CALLS),
    row("arguments cut short", stream(call('{"x"', id="a", name="f"), finish("length")), (ToolCall("a", "f", '{"x"'),)),
    row("a reset after the finish", [*cut(HEL, LO, END), 0.05, "reset"]),
    row("cut within the usage", [*cut(HEL, LO, END, b'data: {"usage": {"pro'), "close"]),
    row("open after the end mark", [*cut(GREETING), "hang"]),
    # streams that fail
    row("no finish", stream(HEL), StreamCutOff, arrived=LOST),
    row("an end mark without a finish", stream(HEL, DONE), StreamCutOff, arrived=LOST),
    row("the connection closed", [*cut(HEL), "close"], StreamCutOff, arrived=LOST),
    row("the connection reset", [*cut(HEL), 0.05, "reset"], StreamCutOff, arrived=LOST),
    row("half a frame", stream(HEL, b'data: {"choices": [{"del'), StreamCutOff, arrived=LOST),
    row("half a character", stream(HEL, RAW_FACE[:MIDDLE]), StreamCutOff, arrived=LOST),
    row("nothing after the head", [STREAM_HEAD, "close"], StreamCutOff),
    row("a chunk that lies", [*cut(HEL), b"zz\r\n", "close"], StreamCutOff, arrived=LOST),
    row("less than the length", [head(content_length="900") + HEL, "close"], StreamCutOff, arrived=LOST),
    row("silence in the middle", [*cut(HEL), "hang"], StreamCutOff, arrived=LOST),
    row("an error frame", stream(HEL, frame({"error": {"message": "boom"}}), DONE), ServerFailed, arrived=LOST),
    row("an error, then silence", [*cut(HEL, frame({"error": "boom"})), "hang"], ServerFailed, arrived=LOST),
    row("too long, in a frame", stream(frame({"error": {"message": "maximum context length is 9"}})), ContextTooLong),
    row("garbage in a frame", stream(HEL, b"data: {oops\n\n", LO, END), BadAnswer, arrived=LOST),
    row(
        "malformed arguments",
        stream(call('{"x"', id="a", name="f"), END),
        MalformedToolCall,
        arrived=(ToolCall("a", "f", '{"x"'),),
    ),
    row("invalid gzip", [GZIP_HEAD, chunk(b"not gzip at all"), LAST], BadAnswer),
    row("blanks without end", [ZIPPED_HEAD, *BLANKS, LAST], BadAnswer),
    row("blanks in a stream", [GZIP_HEAD, chunk(zipped(HEL + b"\n" * 4_000_000)), LAST], BadAnswer, arrived=LOST),
    row("comments without end", [GZIP_HEAD, chunk(zipped(HEL + b": x\n" * 900_000)), LAST], BadAnswer, arrived=LOST),
    row("packed twice", [head(content_encoding="gzip, gzip", content_length=str(len(TWICE))) + TWICE], BadAnswer),
    row("an error of blanks", [whole(zipped(b" " * 90_000_000), "500 Oops", content_encoding="gzip")], ServerFailed),
    row("a frame without end", [GZIP_HEAD, chunk(zipped(b"data: " + b"x" * 40_000_000)), LAST], BadAnswer),
    # invalid answers
    row("a page", [whole(b"<html>welcome</html>", content_type="text/html")], BadAnswer),
    row("nothing", [whole(b"")], BadAnswer),
    row("invalid JSON", [whole(b"xxxx")], BadAnswer),
    row("comments and no more", stream(b": xxxx\n\n"), StreamCutOff),
    row("no content", [head("204 No Content")], BadAnswer),
    row("an error with status 200", answer({"error": {"message": "boom"}}), ServerFailed),
    row(
        "sent elsewhere",
        [head("307 Temporary Redirect", location="http://127.0.0.1:1/", content_length="0")],
        BadAnswer,
    ),
    row("no HTTP", [b"SSH-2.0-OpenSSH\r\n\r\n", "close"], Unreachable),
    row("half a head", [b"HTTP/1.1 200 O", "close"], Unreachable),
    row("closed before the head", ["close"], Unreachable),
    row("reset before the head", [0.05, "reset"], Unreachable),
    row("silence before the head", ["hang"], AnswerTimeout),
    # errors and retries
    retried("429, then a reply", refused("429 Too Many")),
    retried("429 with Retry-After", refused("429 Too Many", **SOON)),
    retried("429 with retry-after-ms", refused("429 Too Many", retry_after_ms="5", retry_after="99")),
    row("429 for ever", refused("429 Too Many", **SOON), RateLimited, attempts=3),
    row("nothing left to spend", refused("429 Too Many", "quota", "insufficient_quota"), QuotaExhausted),
    retried("503 with Retry-After", refused("503 Busy", **SOON)),
    row("503 without", refused("503 Busy"), Unavailable),
    row("loading", refused("503 Busy", "Loading model"), ModelLoading),
    retried("529", refused("529 Overloaded")),
    row("500", refused("500 Oops", **SOON), ServerFailed),
    retried("500 that wants to be repeated", refused("500 Oops", x_should_retry="true")),
    row("a gateway's page", [whole(b"<html>Bad Gateway</html>", "502 Bad Gateway", "text/html")], ServerFailed),
    row("an error cut off", [head("500 Oops", content_length="900") + b'{"err', "close"], ServerFailed),
    row("too long", refused("400 Bad", "prompt is too long: 9 tokens > 5 maximum"), ContextTooLong),
    row("no such model", refused("404 Not Found", "model 'm' not found"), ModelNotFound),
    row("a wrong key", refused("401 Unauthorized", "bad key"), Unauthorized),
]
