"""Replies that continue a text: the events are those of the reply, as if the model had written both."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.core.errors import BadRequest
from dragoman.core.request import Reasoning, Text, ToolCall
from dragoman.formats import FORMATS
from tests.formats.cases import TOOLS
from tests.formats.replay import Joined, count_tokens, joined, play
from tests.pipeline.test_split_fuzz import NEIGHBOURS, WORDS
from tests.support.text_splits import cut, cuttings


def is_subsequence(part: str, whole: str) -> bool:
    characters = iter(whole)
    return all(character in characters for character in part)


def shown(reply: Joined) -> str:
    return "".join(part.text for part in reply.parts if isinstance(part, Text | Reasoning))


def calls(reply: Joined) -> list[ToolCall]:
    return [part for part in reply.parts if isinstance(part, ToolCall)]


def check(name: str, prefill: str, rest: str, *cut_rests: list[str], **options: Any) -> Joined | None:
    """Return the reply, which is the same for every cutting. None if the prefill has a call."""
    found: list[Joined | None] = []
    for pieces in ([rest], list(rest), *cut_rests):
        try:
            events = play(name, pieces, prefill=prefill, **options)
        except BadRequest:
            found.append(None)
        else:
            assert count_tokens(events) == len(pieces)
            found.append(joined(events))
        assert found[-1] == found[0], pieces
    return found[0]


def check_end(name: str, prefill: str, rest: str, reply: Joined, **options: Any) -> None:
    """The reply is the end of what the model would have written without a prefill."""
    whole = joined(play(name, [prefill + rest], **options))
    assert (reply.reason, reply.warnings) == (whole.reason, whole.warnings)
    assert calls(reply) == calls(whole)
    both, own = shown(whole), shown(reply)
    assert both.endswith(own)
    assert is_subsequence(both[: len(both) - len(own)].replace("\n\n", ""), prefill)
    assert is_subsequence(own.replace("\n\n", ""), rest)
    kinds, all_kinds = (
        [type(part) for part in both.parts if not isinstance(part, ToolCall)] for both in (reply, whole)
    )
    assert kinds == all_kinds[len(all_kinds) - len(kinds) :]


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=100, deadline=None)
@given(data=st.data(), cuts=cuttings(), thinking=st.booleans(), tools=st.booleans())
def test_reply_is_the_end_of_prefill_and_reply(
    name: str, data: st.DataObject, cuts: list[int], thinking: bool, tools: bool
) -> None:
    text = data.draw(st.lists(st.sampled_from(WORDS[name]), min_size=1, max_size=14).map("".join) | NEIGHBOURS[name])
    at = data.draw(st.integers(0, len(text)))
    options: dict[str, Any] = {"thinking": thinking, "tools": TOOLS if tools else ()}
    reply = check(name, text[:at], text[at:], cut(text[at:], cuts), **options)
    if reply is not None:
        check_end(name, text[:at], text[at:], reply, **options)


THINKING_TEXT = [
    ("hermes", "<think>\nI sh", "ould</think>\nYes", (Reasoning("ould"), Text("Yes"))),
    ("hermes", "I know: <thi", "nk>", (Text("nk>"),)),
    ("hermes", "Let me see.", "\n<think>no</think>Yes", (Reasoning("no"), Text("Yes"))),
    ("hermes", "<think>a</think>", "<think>b</think>c", (Reasoning("\n\nb"), Text("c"))),
    ("hermes", "Sure", ", here", (Text(", here"),)),
    ("hermes", "Sure\n", "\nhere", (Text("\nhere"),)),
    ("hermes", "Done", "", ()),
    ("harmony", "Hello", " world", (Text(" world"),)),
    ("harmony", "Hel", "lo to=functions.now", (Text("lo to=functions.now"),)),
    ("channel", "<|channel>thought\nhm", "m<channel|>Yes", (Reasoning("m"), Text("Yes"))),
    ("plain", "a", "b", (Text("b"),)),
]


@pytest.mark.parametrize(("name", "prefill", "rest", "parts"), THINKING_TEXT)
def test_parts_of_the_reply(name: str, prefill: str, rest: str, parts: tuple[Text | Reasoning, ...]) -> None:
    reply = check(name, prefill, rest)
    assert reply is not None
    assert reply.parts == parts


def test_reasoning_is_continued() -> None:
    reply = check("hermes", "I think", " so</think>\n\nYes", thinking=True)
    assert reply is not None
    assert reply.parts == (Reasoning(" so"), Text("Yes"))


CALL = '<tool_call>\n{"name": "now", "arguments": {"steps": [1]}}\n</tool_call>'


@pytest.mark.parametrize("at", [0, 5, 10, 15, 22, 30, 40])
def test_call_that_begins_in_the_prefill(at: int) -> None:
    reply = check("hermes", "Let me see.\n" + CALL[:at], CALL[at:])
    assert reply is not None
    assert calls(reply) == [ToolCall("", "now", '{"steps": [1]}')]
    assert (shown(reply), reply.reason) == ("", "tool_calls")


@pytest.mark.parametrize("prefill", [CALL[:48], CALL, f"{CALL}\nDone"])
def test_call_in_the_prefill_is_refused(prefill: str) -> None:
    assert check("hermes", prefill, " and more") is None
    with pytest.raises(BadRequest, match=r"messages\[1\]: the text contains a tool call") as refused:
        play("hermes", [" and more"], prefill=prefill)
    assert refused.value.param == "messages[1]"
    # Without tools it is text.
    reply = check("hermes", prefill, " and more", tools=())
    assert reply is not None
    assert reply.parts == (Text(" and more"),)


def test_long_prefill() -> None:
    prefill = "word " * 100_000 + "<think>"
    reply = check("hermes", prefill, "x")
    assert reply is not None
    assert reply.parts == (Text("x"),)
