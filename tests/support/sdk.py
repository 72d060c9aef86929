"""Helpers for tests with the official SDKs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import httpx
import pydantic
from anthropic import Anthropic
from anthropic import DefaultHttpxClient as AnthropicHttpClient
from openai import AsyncOpenAI, DefaultAsyncHttpxClient, DefaultHttpxClient, OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.support.server_process import Running


@contextmanager
def sdk(running: Running, key: str = "none", timeout: float = 60) -> Iterator[OpenAI]:
    http = DefaultHttpxClient(trust_env=False)
    url = f"{running.url}/v1"
    with OpenAI(base_url=url, api_key=key, max_retries=0, timeout=timeout, http_client=http) as client:
        yield client


def async_sdk(running: Running) -> AsyncOpenAI:
    http = DefaultAsyncHttpxClient(trust_env=False)
    return AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, http_client=http)


@dataclass
class ModelClient:
    """A client with one model. By default it requests few tokens at temperature 0."""

    client: OpenAI
    running: Running
    model: str

    def fields(self, text: str, fields: dict[str, Any]) -> dict[str, Any]:
        messages = [{"role": "user", "content": text}]
        return {"model": self.model, "messages": messages, "temperature": 0, "max_tokens": 16, **fields}

    def chat(self, text: str, /, **fields: Any) -> ChatCompletion:
        reply: ChatCompletion = self.client.chat.completions.create(**self.fields(text, fields))
        return reply

    def stream(self, text: str, /, **fields: Any) -> list[ChatCompletionChunk]:
        with self.client.chat.completions.create(**self.fields(text, {**fields, "stream": True})) as chunks:
            return list(chunks)

    def complete(self, prompt: Any, /, **fields: Any) -> Any:
        return self.client.completions.create(
            **{"model": self.model, "prompt": prompt, "temperature": 0, "max_tokens": 8, **fields}
        )

    def tokenize(self, text: str, special: bool = False) -> list[int]:
        body = {"model": self.model, "content": text, "parse_special": special}
        tokens: list[int] = self._post("/tokenize", body)["tokens"]
        return tokens

    def detokenize(self, tokens: list[int]) -> str:
        text: str = self._post("/detokenize", {"model": self.model, "tokens": tokens})["content"]
        return text

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        response = httpx.post(self.running.url + path, json=body, trust_env=False, timeout=60)
        assert response.is_success, response.text
        return response.json()


def content(reply: ChatCompletion, choice: int = 0) -> str:
    text = reply.choices[choice].message.content
    assert text is not None
    return text


def joined(chunks: list[ChatCompletionChunk], choice: int = 0) -> str:
    entries = [entry for chunk in chunks for entry in chunk.choices if entry.index == choice]
    return "".join(entry.delta.content or "" for entry in entries)


@contextmanager
def anthropic_sdk(running: Running, key: str = "none", timeout: float = 60) -> Iterator[Anthropic]:
    http = AnthropicHttpClient(trust_env=False)
    with Anthropic(base_url=running.url, api_key=key, max_retries=0, timeout=timeout, http_client=http) as client:
        yield client


@cache
def adapter(shape: Any) -> pydantic.TypeAdapter[Any]:
    """Reads values of a type of an SDK. Making one takes a tenth of a second."""
    return pydantic.TypeAdapter(shape)


def validated(shape: Any, body: bytes | str) -> Any:
    """The body as the SDK's own type, in strict mode: no required field is missing, and there are no unknown fields."""
    value = adapter(shape).validate_json(body, strict=True)
    _refuse_extras(value)
    return value


def _refuse_extras(value: object) -> None:
    if isinstance(value, pydantic.BaseModel):
        assert not value.model_extra, (type(value), value.model_extra)
        for name in type(value).model_fields:
            _refuse_extras(getattr(value, name))
    elif isinstance(value, list):
        for item in value:
            _refuse_extras(item)
