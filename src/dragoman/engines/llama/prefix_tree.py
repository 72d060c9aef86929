"""Who holds which beginning of a text: a radix tree over token ids.

    root ── [1, 2, 3] ──┬── [4, 5]      holders {a}
            {a, b, c}   └── [7]         holders {b}          c ends after 3

Each edge is a run of tokens, each node knows everybody whose text goes through it. Texts of different salts never meet:
each salt has a tree of its own.

Rules
1. A text ends at the end of an edge, never inside one.
2. No two edges of a node begin with the same token.
3. A node is there as long as somebody holds it. One that has a single child and at which no text ends is merged with
   that child, so that the tree is never larger than those who are in it make necessary.
"""

from collections.abc import Sequence


class _Node:
    __slots__ = ("children", "edge", "holders", "parent", "salt")

    def __init__(self, edge: list[int], parent: "_Node | None", holders: set[int], salt: str) -> None:
        self.edge = edge
        self.parent = parent
        self.holders = holders
        self.salt = salt
        self.children: dict[int, _Node] = {}


class Prefixes:
    def __init__(self) -> None:
        self.roots: dict[str, _Node] = {}
        self.ends: dict[int, _Node] = {}

    def __contains__(self, holder: int) -> bool:
        return holder in self.ends

    def hold(self, holder: int, tokens: Sequence[int], salt: str = "") -> None:
        """`holder`, who has held nothing, has these tokens now."""
        root = self.roots.setdefault(salt, _Node([], None, set(), salt))
        root.holders.add(holder)
        self.ends[holder] = root
        self.extend(holder, tokens)

    def extend(self, holder: int, tokens: Sequence[int]) -> None:
        """`holder` has these tokens too, after those that it had."""
        node = before = self.ends[holder]
        if node.parent is not None and not node.children and len(node.holders) == 1:
            node.edge.extend(tokens)
            return
        at = 0
        while at < len(tokens):
            child = node.children.get(tokens[at])
            if child is None:
                child = node.children[tokens[at]] = _Node(list(tokens[at:]), node, set(), node.salt)
            same = _common(child.edge, tokens[at : at + len(child.edge)])
            node = child if same == len(child.edge) else _split(child, same)
            node.holders.add(holder)
            at += same
        self.ends[holder] = node
        _merge(before)

    def drop(self, holder: int) -> None:
        """`holder` holds nothing any more; nothing happens where it did not."""
        node = end = self.ends.pop(holder, None)
        while node is not None:
            node.holders.discard(holder)
            parent = node.parent
            if not node.holders:
                end = parent
                if parent is None:
                    del self.roots[node.salt]
                else:
                    del parent.children[node.edge[0]]
            node = parent
        if end is not None:
            _merge(end)

    def move(self, holder: int, other: int) -> None:
        """What `holder` held is `other`'s, who has held nothing."""
        self.ends[other] = self.ends.pop(holder)
        node: _Node | None = self.ends[other]
        while node is not None:
            node.holders.remove(holder)
            node.holders.add(other)
            node = node.parent

    def longest(self, tokens: Sequence[int], salt: str = "") -> tuple[int, frozenset[int]]:
        """How many of the tokens somebody has, from the first on, and everybody who has as many."""
        node = self.roots.get(salt)
        at = 0
        holders: set[int] = set()
        while node is not None and at < len(tokens):
            node = node.children.get(tokens[at])
            if node is not None:
                same = _common(node.edge, tokens[at : at + len(node.edge)])
                at += same
                holders = node.holders
                if same < len(node.edge):
                    break
        return at, frozenset(holders)

    def length(self, holder: int) -> int:
        return self._sum(holder, alone=False)

    def alone(self, holder: int) -> int:
        """How many tokens at the end of its text nobody else holds."""
        return self._sum(holder, alone=True)

    def _sum(self, holder: int, *, alone: bool) -> int:
        node = self.ends.get(holder)
        total = 0
        while node is not None and not (alone and len(node.holders) > 1):
            total += len(node.edge)
            node = node.parent
        return total


def _split(node: _Node, at: int) -> _Node:
    """A new node in the midst of the edge; the old one, at which texts end, stays below it."""
    upper = _Node(node.edge[:at], node.parent, set(node.holders), node.salt)
    assert node.parent is not None
    node.parent.children[upper.edge[0]] = upper
    node.edge = node.edge[at:]
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


def _common(edge: list[int], tokens: Sequence[int]) -> int:
    """How many tokens are the same. Whole runs are compared first: that is fast, and mostly enough."""
    piece = list(tokens)
    if edge == piece:
        return len(edge)
    differing = (at for at, (one, other) in enumerate(zip(edge, piece, strict=False)) if one != other)
    return next(differing, min(len(edge), len(piece)))
