import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.protocols.responses.custom_tool_text import TextExtractor, extract_text, wrap
from dragoman.protocols.responses.parts import seal, unseal
from tests.support.cuttings import cut, cuttings

CASES = {
    '{"input": "a\\nb"}': "a\nb",
    ' {\n "input" : "\\ud83d\\ude00 \\u00fc \\/ \\\\u0041"} ': "\U0001f600 ü / \\u0041",
    '{"input": ""}': "",
    '{"input": "cut \\u00': "cut ",
    '{"input": "lone \\ud83d x \\ude00 \\ud83d\\ud83d\\ude00"}': "lone \ufffd x \ufffd \ufffd\U0001f600",
    '{"input": "odd \\q"}': "odd q",
    '{"input": "one", "input": "two"}': "one",
    '{"why": 1, "input": "found"}': "found",
    '{"patch": "only"}': "only",
    '"a text"': "a text",
    '{"a": "x", "b": "y"}': '{"a": "x", "b": "y"}',
    '{"input": 5}': '{"input": 5}',
    "not JSON": "not JSON",
    "": "",
    '{"in': '{"in',
    "{" + " " * 80 + '"input": "far"': "{" + " " * 80 + '"input": "far"',
}


@pytest.mark.parametrize(("arguments", "text"), CASES.items())
def test_the_text_of_arguments(arguments: str, text: str) -> None:
    assert extract_text(arguments) == text
    peel = TextExtractor()
    assert "".join([*(peel.feed(character) for character in arguments), peel.end()]) == text


@given(st.text(), st.sampled_from([None, 2]), st.booleans(), cuttings())
def test_what_was_wrapped_comes_out_however_it_is_cut(
    text: str, indent: int | None, plain: bool, places: list[int]
) -> None:
    arguments = json.dumps({"input": text}, indent=indent, ensure_ascii=plain)
    assert json.loads(wrap(text)) == {"input": text}
    peel = TextExtractor()
    pieces = [peel.feed(piece) for piece in cut(arguments, places)]
    assert "".join([*pieces, peel.end()]) == text


@given(st.text())
def test_a_thought_is_sealed_and_opened(thought: str) -> None:
    assert unseal(seal(thought)) == thought
    assert unseal(seal(thought)[:-4] + "AAA=") in (None, thought)


@pytest.mark.parametrize("content", ["", "gAAAAABo", "dgm1.", "dgm1.!!", "dgm1.AAAA", seal("a")[:-1], seal("a") + "A"])
def test_what_is_not_ours_stays_closed(content: str) -> None:
    assert unseal(content) is None
