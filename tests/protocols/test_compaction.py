"""Compaction in Responses and Messages: sealed content, requests, items and blocks that come back, replies."""

import base64
import json
from functools import partial
from typing import Any

import msgspec
import pytest
from anthropic.types.beta import BetaMessage, BetaRawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent

from dragoman.core.edits import (
    AppliedEdit,
    ClearThinking,
    ClearToolUses,
    Compact,
    Compacting,
    Compaction,
    ContextEdited,
    ContextEvent,
)
from dragoman.core.errors import InvalidSeal
from dragoman.core.events import Event, Finished, Started, TextDelta, Usage
from dragoman.core.request import GenerationRequest, Message, Part, Role, Text
from dragoman.core.summary import compact_messages, summary_message
from dragoman.protocols.messages.context import SIGNATURE
from dragoman.protocols.responses.compaction_items import encode_item
from dragoman.protocols.responses.server import decode, parse
from dragoman.protocols.sealed import Seal, is_own
from tests.protocols import anthropic_stream, response_events, wire
from tests.protocols.wire import HI, asked, collected, decode_response, encoder, encoding
from tests.support.sdk import adapter, validated

rejected_response = partial(wire.rejected_param, "responses")
rejected_message = partial(wire.rejected_param, "messages")
COMPACTION = Compaction("They met.", 1, 1, Usage(100, 10, 5))
TRIGGER = {"type": "compaction_trigger"}
OTHERS = [ord(character) for character in "Az09+/=. é"]


def item(summary: str = "They met.", kept: int = 1, pending: int = 0) -> dict[str, Any]:
    return encode_item(Compaction(summary, kept, pending, Usage()), "cmp_1")


def said(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": text}


def text(role: Role, text: str) -> Message:
    return Message(role, (Text(text),))


CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "42"}
HISTORY = [said("developer", "dev"), said("user", "one"), said("assistant", "a"), CALL, RESULT, said("user", "two")]


# Sealed content


@given(st.text(), st.sampled_from(Seal))
def test_sealed_text_round_trips(content: str, seal: Seal) -> None:
    sealed = seal.seal(content)
    assert is_own(sealed)
    assert [other.open(sealed) for other in Seal] == [content if other is seal else None for other in Seal]
    assert not seal.is_broken(seal.sign(content), content)
    assert seal.is_broken(seal.sign(content), content + "!")
    assert not seal.is_broken("of another server", content)


@given(st.text(), st.integers(0, 400), st.sampled_from(OTHERS))
def test_every_changed_character_of_sealed_text_is_refused(content: str, at: int, other: int) -> None:
    sealed = Seal.COMPACTION.seal(content)
    at %= len(sealed)
    for changed in (sealed[:at] + chr(other) + sealed[at + 1 :], sealed[:at] + sealed[at + 1 :], sealed + chr(other)):
        assert Seal.COMPACTION.open(changed) == (content if changed == sealed else None)


@pytest.mark.parametrize("version", ["2", "10"])
def test_content_of_another_version(version: str) -> None:
    sealed = Seal.COMPACTION.seal("x").replace("dgm1", f"dgm{version}")
    assert is_own(sealed)
    assert Seal.COMPACTION.open(sealed) is None


# Responses: requests


def messages_of(*items: dict[str, Any], **fields: Any) -> list[Message]:
    return list(decode_response(input=list(items), **fields).request.messages)


def test_the_model_sees_the_summary_and_the_kept_messages() -> None:
    expected = [text("developer", "dev"), text("user", "two"), summary_message("They met."), text("user", "three")]
    assert messages_of(*HISTORY, item(), said("user", "three")) == expected
    # A client may leave out what the item replaces.
    assert messages_of(HISTORY[0], HISTORY[-1], item(), said("user", "three")) == expected
    assert messages_of(*HISTORY, item(kept=0)) == [text("developer", "dev"), summary_message("They met.")]
    both = messages_of(*HISTORY, item(kept=9, pending=1), instructions="sys")
    assert both == [
        *(text("system", "sys"), text("developer", "dev"), text("user", "one")),
        *(summary_message("They met."), text("user", "two")),
    ]


def test_the_last_of_several_compactions_counts() -> None:
    found = messages_of(*HISTORY, item("one", 2), said("assistant", "b"), item("two", 9), said("assistant", "c"))
    assert found == [
        *(text("developer", "dev"), text("user", "one"), text("user", "two"), summary_message("two")),
        text("assistant", "c"),
    ]
    # Those before it are not opened.
    foreign = {"type": "compaction", "encrypted_content": "gAAAA"}
    assert messages_of(foreign, item("two"), HI) == [summary_message("two"), text("user", "hi")]


def test_thousands_of_compactions() -> None:
    items = [entry for at in range(5000) for entry in (said("user", str(at)), item(str(at), 5000))]
    found = messages_of(*items)
    assert (len(found), found[0], found[-1]) == (5001, text("user", "0"), summary_message("4999"))


def test_the_stored_conversation_begins_with_the_compaction() -> None:
    request = parse(msgspec.json.encode({"input": "three"}))
    earlier = [*HISTORY, item(), said("assistant", "b")]
    context = decode(request, earlier).context
    assert list(context.items[:-1]) == [HISTORY[0], HISTORY[-1], item(), said("assistant", "b")]
    assert context.added == 1
    sent = decode_response(input=[*HISTORY, item(), HI]).context
    assert (len(sent.items), sent.added) == (4, 4)


DAMAGED = {
    "foreign": "gAAAAABo1234",
    "empty": "",
    "changed": item()["encrypted_content"][:-8] + "AAAAAAA=",
    "of reasoning": Seal.REASONING.seal("hm"),
    "no JSON": Seal.COMPACTION.seal("{"),
    "no summary": Seal.COMPACTION.seal("{}"),
    "negative": Seal.COMPACTION.seal('{"summary":"s","kept":-1,"pending":0}'),
    "deep": Seal.COMPACTION.seal("[" * 100_000),
    "10 MB of zeros": "dgm1." + base64.b64encode(bytes(10_000_000)).decode(),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_compaction_that_cannot_be_read_is_an_error(name: str) -> None:
    compaction = {"type": "compaction", "encrypted_content": DAMAGED[name]}
    with pytest.raises(InvalidSeal, match=r"input\[1\].encrypted_content: the compaction cannot be read") as raised:
        decode_response(input=[HI, compaction, HI])
    assert raised.value.param == "input[1].encrypted_content"
    assert ("another server" in raised.value.message) == (name in ("foreign", "empty"))


def test_a_huge_compaction_is_read() -> None:
    summary = "é" * 5_000_000
    assert messages_of(item(summary)) == [summary_message(summary)]


def test_trigger() -> None:
    request = decode_response(input=[*HISTORY, TRIGGER]).request
    assert request.edits == (Compact("input[6]", stops=True),)
    assert len(request.messages) == 5
    assert request == msgspec.structs.replace(decode_response(input=HISTORY).request, edits=request.edits)
    # It decides, whatever the threshold.
    both = decode_response(input=[HI, TRIGGER], context_management=[{"type": "compaction", "compact_threshold": 9}])
    assert both.request.edits == (Compact("input[1]", stops=True),)
    assert both.context.items == (HI,)


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([TRIGGER, HI], "input[0]"),
        ([HI, TRIGGER, TRIGGER], "input[1]"),
        ([HI, TRIGGER, item()], "input[1]"),
        ([TRIGGER], "input"),
    ],
)
def test_misplaced_trigger(items: list[dict[str, Any]], param: str) -> None:
    assert rejected_response(input=items) == param


SETTING = {"type": "compaction"}
SETTING_PATH = "context_management[0]"
NO_COUNTS: list[Any] = [0, -1, 1.5, "9", True, [], {}]


@pytest.mark.parametrize(
    ("setting", "edits"),
    [
        ([], ()),
        (None, ()),
        ([SETTING], (Compact("context_management[0]", 150_000),)),
        ([SETTING | {"compact_threshold": 1}], (Compact("context_management[0]", 1),)),
    ],
)
def test_threshold(setting: Any, edits: tuple[Compact, ...]) -> None:
    request = decode_response(context_management=setting).request
    assert request.edits == edits
    assert asked(request) == [("count_tokens", edit.path) for edit in edits]


@pytest.mark.parametrize(
    ("setting", "param"),
    [
        ({"edits": []}, "context_management"),
        ("compaction", "context_management"),
        (["compaction"], "context_management[0]"),
        ([{}], "context_management[0].type"),
        ([{"type": "clearing"}], "context_management[0].type"),
        *[([SETTING | {"compact_threshold": value}], f"{SETTING_PATH}.compact_threshold") for value in NO_COUNTS],
        ([SETTING, SETTING], "context_management[1]"),
    ],
)
def test_invalid_setting(setting: Any, param: str) -> None:
    assert rejected_response(context_management=setting) == param


def test_request_to_compact() -> None:
    body = {"input": [*HISTORY, TRIGGER], "stream": True, "store": True, "background": False, "tools": []}
    request = decode(parse(msgspec.json.encode(body)), compacts=True).request
    assert request.edits == (Compact("input[6]", stops=True),)
    assert not request.delivery.stream
    assert asked(request) == [("unknown", "stream"), ("unknown", "store")]


# Responses: replies


EVENTS: dict[str, Any] = {"responses": ResponseStreamEvent, "messages": BetaRawMessageStreamEvent}
REPLIES: dict[str, Any] = {"responses": Response, "messages": BetaMessage}


def check_shape(protocol: str, payload: dict[str, Any], shape: Any) -> None:
    if protocol == "messages":
        validated(shape, json.dumps(payload))
    else:
        # A response has fields that the SDK does not know.
        adapter(shape).validate_json(json.dumps(payload), strict=True)


def check_reply(protocol: str, request: GenerationRequest, *events: ContextEvent | Event) -> dict[str, Any]:
    """Encode a reply whole and as a stream, check that both are the same, and return it."""
    stream: Any = encoder(protocol, request)
    body = b""
    for event in events:
        is_context = isinstance(event, Compacting | ContextEdited)
        body += stream.feed_context(event) if is_context else stream.feed(0, [event])
    body += stream.end()
    reading: Any = response_events if protocol == "responses" else anthropic_stream
    payloads = reading.read(body)
    for payload in payloads:
        if payload["type"] != "ping":
            check_shape(protocol, payload, EVENTS[protocol])
    edited = next(event for event in events if isinstance(event, ContextEdited))
    batches = [event for event in events if not isinstance(event, Compacting | ContextEdited)]
    reply = msgspec.structs.replace(collected(batches), edited=edited)
    encoded: dict[str, Any] = msgspec.json.decode(
        msgspec.json.encode(encoding(protocol).encode_reply(request, 0, reply))
    )
    check_shape(protocol, encoded, REPLIES[protocol])
    joined = reading.accumulated(payloads)
    for block in joined.get("content", ()):
        if block.get("encrypted_content", "") is None:
            del block["encrypted_content"]
    assert joined == encoded
    return encoded


REQUEST = GenerationRequest(id="resp_1", model="m")
ANSWER: tuple[Event, ...] = (Started(20), TextDelta("so"), Finished(usage=Usage(20, 2)))
STOPPED: tuple[Event, ...] = (Started(), Finished("compaction", usage=Usage()))


def test_a_response_with_a_compaction() -> None:
    reply = check_reply("responses", REQUEST, Compacting(), Compacting(), ContextEdited((), COMPACTION), *ANSWER)
    assert [entry["type"] for entry in reply["output"]] == ["compaction", "message"]
    assert reply["output"][0] == encode_item(COMPACTION, "cmp_1_0")
    assert reply["output"][1]["id"] == "msg_1_1"
    usage = reply["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (120, 12, 132)
    assert usage["input_tokens_details"]["cached_tokens"] == 5


@pytest.mark.parametrize("progress", [(), (Compacting(),)])
def test_a_response_that_is_only_a_compaction(progress: tuple[ContextEvent, ...]) -> None:
    reply = check_reply("responses", REQUEST, *progress, ContextEdited((), COMPACTION), *STOPPED)
    assert reply["output"] == [encode_item(COMPACTION, "cmp_1_0")]
    assert (reply["status"], reply["usage"]["total_tokens"]) == ("completed", 110)


@given(st.text(min_size=1), st.integers(0, 3), st.integers(0, 3))
def test_a_compaction_comes_back_as_it_was_made(summary: str, kept: int, pending: int) -> None:
    compaction = Compaction(summary, kept, pending, Usage())
    reply = check_reply("responses", REQUEST, ContextEdited((), compaction), *STOPPED)
    compacted = compact_messages(messages_of(*HISTORY), summary, kept, pending)
    assert messages_of(*HISTORY, *reply["output"]) == list(compacted)


# Messages: requests


def decode_message(**fields: Any) -> GenerationRequest:
    return wire.decode("messages", **fields)


def edits_of(*edits: dict[str, Any]) -> tuple[Any, ...]:
    return decode_message(context_management={"edits": list(edits)}).edits


PATH = "context_management.edits[0]"
TOOL_USES = {"type": "clear_tool_uses_20250919"}
THINKING = {"type": "clear_thinking_20251015"}
COMPACT = {"type": "compact_20260112"}


def tokens(value: Any) -> dict[str, Any]:
    return {"type": "input_tokens", "value": value}


def uses(value: Any) -> dict[str, Any]:
    return {"type": "tool_uses", "value": value}


def turns(value: Any) -> dict[str, Any]:
    return {"type": "thinking_turns", "value": value}


@pytest.mark.parametrize(
    ("edit", "decoded"),
    [
        (TOOL_USES, ClearToolUses(PATH, tokens=100_000, keep=3)),
        (TOOL_USES | {"trigger": tokens(9), "keep": uses(0)}, ClearToolUses(PATH, tokens=9, keep=0)),
        (TOOL_USES | {"trigger": uses(9)}, ClearToolUses(PATH, tokens=None, uses=9)),
        (
            TOOL_USES | {"clear_at_least": tokens(7), "exclude_tools": ["a"], "clear_tool_inputs": True},
            ClearToolUses(PATH, at_least=7, exclude=("a",), inputs=None),
        ),
        (TOOL_USES | {"clear_tool_inputs": ["b"], "clear_at_least": None}, ClearToolUses(PATH, inputs=("b",))),
        (TOOL_USES | {"clear_tool_inputs": False}, ClearToolUses(PATH)),
        (THINKING, ClearThinking(PATH, 1)),
        (THINKING | {"keep": turns(4)}, ClearThinking(PATH, 4)),
        (COMPACT, Compact(PATH, 150_000)),
        (
            COMPACT | {"trigger": tokens(50_000), "pause_after_compaction": True, "instructions": "Names."},
            Compact(PATH, 50_000, stops=True, instructions="Names."),
        ),
        (COMPACT | {"instructions": " \n", "trigger": None}, Compact(PATH, 150_000)),
    ],
)
def test_edits(edit: dict[str, Any], decoded: Any) -> None:
    assert edits_of(edit) == (decoded,)
    assert asked(decode_message(context_management={"edits": [edit]})) == [("count_tokens", PATH)]


@pytest.mark.parametrize("keep", ["all", {"type": "all"}])
def test_keeping_all_thinking_is_no_edit(keep: Any) -> None:
    assert edits_of(THINKING | {"keep": keep}) == ()


def test_an_unknown_edit_is_reported() -> None:
    request = decode_message(context_management={"edits": [COMPACT, {"type": "of_tomorrow", "x": 1}]})
    assert request.edits == (Compact(PATH, 150_000),)
    assert asked(request) == [("count_tokens", PATH), ("unknown", "context_management.edits[1]")]


@pytest.mark.parametrize(
    ("edit", "where"),
    [
        ({}, ".type"),
        ({"type": 1}, ".type"),
        ("compact_20260112", ""),
        (COMPACT | {"trigger": uses(1)}, ".trigger.type"),
        *((COMPACT | {"trigger": tokens(value)}, ".trigger.value") for value in (0, -1, "9", True, 1.5)),
        (COMPACT | {"trigger": {"type": "input_tokens"}}, ".trigger.value"),
        (COMPACT | {"instructions": 1}, ".instructions"),
        (COMPACT | {"pause_after_compaction": "yes"}, ".pause_after_compaction"),
        (TOOL_USES | {"keep": tokens(1)}, ".keep.type"),
        (TOOL_USES | {"keep": uses(-1)}, ".keep.value"),
        (TOOL_USES | {"exclude_tools": "a"}, ".exclude_tools"),
        (TOOL_USES | {"clear_tool_inputs": [1]}, ".clear_tool_inputs[0]"),
        (THINKING | {"keep": "none"}, ".keep"),
        (THINKING | {"keep": turns(0)}, ".keep.value"),
        (THINKING | {"keep": {"type": "thinking_turns"}}, ".keep.value"),
    ],
)
def test_invalid_edit(edit: Any, where: str) -> None:
    assert rejected_message(context_management={"edits": [edit]}) == PATH + where


@pytest.mark.parametrize("value", [[], "x", {"edits": {}}])
def test_invalid_context_management(value: Any) -> None:
    assert str(rejected_message(context_management=value)).startswith("context_management")


def test_compaction_on_demand() -> None:
    summarize: dict[str, Any] = {"type": "summarize"}
    assert decode_message(compaction=summarize).edits == (Compact("compaction", stops=True),)
    named = decode_message(compaction=summarize | {"instructions": "Names."})
    assert named.edits == (Compact("compaction", stops=True, instructions="Names."),)
    assert asked(named) == []
    assert rejected_message(compaction={"type": "compact"}) == "compaction.type"
    others: dict[str, Any] = {
        "context_management": {"edits": []},
        "stop_sequences": ["x"],
        "tool_choice": {"type": "any"},
        "output_format": {"type": "json_schema", "schema": {}},
    }
    for name, value in others.items():
        assert rejected_message(compaction=summarize, **{name: value}) == name
    config = {"format": {"type": "json_schema", "schema": {}}}
    assert rejected_message(compaction=summarize, output_config=config) == "output_config.format"


def block(content: str | None = "They met.", **fields: Any) -> dict[str, Any]:
    return {"type": "compaction", "content": content, **fields}


def turn(role: str, *blocks: Any) -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


def plain(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


SUMMARY = summary_message("They met.")
BAD: Any = {"type": "image", "source": {"type": "url"}}


@pytest.mark.parametrize(
    ("messages", "decoded"),
    [
        ([HI, turn("assistant", block())], [SUMMARY]),
        ([turn("user", block()), HI], [SUMMARY, text("user", "hi")]),
        ([HI, turn("assistant", block(), plain("so")), HI], [SUMMARY, text("assistant", "so"), text("user", "hi")]),
        ([turn("assistant", plain("a"), block(), plain("b"))], [SUMMARY, text("assistant", "b")]),
        (
            [turn("assistant", block("old")), HI, turn("assistant", block()), {"role": "system", "content": "s"}],
            [SUMMARY, text("system", "s")],
        ),
        # What is before it is not read, even if it is invalid.
        ([turn("user", BAD), turn("assistant", BAD, block())], [SUMMARY]),
        # A compaction that failed replaces nothing.
        ([HI, turn("assistant", block(None), plain("so"))], [text("user", "hi"), text("assistant", "so")]),
        # A last message without text counts as none.
        ([turn("assistant", block()), turn("assistant", block(None))], [SUMMARY]),
    ],
)
def test_blocks_that_come_back(messages: list[Any], decoded: list[Message]) -> None:
    request = decode_message(messages=messages, system="sys")
    assert list(request.messages) == [text("system", "sys"), *decoded]


def test_a_compaction_at_the_end_is_no_prefill() -> None:
    assert asked(decode_message(messages=[HI, turn("assistant", block())])) == []
    assert asked(decode_message(messages=[HI, turn("assistant", block(), plain("so"))])) == [("prefill", "messages[1]")]


def test_signatures_of_blocks() -> None:
    parts: tuple[Part, ...] = SUMMARY.parts
    for signature in (SIGNATURE.sign("They met."), "of another server", "", None):
        assert decode_message(messages=[turn("user", block(signature=signature))]).messages[0].parts == parts
    for signature in (SIGNATURE.sign("They parted."), "dgm1.", "dgm2.AAAA", Seal.THINKING_SIGNATURE.sign("They met.")):
        found = rejected_message(messages=[HI, turn("user", plain("x"), block(signature=signature))])
        assert found == "messages[1].content[1].signature"
    assert rejected_message(messages=[turn("user", block(""))]) == "messages[0].content[0].content"


# Messages: replies


def request_with(*edits: Any) -> GenerationRequest:
    return GenerationRequest(id="msg_1", model="m", edits=edits)


@pytest.mark.parametrize("progress", [(), (Compacting(), Compacting())])
def test_a_message_with_a_compaction(progress: tuple[ContextEvent, ...]) -> None:
    edited = ContextEdited((), COMPACTION)
    started = () if progress else (Started(),)
    reply = check_reply("messages", request_with(Compact(PATH, 9)), *progress, edited, *started, *ANSWER[1:])
    assert reply["content"] == [
        block(signature=SIGNATURE.sign("They met.")),
        {"type": "text", "text": "so"},
    ]
    assert reply["stop_reason"] == "end_turn"
    assert reply["context_management"] == {"applied_edits": []}
    usage = reply["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (20, 2)
    assert [(entry["type"], entry["input_tokens"], entry["output_tokens"]) for entry in usage["iterations"]] == [
        ("compaction", 95, 10),
        ("message", 20, 2),
    ]


@pytest.mark.parametrize("path", [PATH, "compaction"])
def test_a_message_that_is_only_a_compaction(path: str) -> None:
    reply = check_reply("messages", request_with(Compact(path, stops=True)), ContextEdited((), COMPACTION), *STOPPED)
    assert reply["content"] == [block(signature=SIGNATURE.sign("They met."))]
    assert (reply["stop_reason"], reply["usage"]["input_tokens"]) == ("compaction", 0)
    assert [entry["type"] for entry in reply["usage"]["iterations"]] == ["compaction"]
    assert ("context_management" in reply) == (path == PATH)


def test_a_message_with_cleared_content() -> None:
    edits = (ClearToolUses(PATH), ClearThinking(PATH))
    applied = (AppliedEdit(edits[0], 2, 50), AppliedEdit(edits[1], 1, 0))
    reply = check_reply("messages", request_with(*edits), ContextEdited(applied), *ANSWER)
    assert reply["context_management"] == {
        "applied_edits": [
            {"type": "clear_tool_uses_20250919", "cleared_tool_uses": 2, "cleared_input_tokens": 50},
            {"type": "clear_thinking_20251015", "cleared_thinking_turns": 1, "cleared_input_tokens": 0},
        ]
    }
    assert "iterations" not in reply["usage"]


@given(st.text(min_size=1))
def test_a_block_comes_back_as_it_was_made(summary: str) -> None:
    edited = ContextEdited((), Compaction(summary, 2, 1, Usage()))
    reply = check_reply("messages", request_with(Compact(PATH, 9)), edited, Started(), *ANSWER[1:])
    history = [HI, turn("assistant", *reply["content"]), HI]
    assert list(decode_message(messages=history).messages) == [
        *(summary_message(summary), text("assistant", "so"), text("user", "hi")),
    ]
