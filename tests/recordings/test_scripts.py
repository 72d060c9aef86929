"""Scripts made from recordings: any text survives the configuration file."""

from typing import Any

import msgspec
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dragoman.core.request import GenerationRequest, Message, Text
from dragoman.engines.scripted import ScriptedOptions
from dragoman.engines.scripted_replies import Script
from dragoman.recordings.recorded_exchange import RecordedExchange, encode_body
from dragoman.recordings.scripts import ScriptBuilder, dump_config

TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40),
    st.text(" \n\t\r\\'\"-:#[]{}()|>&*!%@`,?~0.x$^+\x85\u2028\ufeff\x00", min_size=1, max_size=12),
    st.text("ab ", min_size=195, max_size=210),
)
ARGUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=5,
)


def said(text: str) -> GenerationRequest:
    return GenerationRequest(messages=(Message("user", (Text(text),)),))


def recorded(text: str, message: dict[str, Any]) -> RecordedExchange:
    request = {"model": "m", "messages": [{"role": "user", "content": text}]}
    reply = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
    encoded, answered = (encode_body(msgspec.json.encode(body)) for body in (request, reply))
    path = "/v1/chat/completions"
    return RecordedExchange(0.0, "chatcmpl-1", "POST", path, request=encoded, status=200, reply=answered)


@given(st.lists(st.tuples(TEXTS, TEXTS, TEXTS, st.dictionaries(TEXTS, ARGUMENTS, max_size=3)), min_size=1, max_size=4))
def test_any_text_gets_its_reply(exchanges: list[tuple[str, str, str, dict[str, Any]]]) -> None:
    builder = ScriptBuilder()
    for text, output, reasoning, arguments in exchanges:
        function = {"name": "f", "arguments": msgspec.json.encode(arguments).decode()}
        message = {"content": output, "reasoning_content": reasoning, "tool_calls": [{"id": "c", "function": function}]}
        builder.add(recorded(text, message))
    assert not builder.skipped
    written = yaml.safe_load(dump_config(builder.config()))["models"]["m"]
    script = Script(msgspec.convert({"replies": written["replies"]}, ScriptedOptions).replies)
    for text, output, reasoning, arguments in exchanges:
        reply = script.choose(said(text))
        assert reply is not None
        assert (reply.output, reply.reasoning, reply.calls[0].arguments) == (output, reasoning, arguments)
    assert script.choose(said("another message")) is None
