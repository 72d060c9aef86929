"""Recorded client requests with random values replaced: each is decoded or rejected with a short message."""

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from dragoman.core.errors import DragomanError
from dragoman.protocols import embeddings, response_format, thinking
from dragoman.protocols.chat import server as chat
from dragoman.protocols.chat import tools
from tests.protocols.wire import PATHS, decode_body, recordings

LONG = "x" * 20_000
UNUSUAL: list[Any] = [
    *(None, True, False, 0, -1, 1, 1.5, -0.0, 1e-40, 5e-324, 1e308, -1e308),
    *(2**31, 2**31 - 1, 2**53, 2**63, 2**63 - 1, -(2**63), 2**64, 10**30, 10**300),
    *("", "a", "é", "\x00", "😀", LONG, "data:image/png;base64,é", "http://[", "NaN", "auto", "none", "required"),
    *([], [[]], [None], [{}], [1, 2, 3], ["a"], [""], [LONG], [{"type": "text"}]),
    *({}, {"": 0}, {"type": "text"}, {"type": []}, {"type": None}, {"type": LONG}, {"type": "function"}),
    *({"name": LONG}, {LONG: 1}, {"a": {"b": [1, {"c": None}]}}),
]


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every nested value."""
    if path:
        yield path
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield from paths(inner, (*path, key))


FIELDS = sorted(
    {*chat.ChatFields.__struct_fields__, *response_format.FIELDS, *thinking.FIELDS, *tools.FIELDS, "system", "input"}
)


def mutated(body: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    result = copy.deepcopy(body)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        if rng.random() < 0.2:
            result[rng.choice(FIELDS)] = copy.deepcopy(rng.choice(UNUSUAL))
        path = rng.choice(list(paths(result)) or [(rng.choice(FIELDS),)])
        holder: Any = result
        for key in path[:-1]:
            holder = holder[key]
        if rng.random() < 0.1 and path[-1] in holder:
            del holder[path[-1]]
        else:
            holder[path[-1]] = copy.deepcopy(rng.choice(UNUSUAL))
    return result


@pytest.mark.parametrize("protocol", PATHS)
def test_mutated_request_is_decoded_or_rejected(protocol: str) -> None:
    rng = random.Random(protocol)
    recorded = [*recordings(protocol).values()]
    errors: list[DragomanError] = []
    for _ in range(400):
        body = json.dumps(mutated(rng.choice(recorded), rng)).encode()
        try:
            embeddings.decode(body) if protocol == "embeddings" else decode_body(protocol, body)
        except DragomanError as error:
            errors.append(error)
    assert len(errors) > 50
    assert {error.status for error in errors} <= {400, 404, 413, 501}
    assert max(len(error.message) for error in errors) <= 500
    assert max(len(error.param or "") for error in errors) <= 210
