"""Frame templates produce the same events as full parsing."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.core.events import Event, TextDelta
from dragoman.protocols.chat import client as chat
from dragoman.protocols.messages import client as messages
from dragoman.protocols.sse import FIRST_LESSONS, FrameTemplate, SseDecoder, SseFrame
from tests.client.replay import delta, end_chunk, frames, replay
from tests.support.text_splits import cut_bytes, cuttings

STAMP = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "abc"}
TEXTS = st.text(st.characters(codec="utf-8") | st.sampled_from('"\\\n\r}],:ab\x85\u2028'), max_size=6)


def chunk(text: str, **fields: Any) -> bytes:
    return frames({**STAMP, **delta(content=text), **fields})


def block(text: str) -> bytes:
    body = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}
    return b"event: content_block_delta\n" + frames(body)


def end(protocol: str) -> bytes:
    if protocol == "chat":
        return frames({**STAMP, **end_chunk()}, "[DONE]")
    return frames({"type": "message_delta", "delta": {"stop_reason": "end_turn"}}, {"type": "message_stop"})


def joined(events: list[Event]) -> list[object]:
    """Join consecutive texts, because their boundaries do not matter."""
    found: list[object] = []
    for event in events:
        if isinstance(event, TextDelta) and found and isinstance(found[-1], str):
            found[-1] += event.text
        else:
            found.append(event.text if isinstance(event, TextDelta) else event)
    return found


@pytest.mark.parametrize("protocol", ["chat", "messages"])
@given(texts=st.lists(TEXTS, max_size=12), together=st.lists(st.integers(1, 4), min_size=1), cuts=cuttings())
def test_events_do_not_depend_on_chunks(protocol: str, texts: list[str], together: list[int], cuts: list[int]) -> None:
    frames_sent = [(chunk if protocol == "chat" else block)(text) for text in texts] + [end(protocol)]
    data = b"".join(frames_sent)
    fully_parsed = replay(protocol, [bytes([byte]) for byte in data])
    left, sizes = iter(frames_sent), itertools.cycle(together)
    groups: list[bytes] = []
    while group := b"".join(itertools.islice(left, next(sizes))):
        groups.append(group)
    assert replay(protocol, frames_sent) == fully_parsed
    assert joined(replay(protocol, groups)) == joined(fully_parsed)
    assert joined(replay(protocol, cut_bytes(data, cuts))) == joined(fully_parsed)


def learnt(first: bytes, plain: Any = None) -> FrameTemplate:
    template = FrameTemplate(plain or chat.ChatReader().plain_text)
    template.learn(first, SseDecoder().feed(first)[0])
    return template


def test_template_reads_the_text() -> None:
    template = learnt(chunk("Hel"))
    assert template.match(chunk("lo")) == ["lo"]
    assert template.match(chunk("")) == [""]
    assert template.match(chunk("lo") + chunk('"\n') + chunk("}")) == ["lo", '"\n', "}"]
    assert learnt(block("Hel"), messages.MessagesReader().plain_text).match(block("lo") + block("!")) == ["lo", "!"]


@pytest.mark.parametrize(
    "piece",
    [
        chunk("lo", created=2),
        chunk("lo", usage={"prompt_tokens": 1}),
        chunk("lo")[:-1],
        chunk("lo") + b"data",
        chunk("lo") + b": a comment\n\n" + chunk("lo"),
        chunk("lo").replace(b"lo", b"l\no"),
        chunk("lo").replace(b"lo", b"l\xff"),
        chunk("lo").replace(b"lo", b'l"o'),
        chunk("lo").replace(b"lo", b'"], "usage": {"prompt_tokens": 1}, "x": ["'),
        chunk("lo") + frames("[DONE]"),
        chunk("lo") + chunk("l", x="o").replace(b'"l"', b'"l","o"') + chunk("lo"),
        chunk("lo") + chunk("lo").replace(b"lo", b'l","o'),
    ],
)
def test_other_chunks_do_not_match(piece: bytes) -> None:
    assert learnt(chunk("Hel")).match(piece) is None


def test_text_that_also_occurs_elsewhere_is_not_learnt() -> None:
    """The model has the same name as the text, and the text is escaped: the match is not the text."""
    frame = chunk("abc").replace(b'"content": "abc"', rb'"content": "\u0061bc"')
    assert SseDecoder().feed(frame) == [SseFrame(frame[6:-2].decode())]
    template = learnt(frame)
    assert template.match(frame) is None
    assert template.match(frame.replace(b'"model": "abc"', b'"model": "xyz"')) is None


def test_frame_with_more_than_text_is_not_learnt() -> None:
    for fields in ({"usage": {"prompt_tokens": 1}}, {"error": {"message": "no"}}):
        assert learnt(chunk("Hel", **fields)).match(chunk("lo", **fields)) is None


def test_learning_stops() -> None:
    asked: list[str] = []

    def plain(frame: SseFrame) -> str | None:
        asked.append(frame.data)
        return chat.ChatReader().plain_text(frame)

    template = FrameTemplate(plain)
    for number in range(100):
        piece = chunk("x", obfuscation=f"{number:x}")
        assert template.match(piece) is None
        template.learn(piece, SseDecoder().feed(piece)[0])
    assert len(asked) <= 2 * FIRST_LESSONS


def test_new_template_is_learnt_when_the_timestamp_changes() -> None:
    template = learnt(chunk("Hel"))
    for created in range(200):
        piece = chunk("lo", created=created)
        if template.match(piece) is None:
            template.learn(piece, SseDecoder().feed(piece)[0])
        assert all(template.match(piece) == ["lo"] for _ in range(20)), json.loads(piece[6:])
