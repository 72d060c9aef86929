"""The peer of the front-end benchmark: the same chat route as most servers are written, with FastAPI and pydantic.

Run by bench/frontend.py as `python -m bench.peer PORT TEXT BURST LOOP HTTP`. It plays the text four characters at a
time, BURST tokens per turn of the event loop, with the same chunks on the wire as Dragoman.
"""

import asyncio
import sys
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any, Literal

import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

CHUNK = 4


class Message(BaseModel):
    role: Literal["system", "user", "assistant", "tool"]
    content: str


class ChatRequest(BaseModel):
    messages: list[Message]
    model: str = "scripted"
    stream: bool = False
    temperature: float | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None


class Delta(BaseModel):
    role: str | None = None
    content: str | None = None


class ChunkChoice(BaseModel):
    index: int = 0
    delta: Delta
    logprobs: None = None
    finish_reason: str | None = None


class Chunk(BaseModel):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]


class ReplyMessage(BaseModel):
    role: str = "assistant"
    content: str
    refusal: str | None = None


class Choice(BaseModel):
    index: int = 0
    message: ReplyMessage
    logprobs: None = None
    finish_reason: str = "stop"


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Reply(BaseModel):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage


def create_app(text: str, burst: int) -> FastAPI:
    app = FastAPI()
    pieces = [text[at : at + CHUNK] for at in range(0, len(text), CHUNK)]

    async def generate() -> AsyncIterator[list[str]]:
        for at in range(0, len(pieces), burst):
            await asyncio.sleep(0)
            yield pieces[at : at + burst]

    async def frames(request: ChatRequest) -> AsyncIterator[str]:
        stamp: dict[str, Any] = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": request.model,
        }

        def frame(delta: Delta, finish_reason: str | None = None) -> str:
            chunk = Chunk(**stamp, choices=[ChunkChoice(delta=delta, finish_reason=finish_reason)])
            return f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n"

        yield frame(Delta(role="assistant", content=""))
        async for ready in generate():
            for piece in ready:
                yield frame(Delta(content=piece))
        yield frame(Delta(), "stop")
        yield "data: [DONE]\n\n"

    @app.get("/ready")
    async def ready() -> dict[str, str]:
        return {"status": "ready"}

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(request: ChatRequest) -> StreamingResponse | Reply:
        if request.stream:
            return StreamingResponse(frames(request), media_type="text/event-stream")
        collected = [piece async for ready in generate() for piece in ready]
        return Reply(
            id=f"chatcmpl-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=request.model,
            choices=[Choice(message=ReplyMessage(content="".join(collected)))],
            usage=Usage(prompt_tokens=1, completion_tokens=len(collected), total_tokens=1 + len(collected)),
        )

    return app


if __name__ == "__main__":
    port, text, burst, loop, http = sys.argv[1:]
    app = create_app(text, int(burst))
    uvicorn.run(app, port=int(port), loop=loop, http=http, log_level="warning", access_log=False)
