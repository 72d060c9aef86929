"""Tokens of texts, of which the long pieces are kept: an agent's instructions and tools are the same in every request.

    text  := piece (name piece)*          name: of a token that was added to the vocabulary
    long piece                            its tokens are looked up, or made and kept
    what stands between two long pieces   is made tokens in one call, names and all

Rules
1. A tokenizer looks for the names of its tokens first, and what stands between two of them never meets: so a text may
   be cut there. That holds for names which are found in the text as it is written (not `normalized`), take no spaces
   from their neighbours, are found inside words too, and of which no part can be a part of another such name.
2. Whether it holds for the whole tokenizer is tried with a few texts; if one has other tokens cut than whole, as where
   only the beginning of a text gets a space, no text is cut.
3. Only names that prompts are made of are looked for: vocabularies have thousands.
"""

import re
from collections.abc import Callable, Collection, Iterator, Sequence

import msgspec

from dragoman.grammar.lru_cache import Kept

Encode = Callable[[str], list[int]]

LONG = 512
"""Characters of a piece that is worth keeping; shorter ones are made tokens in less than half a millisecond."""
PIECES = 4096
ROOM = 4 * 1024 * 1024
"""Characters of all pieces that are kept; their tokens take about ten times as many bytes."""
LONGEST = ROOM // 16
"""Nothing displaces more than this."""
SAMPLES = ("ab c{0} d  e{0}{0}\nfg{0}", "{0}a{0} b {0}\n\n{0}É…字 12{0}'s", " {0} a{0}b\t{0}.A")


class Added(msgspec.Struct, frozen=True):
    """A token of a name that is looked for before anything else, as `tokenizer.json` has it."""

    id: int
    content: str
    special: bool = False
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False


class Cuts:
    """`encode` makes tokens of a text with names in it, `names` are those at which it may be cut."""

    def __init__(self, encode: Encode, names: Collection[str], least: int = LONG) -> None:
        self.is_cutting = bool(names)
        self._encode = encode
        self._names = re.compile("|".join(map(re.escape, names)) or "(?!)")
        self._least = least
        self._kept: Kept[tuple[int, ...]] = Kept(PIECES, ROOM)

    def encode(self, text: str) -> list[int]:
        if len(text) < self._least:
            return self._encode(text)
        tokens: list[int] = []
        for piece, is_long in self._pieces(text):
            tokens += self._looked_up(piece) if is_long else self._encode(piece)
        return tokens

    def _pieces(self, text: str) -> Iterator[tuple[str, bool]]:
        told = start = 0
        for end, behind in (*(found.span() for found in self._names.finditer(text)), (len(text), len(text))):
            if end - start >= self._least:
                if start > told:
                    yield text[told:start], False
                yield text[start:end], True
                told = end
            start = behind
        if told < len(text):
            yield text[told:], False

    def _looked_up(self, piece: str) -> Sequence[int]:
        found = self._kept.get(piece)
        if found is None:
            found = tuple(self._encode(piece))
            if len(piece) <= LONGEST:
                self._kept.keep(piece, found)
        return found


def cuts(encode: Encode, added: Sequence[Added], wanted: Collection[int]) -> Cuts:
    """At the names of those of the tokens `wanted` where it changes nothing."""
    literal = [token for token in added if token.content and not token.normalized]
    names = [token.content for token in literal if token.id in wanted and _is_sharp(token, literal)]
    return Cuts(encode, names if _is_same(encode, names) else ())


def _is_sharp(token: Added, others: Sequence[Added]) -> bool:
    if token.single_word or token.lstrip or token.rstrip:
        return False
    name = token.content
    return not any(_overlap(name, other.content) or _overlap(other.content, name) for other in others)


def _overlap(first: str, second: str) -> bool:
    """Whether the second may begin within the first; a name and itself, if that is not at its beginning."""
    if first == second:
        return any(first.endswith(first[:size]) for size in range(1, len(first)))
    return second in first or any(first.endswith(second[:size]) for size in range(1, len(second)))


def _is_same(encode: Encode, names: Sequence[str]) -> bool:
    cut = Cuts(encode, names, least=1)
    texts = [sample.format(name) for sample in SAMPLES for name in names]
    return all(cut.encode(text) == encode(text) for text in texts)
