"""Who has which beginning of a prompt.

    chain := H(salt), H(link, block), H(link, block), …          block := BLOCK bytes of model, tools and messages

Two prompts that begin alike have chains that begin alike, as far as whole blocks go. A server that has computed a
prompt has the state of all its beginnings.

Rules
1. Chains are salted with the principal: nobody can find out by time what another has asked.
2. What is remembered is bounded; what nobody asked for the longest is forgotten first.
3. A place that was away has forgotten everything: its `life` is another one then.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Sequence

import msgspec

from dragoman.core.request import GenerationRequest

BLOCK = 256
"""Bytes: some sixty tokens."""
MOST_BLOCKS = 2048
MOST_LINKS = 200_000
MOST_HOLDERS = 8
_encoder = msgspec.json.Encoder(order="deterministic")


def chain(request: GenerationRequest) -> list[bytes]:
    """One link for every whole block, from the first to the last."""
    said = (request.prompts, request.tools, request.messages)
    data = _encoder.encode(said)[: BLOCK * MOST_BLOCKS]
    link = hashlib.blake2b(_encoder.encode((request.principal, request.model)), digest_size=16).digest()
    links: list[bytes] = []
    for at in range(0, len(data) - BLOCK + 1, BLOCK):
        link = hashlib.blake2b(data[at : at + BLOCK], digest_size=16, key=link).digest()
        links.append(link)
    return links


class Beginnings:
    def __init__(self, most: int = MOST_LINKS) -> None:
        self._most = most
        self._holders: OrderedDict[bytes, dict[int, int]] = OrderedDict()
        """By link, the places that have it, each with the life in which it had; the latest last."""

    def __len__(self) -> int:
        return len(self._holders)

    def note(self, links: Sequence[bytes], place: int, life: int) -> None:
        # The first links last: whoever has the end of a chain has its beginning, and it is that which others share.
        for link in reversed(links[: self._most]):
            holders = self._holders.pop(link, None)
            if holders is None:
                holders = {}
            holders.pop(place, None)
            holders[place] = life
            if len(holders) > MOST_HOLDERS:
                del holders[next(iter(holders))]
            self._holders[link] = holders
        while len(self._holders) > self._most:
            self._holders.popitem(last=False)

    def longest(self, links: Sequence[bytes], lives: dict[int, int]) -> tuple[Collection[int], int]:
        """Those of the places, given with their lives, that have the most of a prompt, and how many links that is."""
        for count in range(len(links), 0, -1):
            holders = self._holders.get(links[count - 1])
            if holders:
                found = [place for place, life in holders.items() if lives.get(place) == life]
                if found:
                    return found, count
        return (), 0
