"""The servers behind models, as an operator sees and drains them."""

from collections.abc import Iterable
from typing import Any

import msgspec

from dragoman.protocols import json_body


class DrainFields(msgspec.Struct, frozen=True):
    """`drain` false: something goes there again."""

    model: str
    url: str
    drain: bool = True


class ListedPlace(msgspec.Struct, frozen=True):
    model: str
    url: str
    state: str
    running: int
    failures: int
    weight: float
    rank: int


def decode(body: bytes) -> DrainFields:
    return json_body.convert(json_body.parse(body), DrainFields)


def encode(places: Iterable[ListedPlace]) -> dict[str, Any]:
    return {"object": "list", "data": [msgspec.structs.asdict(place) for place in places]}
