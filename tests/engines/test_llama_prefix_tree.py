"""The prefix tree, compared with a table of texts."""

import random
from itertools import takewhile

import pytest

from dragoman.engines.llama.prefix_tree import PrefixTree, _Node

SCHEDULES = 2000


def common(one: list[int], other: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


class Table:
    """Does the same as the tree by comparing all texts."""

    def __init__(self) -> None:
        self.texts: dict[int, tuple[str, list[int]]] = {}

    def longest(self, tokens: list[int], salt: str) -> tuple[int, frozenset[int]]:
        same = {holder: common(tokens, text) for holder, (salted, text) in self.texts.items() if salted == salt}
        most = max(same.values(), default=0)
        return most, frozenset(holder for holder, length in same.items() if length == most and most)

    def exclusive_length(self, holder: int) -> int:
        salt, text = self.texts[holder]
        others = [
            common(text, other) for key, (salted, other) in self.texts.items() if key != holder and salted == salt
        ]
        return len(text) - max(others, default=0)


def check(tree: PrefixTree, table: Table) -> None:
    assert tree.ends.keys() == table.texts.keys()
    assert tree.roots.keys() == {salt for salt, _ in table.texts.values()}
    for salt, root in tree.roots.items():
        assert count(root) <= 2 * len(root.holders) + 1
        assert root.holders == {holder for holder, (salted, _) in table.texts.items() if salted == salt}
    for holder, (_, text) in table.texts.items():
        assert tree.length(holder) == len(text)
        assert tree.exclusive_length(holder) == table.exclusive_length(holder)


def count(node: _Node) -> int:
    assert node.holders
    for first, child in node.children.items():
        assert child.edge[0] == first
        assert child.parent is node
        assert child.holders <= node.holders
    return 1 + sum(count(child) for child in node.children.values())


def random_change(rng: random.Random, tree: PrefixTree, table: Table, texts: list[list[int]]) -> None:
    holder, salt = rng.randrange(8), rng.choice(["", "", "other"])
    text = rng.choice(texts)[: rng.randrange(40)]
    text += [rng.randrange(3) for _ in range(rng.randrange(4))]
    if holder not in table.texts:
        tree.add(holder, tuple(text), salt)
        table.texts[holder] = salt, list(text)
    else:
        action = rng.choice(["drop", "extend", "extend", "move"])
        free = next(number for number in range(99) if number not in table.texts)
        if action == "drop":
            tree.remove(holder)
            del table.texts[holder]
        elif action == "extend":
            tree.extend(holder, text)
            table.texts[holder][1].extend(text)
        else:
            tree.move(holder, free)
            table.texts[free] = table.texts.pop(holder)
    assert tree.longest_prefix(text, salt) == table.longest(text, salt)


@pytest.mark.parametrize("part", range(4))
def test_random_changes(part: int) -> None:
    for seed in range(part * SCHEDULES // 4, (part + 1) * SCHEDULES // 4):
        rng = random.Random(seed)
        texts = [[rng.randrange(3) for _ in range(40)] for _ in range(2)]
        tree, table = PrefixTree(), Table()
        for _ in range(rng.randrange(25)):
            random_change(rng, tree, table, texts)
            check(tree, table)
        for holder in list(table.texts):
            tree.remove(holder)
        assert not tree.roots
        assert not tree.ends


def test_drop_of_an_unknown_holder() -> None:
    tree = PrefixTree()
    tree.remove(3)
    assert tree.longest_prefix((1, 2)) == (0, frozenset())
    assert tree.exclusive_length(3) == 0
