"""The peer of the front-end benchmark: the same chat route as most servers are written, with FastAPI and pydantic.

Run by bench/frontend.py as `python -m bench.peer PORT TEXT BURST LOOP HTTP`. It plays the text four characters at a
time, BURST tokens per turn of the event loop, with the same fields in requests and replies as Dragoman.
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
from pydantic import BaseModel, Field

CHUNK = 4


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class ImageUrl(BaseModel):
    url: str
    detail: str | None = None


class ImagePart(BaseModel):
    type: Literal["image_url"]
    image_url: ImageUrl


class Function(BaseModel):
    name: str
    arguments: str


class ToolCall(BaseModel):
    id: str
    type: Literal["function"]
    function: Function


class Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart | ImagePart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class FunctionTool(BaseModel):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    type: Literal["function"]
    function: FunctionTool


class ResponseFormat(BaseModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class StreamOptions(BaseModel):
    include_usage: bool | None = None


class ChatRequest(BaseModel):
    messages: list[Message] = Field(min_length=1)
    model: str | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = None
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    n: int | None = Field(None, ge=1, le=128)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class Logprobs(BaseModel):
    content: list[TokenLogprob] | None = None


class Delta(BaseModel):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChunkChoice(BaseModel):
    index: int
    delta: Delta
    logprobs: Logprobs | None
    finish_reason: str | None


class PromptDetails(BaseModel):
    cached_tokens: int = 0


class CompletionDetails(BaseModel):
    reasoning_tokens: int = 0


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails = PromptDetails()
    completion_tokens_details: CompletionDetails = CompletionDetails()


class Chunk(BaseModel):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None


class ReplyMessage(BaseModel):
    role: str = "assistant"
    content: str | None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class Choice(BaseModel):
    index: int
    message: ReplyMessage
    logprobs: Logprobs | None
    finish_reason: str


class Reply(BaseModel):
    id: str
    object: Literal["chat.completion"]
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
        reply_id, created, model = f"chatcmpl-{uuid.uuid4().hex}", int(time.time()), request.model or "scripted"

        def frame(delta: Delta, finish_reason: str | None = None) -> str:
            choice = ChunkChoice(index=0, delta=delta, logprobs=None, finish_reason=finish_reason)
            chunk = Chunk(id=reply_id, object="chat.completion.chunk", created=created, model=model, choices=[choice])
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
        message = ReplyMessage(content="".join(collected))
        return Reply(
            id=f"chatcmpl-{uuid.uuid4().hex}",
            object="chat.completion",
            created=int(time.time()),
            model=request.model or "scripted",
            choices=[Choice(index=0, message=message, logprobs=None, finish_reason="stop")],
            usage=Usage(prompt_tokens=1, completion_tokens=len(collected), total_tokens=1 + len(collected)),
        )

    return app


if __name__ == "__main__":
    port, text, burst, loop, http = sys.argv[1:]
    app = create_app(text, int(burst))
    uvicorn.run(app, port=int(port), loop=loop, http=http, log_level="warning", access_log=False)
