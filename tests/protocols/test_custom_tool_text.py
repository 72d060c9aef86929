import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.protocols.responses.calls import CallFields, TextExtractor, decode_arguments
from dragoman.protocols.sealed import Seal
from tests.support.text_splits import cut, cuttings

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
def test_text_in_arguments(arguments: str, text: str) -> None:
    whole = TextExtractor()
    assert whole.feed(arguments) + whole.end() == text
    extractor = TextExtractor()
    assert "".join([*(extractor.feed(character) for character in arguments), extractor.end()]) == text


@given(st.text(), st.sampled_from([None, 2]), st.booleans(), cuttings())
def test_round_trip_with_any_split(text: str, indent: int | None, plain: bool, places: list[int]) -> None:
    arguments = json.dumps({"input": text}, indent=indent, ensure_ascii=plain)
    assert json.loads(decode_arguments("custom", CallFields(input=text))) == {"input": text}
    extractor = TextExtractor()
    pieces = [extractor.feed(piece) for piece in cut(arguments, places)]
    assert "".join([*pieces, extractor.end()]) == text


@given(st.text())
def test_encrypted_reasoning_round_trip(reasoning: str) -> None:
    assert Seal.REASONING.open(Seal.REASONING.seal(reasoning)) == reasoning
    assert Seal.REASONING.open(Seal.REASONING.seal(reasoning)[:-4] + "AAA=") in (None, reasoning)


@pytest.mark.parametrize(
    "content",
    ["", "gAAAAABo", "dgm1.", "dgm1.!!", "dgm1.AAAA", Seal.REASONING.seal("a")[:-1], Seal.REASONING.seal("a") + "A"],
)
def test_foreign_encrypted_reasoning(content: str) -> None:
    assert Seal.REASONING.open(content) is None
