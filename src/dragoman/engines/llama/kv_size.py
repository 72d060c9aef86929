"""How much memory a token takes in a sequence: a key and a value in every layer, for every group of heads.

`kv` says how exactly they are kept: f16, or q8_0, which is eight bits each and a half float for every 32 of them.
"""

from typing import Literal

import msgspec

Kv = Literal["f16", "q8_0"]

KV_TYPES = {"f16": 1, "q8_0": 8}
"""ggml's numbers of the types in which keys and values are kept."""
BLOCKS = {"f16": (2, 1), "q8_0": (34, 32)}
"""Bytes, and how many numbers are in them."""


class Shape(msgspec.Struct, frozen=True):
    """Of a model, as far as its state depends on it."""

    layers: int
    heads: int
    groups: int
    """Heads that have keys and values of their own."""
    width: int
    """Of the vector of a token."""
    key: int = 0
    """How wide the key of a head is, and the value; 0: as wide as a head's share of the vector."""
    value: int = 0

    def token_bytes(self, kv: Kv) -> int:
        share = self.width // max(self.heads, 1)
        per_block, block = BLOCKS[kv]
        return self.layers * self.groups * ((self.key or share) + (self.value or share)) * per_block // block
