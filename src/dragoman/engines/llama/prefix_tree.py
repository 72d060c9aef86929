"""A radix tree over token ids that finds the holders of the longest common prefix.

    root ── [1, 2, 3] ──┬── [4, 5]      holders {a}
            {a, b, c}   └── [7]         holders {b}          c ends after 3

Each edge is a run of tokens. Each node knows the holders whose text passes through it. Each salt has a tree of its own.

Rules
1. A text ends at the end of an edge, never inside one.
2. No two edges of a node begin with the same token.
3. A node without holders is removed. A node that has a single child and at which no text ends is merged with the child.
"""

from collections.abc import Iterator, Sequence
from itertools import takewhile


class _Node:
    __slots__ = ("children", "edge", "holders", "parent", "salt")

    def __init__(self, edge: list[int], parent: "_Node | None", holders: set[int], salt: str) -> None:
        self.edge = edge
        self.parent = parent
        self.holders = holders
        self.salt = salt
        self.children: dict[int, _Node] = {}


class PrefixTree:
    """The texts of holders, which are integers."""

    def __init__(self) -> None:
        self.roots: dict[str, _Node] = {}
        self.ends: dict[int, _Node] = {}

    def add(self, holder: int, tokens: Sequence[int], salt: str = "") -> None:
        """Add a new holder with these tokens."""
        root = self.roots.setdefault(salt, _Node([], None, set(), salt))
        root.holders.add(holder)
        self.ends[holder] = root
        self.extend(holder, tokens)

    def extend(self, holder: int, tokens: Sequence[int]) -> None:
        """Append tokens to a holder's text."""
        node = before = self.ends[holder]
        if node.parent is not None and not node.children and len(node.holders) == 1:
            node.edge.extend(tokens)
            return
        position = 0
        while position < len(tokens):
            child = node.children.get(tokens[position])
            if child is None:
                child = node.children[tokens[position]] = _Node(list(tokens[position:]), node, set(), node.salt)
            common = _common_length(child.edge, tokens[position : position + len(child.edge)])
            node = child if common == len(child.edge) else _split(child, common)
            node.holders.add(holder)
            position += common
        self.ends[holder] = node
        _merge(before)

    def remove(self, holder: int) -> None:
        """Remove a holder, if it is present."""
        end = self.ends.get(holder)
        for node in self.path(holder):
            node.holders.remove(holder)
            if not node.holders:
                end = node.parent
                if end is None:
                    del self.roots[node.salt]
                else:
                    del end.children[node.edge[0]]
        self.ends.pop(holder, None)
        if end is not None:
            _merge(end)

    def move(self, holder: int, other: int) -> None:
        """Give the holder's text to `other`, a new holder."""
        for node in self.path(holder):
            node.holders.remove(holder)
            node.holders.add(other)
        self.ends[other] = self.ends.pop(holder)

    def longest_prefix(self, tokens: Sequence[int], salt: str = "") -> tuple[int, frozenset[int]]:
        """Return the length of the longest prefix of the tokens that is held, and its holders."""
        node = self.roots.get(salt)
        length = 0
        holders: set[int] = set()
        while node is not None and length < len(tokens):
            node = node.children.get(tokens[length])
            if node is not None:
                common = _common_length(node.edge, tokens[length : length + len(node.edge)])
                length += common
                holders = node.holders
                if common < len(node.edge):
                    break
        return length, frozenset(holders)

    def length(self, holder: int) -> int:
        return sum(len(node.edge) for node in self.path(holder))

    def exclusive_length(self, holder: int) -> int:
        """Return how many tokens at the end of the text no other holder has."""
        own = takewhile(lambda node: len(node.holders) == 1, self.path(holder))
        return sum(len(node.edge) for node in own)

    def path(self, holder: int) -> Iterator[_Node]:
        """Yield the nodes of a holder's text, the last one first."""
        node = self.ends.get(holder)
        while node is not None:
            yield node
            node = node.parent


def _split(node: _Node, position: int) -> _Node:
    """Insert a node inside the edge and return it. The old node, at which texts may end, becomes its child."""
    upper = _Node(node.edge[:position], node.parent, set(node.holders), node.salt)
    assert node.parent is not None
    node.parent.children[upper.edge[0]] = upper
    node.edge = node.edge[position:]
    node.parent = upper
    upper.children[node.edge[0]] = node
    return upper


def _merge(node: _Node) -> None:
    if node.parent is None or len(node.children) != 1:
        return
    child = next(iter(node.children.values()))
    if len(child.holders) == len(node.holders):
        child.edge = node.edge + child.edge
        child.parent = node.parent
        node.parent.children[child.edge[0]] = child


def _common_length(edge: list[int], tokens: Sequence[int]) -> int:
    run = list(tokens)
    # Comparing the whole lists is fast, and they are usually equal.
    if edge == run:
        return len(edge)
    differences = (index for index, (one, other) in enumerate(zip(edge, run, strict=False)) if one != other)
    return next(differences, min(len(edge), len(run)))
