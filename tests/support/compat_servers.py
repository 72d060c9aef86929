"""Servers with the wire formats of older servers that Dragoman works with and replaces, defects included.

`lethean` is the Go handler, `astrai` the Python server with two protocols, `ruby` the OpenAI server in Ruby.
"""

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = Mapping[str, Any]
Answer = tuple[int, str, str]
"""Status, content type and body."""
Respond = Callable[[str, Body], Answer]
EVENT_STREAM, JSON = "text/event-stream", "application/json"


class CompatServer:
    """`requests` are the bodies that arrived, with their paths."""

    def __init__(self, respond: Respond) -> None:
        self.requests: list[tuple[str, Body]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._answer({})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                server.requests.append((self.path, body))
                self._answer(body)

            def _answer(self, body: Body) -> None:
                status, kind, text = respond(self.path, body)
                data = text.encode()
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *arguments: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    @property
    def bodies(self) -> list[Body]:
        return [body for _, body in self.requests]

    @contextmanager
    def running(self) -> Iterator["CompatServer"]:
        thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._http.shutdown()
            thread.join()
            self._http.server_close()


def json_answer(value: Any, status: int = 200) -> Answer:
    return status, JSON, json.dumps(value)


def not_found() -> Answer:
    return json_answer({"detail": "Not Found"}, 404)


# Lethean

LETHEAN_FIELDS = {"model", "messages", "temperature", "top_p", "top_k", "max_tokens", "stream", "stop", "user"}
MESSAGE_FIELDS = {"role", "content"}
THOUGHT, CITY, LETHEAN_TOKENS = "A capital.", "Paris.", 5


def lethean(path: str, body: Body) -> Answer:
    """`thought` stands beside the choices. Streams have no usage. An unknown field is not named."""
    if path != "/v1/chat/completions":
        return 404, "text/plain", "404 page not found\n"
    if not body.keys() <= LETHEAN_FIELDS or not all(message.keys() <= MESSAGE_FIELDS for message in body["messages"]):
        return _lethean_error(400, "invalid request body", "body")
    if body["model"] != "gemma":
        return _lethean_error(404, f'openai.StaticResolver: model "{body["model"]}" not found', "model")
    roles = [message["role"] for message in body["messages"]]
    if "alien" in roles:
        at = roles.index("alien")
        message = f"messages[{at}].role must be system, developer, user, assistant, or tool"
        return _lethean_error(400, message, f"messages[{at}].role")
    head = {"id": "chatcmpl-1760000000000000000", "created": 1760000000, "model": body["model"]}
    failed = "fail" in body["messages"][-1]["content"]
    reason = "length" if body.get("max_tokens") == LETHEAN_TOKENS else "stop"
    if not body.get("stream"):
        if failed:
            return _lethean_error(500, "generation failed", "model")
        choice = {"index": 0, "message": {"role": "assistant", "content": CITY}, "finish_reason": reason}
        usage = {"prompt_tokens": 9, "completion_tokens": LETHEAN_TOKENS, "total_tokens": 9 + LETHEAN_TOKENS}
        return json_answer(
            {**head, "object": "chat.completion", "choices": [choice], "usage": usage, "thought": THOUGHT}
        )
    pieces: list[tuple[Any, ...]] = [({"role": "assistant", "content": ""}, None, None)]
    pieces += [({}, None, piece) for piece in ("A cap", "ital.")]
    pieces += [({"content": piece}, None, None) for piece in ("Par", "is.")]
    pieces.append(({}, "error" if failed else reason, None))
    frames = [_lethean_chunk(head, *piece) for piece in pieces]
    return 200, EVENT_STREAM, "".join(frames) + "data: [DONE]\n\n"


def _lethean_chunk(head: Body, delta: Body, reason: str | None, thought: str | None) -> str:
    choices = [{"index": 0, "delta": delta, "finish_reason": reason}]
    chunk = {**head, "object": "chat.completion.chunk", "choices": choices}
    return "data: " + json.dumps(chunk | ({"thought": thought} if thought else {}), separators=(",", ":")) + "\n\n"


def _lethean_error(status: int, message: str, param: str) -> Answer:
    kind = "invalid_request_error"
    return json_answer({"error": {"message": message, "type": kind, "param": param, "code": kind}}, status)


# AstrAI

WORDS = ["Roses", " are", " red", " é😀"]


def astrai(path: str, body: Body) -> Answer:
    """Frames end with one newline, only the last one with two. Usage is a frame of its own, without `usage`."""
    if path == "/health":
        return json_answer({"status": "ok", "model_loaded": True})
    if path == "/v1/chat/completions":
        return _astrai_chat(body)
    return _astrai_messages(body) if path == "/v1/messages" else not_found()


def _astrai_chat(body: Body) -> Answer:
    head: Body = {"id": "chatcmpl-0123456789ab", "created": 1760000000, "model": body["model"]}
    usage: Body = {"prompt_tokens": 7, "completion_tokens": len(WORDS), "total_tokens": 7 + len(WORDS)}
    call = {"index": 0, "id": "call_0", "type": "function", "function": {"name": "weather", "arguments": '{"city":'}}
    rest = {"index": 0, "function": {"arguments": ' "Paris"}'}}
    reason = "tool_calls" if body.get("tools") else "stop"
    if not body.get("stream"):
        message: Body = {"role": "assistant", "content": "".join(WORDS)}
        if body.get("tools"):
            function = {"name": "weather", "arguments": '{"city": "Paris"}'}
            message = {"role": "assistant", "content": None, "tool_calls": [call | {"function": function}]}
        choice = {"index": 0, "message": message, "finish_reason": reason}
        return json_answer({**head, "object": "chat.completion", "choices": [choice], "usage": usage})
    deltas: list[Body] = [{"role": "assistant"}]
    if body.get("tools"):
        deltas += [{"tool_calls": [piece]} for piece in (call, rest)]
    else:
        deltas += [{"content": word} for word in WORDS]
    choices: list[Body] = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": reason})
    chunks: list[Body] = [{**head, "object": "chat.completion.chunk", "choices": [choice]} for choice in choices]
    return _astrai_stream([("", chunk) for chunk in chunks] + [("", usage)])


def _astrai_messages(body: Body) -> Answer:
    text = "".join(WORDS)
    matched = next((stop for stop in body.get("stop_sequences") or () if stop in text), None)
    text = text[: text.rfind(matched)] if matched else text
    end = {"stop_reason": "stop_sequence" if matched else "end_turn", "stop_sequence": matched}
    head = {"id": "msg_0123456789abcdef01234567", "type": "message", "role": "assistant", "model": body["model"]}
    if not body.get("stream"):
        content = [{"type": "text", "text": text}]
        return json_answer({**head, "content": content, **end, "usage": {"input_tokens": 7, "output_tokens": 4}})
    deltas = [{"type": "text_delta", "text": piece} for piece in (text[:3], text[3:])]
    events: list[Body] = [
        {"type": "message_start", "message": {**head, "content": [], "usage": {"input_tokens": 7}}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        *({"type": "content_block_delta", "index": 0, "delta": delta} for delta in deltas),
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": end, "usage": {"output_tokens": 4}},
        {"type": "message_stop"},
    ]
    return _astrai_stream([(event["type"], event) for event in events])


def _astrai_stream(events: Sequence[tuple[str, Body]]) -> Answer:
    frames = [
        (f"event: {name}\n" if name else "") + f"data: {json.dumps(data, ensure_ascii=False)}\n"
        for name, data in events
    ]
    return 200, EVENT_STREAM, "".join(frames) + "data: [DONE]\n\n"


# Ruby


def ruby(path: str, body: Body) -> Answer:
    """Constant ids, no usage in streams, and an error body for what the backend lacks."""
    if path == "/v1/models":
        return json_answer({"object": "list", "data": [{"id": "toy", "object": "model", "owned_by": "me"}]})
    if path == "/v1/embeddings":
        error = {"message": "embeddings are not supported by this backend", "type": "not_implemented"}
        return json_answer({"error": error}, 501)
    if path == "/v1/completions":
        tokens = body["prompt"]
        choice = {"index": 0, "text": " ".join(map(str, tokens)), "ids": tokens, "finish_reason": "stop"}
        usage = {"prompt_tokens": len(tokens), "completion_tokens": len(tokens), "total_tokens": 2 * len(tokens)}
        return json_answer({"id": "cmpl-1", "object": "text_completion", "choices": [choice], "usage": usage})
    if path != "/v1/chat/completions":
        return not_found()
    said = body["messages"][-1]["content"].upper()
    if not body.get("stream"):
        choice = {"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
        return json_answer({"id": "chatcmpl-1", "object": "chat.completion", "choices": [choice], "usage": usage})
    deltas: list[Body] = [{"role": "assistant"}, *({"content": piece} for piece in (said[:2], said[2:])), {}]
    chunks = [
        {"id": "chatcmpl-1", "choices": [{"index": 0, "delta": delta, "finish_reason": None if delta else "stop"}]}
        for delta in deltas
    ]
    frames = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
    return 200, EVENT_STREAM, frames + "data: [DONE]\n\n"
