"""The upper bound of the front-end benchmark: an ASGI app that decodes nothing and sends ready-made bytes.

Run by bench/frontend.py with the same arguments as bench/peer.py, and with the same turns of the event loop.
"""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn

Message = dict[str, Any]
CHUNK = 4


class Ceiling:
    def __init__(self, text: str, burst: int) -> None:
        chunk = {"id": "chatcmpl-" + 24 * "0", "object": "chat.completion.chunk", "created": 1, "model": "scripted"}
        entry = {"index": 0, "delta": {"content": "word"}, "logprobs": None, "finish_reason": None}
        self.frame = b"data: " + json.dumps({**chunk, "choices": [entry]}, separators=(",", ":")).encode() + b"\n\n"
        message = {"role": "assistant", "content": text[:100], "refusal": None}
        usage = {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4}
        self.reply = json.dumps({**chunk, "choices": [{**entry, "message": message}], "usage": usage}).encode()
        self.turns = [min(burst, tokens) for tokens in range(-(-len(text) // CHUNK), 0, -burst)]

    async def __call__(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        body = (await receive())["body"]
        if b'"stream": true' not in body:
            for _ in self.turns if body else ():
                await asyncio.sleep(0)
            head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(self.reply))]
            await send({"type": "http.response.start", "status": 200, "headers": head})
            await send({"type": "http.response.body", "body": self.reply})
            return
        head = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        for ready in self.turns:
            await asyncio.sleep(0)
            await send({"type": "http.response.body", "body": self.frame * ready, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


if __name__ == "__main__":
    port, text, burst, loop, http = sys.argv[1:]
    app = Ceiling(text, int(burst))
    uvicorn.run(
        app,
        port=int(port),
        loop=loop,
        http=http,
        log_level="warning",
        access_log=False,
        lifespan="off",
        proxy_headers=False,
    )
