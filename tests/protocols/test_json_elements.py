import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.config.settings import Limits
from dragoman.protocols import json_elements as elements

TEXT = st.text(alphabet=st.sampled_from('a,:[]{}"\\\n\u00e9'))
VALUES = st.recursive(
    st.none() | st.integers() | TEXT, lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner), max_leaves=20
)


def elements_of(value: Any) -> int:
    """Count the elements of a decoded value."""
    if isinstance(value, dict):
        return elements.CONTAINER_WEIGHT + max(0, len(value) - 1) + len(value) + sum(map(elements_of, value.values()))
    if isinstance(value, list):
        return elements.CONTAINER_WEIGHT + max(0, len(value) - 1) + sum(map(elements_of, value))
    return 0


def keys(value: Any) -> int:
    if isinstance(value, dict):
        return len(value) + sum(map(keys, value.values()))
    return sum(map(keys, value)) if isinstance(value, list) else 0


@pytest.mark.parametrize("chunk", [1, 2, 7, 1024 * 1024])
@settings(max_examples=200)
@given(VALUES, st.booleans())
def test_counts_match_the_decoded_value(chunk: int, value: Any, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only).encode()
    exact = elements_of(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elements, "CHUNK_BYTES", chunk)
        assert elements.count_keys(text) == keys(value)
        assert not elements.has_more_elements(text, exact)
        if exact:
            assert elements.has_more_elements(text, exact - 1)


def test_strings_contain_no_elements() -> None:
    text = json.dumps({"a": 'say "[1, {2: 3}]" \\' * 100_000}).encode()
    assert not elements.has_more_elements(text, 6)


def test_default_limit_allows_2048_inputs_of_512_token_ids() -> None:
    assert Limits().body_elements == elements.DEFAULT_LIMIT
    text = json.dumps({"input": [[50_000] * 512] * 2048, "model": "minilm"}).encode()
    assert not elements.has_more_elements(text, elements.DEFAULT_LIMIT)
