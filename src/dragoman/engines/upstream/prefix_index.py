"""Records which server has computed which prompt prefix.

    chain := H(salt), H(link, block), H(link, block), …          block := BLOCK bytes of model, tools and messages

Prompts that share a prefix share the first links of their chains, one link per block. A server that has computed a
prompt has the KV cache of all its prefixes.

Rules
1. Chains are salted with the principal, so that timing reveals nothing about the requests of others.
2. The index is bounded. The least recently used links are removed first.
3. A restored server has lost its cache: its entries of an earlier generation do not count.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Sequence

import msgspec

from dragoman.core.request import GenerationRequest

BLOCK = 256
"""Bytes per block: about sixty tokens."""
MAX_BLOCKS = 2048
MAX_LINKS = 200_000
MAX_HOLDERS = 8
_encoder = msgspec.json.Encoder(order="deterministic")


def hash_prefixes(request: GenerationRequest) -> list[bytes]:
    """Return one hash per complete block of the prompt."""
    data = _encoder.encode((request.prompts, request.tools, request.messages))[: BLOCK * MAX_BLOCKS]
    link = hashlib.blake2b(_encoder.encode((request.principal, request.model)), digest_size=16).digest()
    links: list[bytes] = []
    for at in range(0, len(data) - BLOCK + 1, BLOCK):
        link = hashlib.blake2b(data[at : at + BLOCK], digest_size=16, key=link).digest()
        links.append(link)
    return links


class PrefixIndex:
    def __init__(self, max_links: int = MAX_LINKS) -> None:
        self._max_links = max_links
        self._holders: OrderedDict[bytes, dict[int, int]] = OrderedDict()
        """Servers and their generations by link; the most recently used link is last."""

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, links: Sequence[bytes], server: int, generation: int) -> None:
        # In reverse order, so that the first links, which prompts share most often, are removed last.
        for link in reversed(links[: self._max_links]):
            holders = self._holders.pop(link, {})
            holders.pop(server, None)
            holders[server] = generation
            if len(holders) > MAX_HOLDERS:
                del holders[next(iter(holders))]
            self._holders[link] = holders
        while len(self._holders) > self._max_links:
            self._holders.popitem(last=False)

    def find_longest(self, links: Sequence[bytes], generations: dict[int, int]) -> tuple[Collection[int], int]:
        """Return the servers with the longest known prefix, and its number of links.

        `generations` maps the candidate servers to their current generations.
        """
        for count in range(len(links), 0, -1):
            holders = self._holders.get(links[count - 1])
            if holders:
                found = [server for server, known in holders.items() if generations.get(server) == known]
                if found:
                    return found, count
        return (), 0
