"""Chat and models through the official SDK, with the scripted engine and a real model."""

import asyncio
import time
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionTokenLogprob

from tests.support.requests import recorded
from tests.support.sdk import ModelClient, async_sdk, content, joined, sdk
from tests.support.server_process import Running

QUESTION = "What is the capital of France? Answer in one word."
VERSE = "Roses are red, violets are blue."


class AnyModel:
    """Tests for both engines."""

    def test_chat(self, model: ModelClient) -> None:
        reply = model.chat(QUESTION)
        assert (reply.object, reply.model) == ("chat.completion", model.model)
        assert abs(reply.created - time.time()) < 60
        (choice,) = reply.choices
        assert (choice.index, choice.message.role, choice.message.refusal) == (0, "assistant", None)
        assert content(reply).strip()
        assert choice.logprobs is None
        assert choice.message.tool_calls is None

    def test_stream_is_the_reply_in_pieces(self, model: ModelClient) -> None:
        reply = model.chat(QUESTION)
        chunks = model.stream(QUESTION, stream_options={"include_usage": True})
        assert joined(chunks) == content(reply)
        assert {(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks} == {
            (chunks[0].id, chunks[0].created, model.model, "chat.completion.chunk")
        }
        first, *middle, last, usage = chunks
        assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
        assert all(chunk.choices[0].delta.content for chunk in middle)
        assert [chunk.choices[0].finish_reason for chunk in (first, *middle)] == [None] * (len(middle) + 1)
        assert last.choices[0].delta.content is None
        assert last.choices[0].finish_reason == reply.choices[0].finish_reason
        assert (usage.choices, usage.usage) == ([], reply.usage)
        assert all(chunk.usage is None for chunk in chunks[:-1])

    def test_sdks_own_stream_collector(self, model: ModelClient) -> None:
        with model.client.chat.completions.stream(
            model=model.model, messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=16
        ) as stream:
            pieces = [event.delta for event in stream if event.type == "content.delta"]
            final = stream.get_final_completion()
        assert "".join(pieces) == content(model.chat(QUESTION)) == final.choices[0].message.content
        assert final.choices[0].finish_reason in ("stop", "length")

    def test_id_is_in_the_header_and_in_the_log(self, model: ModelClient) -> None:
        fields = model.fields(QUESTION, {"max_tokens": 2})
        raw = model.client.chat.completions.with_raw_response.create(**fields)
        reply = raw.parse()
        assert raw.headers["x-request-id"] == reply.id == reply._request_id
        assert reply.id.startswith("chatcmpl-")
        (record,) = recorded(model.running, id=reply.id)
        assert reply.usage is not None
        assert (record["status"], record["completion_tokens"]) == (200, reply.usage.completion_tokens)
        with model.client.chat.completions.with_streaming_response.create(**fields, stream=True) as streamed:
            chunks = list(streamed.parse())
            assert streamed.headers["x-request-id"] == chunks[0].id != reply.id

    def test_stop_cuts_before_the_match_wherever_the_tokens_end(self, model: ModelClient) -> None:
        text = content(model.chat(QUESTION))
        for begin in range(3, 12, 2):
            stop = text[begin : begin + 5]
            reply = model.chat(QUESTION, stop=stop)
            chunks = model.stream(QUESTION, stop=[stop, "never said"], stream_options={"include_usage": True})
            assert content(reply) == joined(chunks) == text[: text.index(stop)]
            assert reply.choices[0].finish_reason == chunks[-2].choices[0].finish_reason == "stop"
            assert chunks[-1].usage == reply.usage
            assert reply.usage is not None
            assert 1 <= reply.usage.completion_tokens <= 16

    def test_many_at_once_through_the_async_client(self, model: ModelClient) -> None:
        async def ask_all() -> list[str]:
            async with async_sdk(model.running) as client:

                async def ask(stream: bool) -> str:
                    fields = model.fields(QUESTION, {"max_tokens": 6, "stream": stream})
                    if not stream:
                        return content(await client.chat.completions.create(**fields))
                    async with await client.chat.completions.create(**fields) as chunks:
                        return joined([chunk async for chunk in chunks])

                return list(await asyncio.gather(*(ask(bool(at % 2)) for at in range(6))))

        assert asyncio.run(ask_all()) == [content(model.chat(QUESTION, max_tokens=6))] * 6


class TestScripted(AnyModel):
    @pytest.fixture
    def model(self, poet: ModelClient) -> ModelClient:
        return poet


class TestRealModel(AnyModel):
    @pytest.fixture
    def model(self, smol: ModelClient) -> ModelClient:
        return smol


def test_script_is_played_exactly(poet: ModelClient) -> None:
    reply = poet.chat(QUESTION)
    assert content(reply) == VERSE
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (13, 8, 21)
    assert content(poet.chat("How is the WEATHER?")) == "It is sunny in Paris today."
    assert content(poet.chat(QUESTION, model="gpt-4o")) == VERSE


def test_model_knows_its_capitals(smol: ModelClient) -> None:
    reply = smol.chat(QUESTION)
    assert content(reply) == "The capital of France is Paris."
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    # The token that ends the text is not counted.
    assert reply.usage.completion_tokens == len(smol.tokenize(content(reply)))
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def logprobs_of(entries: list[Any]) -> list[ChatCompletionTokenLogprob]:
    return [logprob for entry in entries if entry.logprobs for logprob in entry.logprobs.content]


def test_logprobs(smol: ModelClient) -> None:
    reply = smol.chat(QUESTION, logprobs=True, top_logprobs=3)
    found = logprobs_of(list(reply.choices))
    assert reply.usage is not None
    assert len(found) == reply.usage.completion_tokens
    assert b"".join(bytes(entry.bytes or ()) for entry in found).decode() == content(reply)
    for entry in found:
        rivals = [rival.logprob for rival in entry.top_logprobs]
        assert len(rivals) == 3
        assert rivals == sorted(rivals, reverse=True)
        assert (entry.token, entry.logprob) == (entry.top_logprobs[0].token, rivals[0])
        assert entry.logprob <= 0


def test_models(scripted: Running) -> None:
    with sdk(scripted) as client:
        listed = client.models.list()
        names = [entry.id for entry in listed]
        assert {"echo", "poet", "org/nested"} <= set(names)
        assert [client.models.retrieve(name).id for name in names] == names
        assert client.models.retrieve("gpt-4o").id == "poet"
        nested = client.models.retrieve("org/nested")
        assert (nested.object, nested.owned_by) == ("model", "dragoman")
        with pytest.raises(openai.NotFoundError, match="org/nested"):
            client.models.retrieve("org/other")
        reply = client.chat.completions.create(model="org/nested", messages=[{"role": "user", "content": "ping"}])
        assert (content(reply), reply.model) == ("ping", "org/nested")


def test_model_info_of_a_real_model(smol: ModelClient) -> None:
    (entry,) = smol.client.models.list()
    known = {"max_model_len": 2048, "format": "hermes", "device": "cpu", "state": "ready"}
    assert (entry.id, entry.model_extra) == ("smollm2", known)
