"""Caches the tokens of long pieces of text. An agent's instructions and tools are the same in every request.

    text  := piece (name piece)*          name: the text of an added token
    long piece                            its tokens are cached
    text between two long pieces          is tokenized in one call, including the names

Rules
1. A tokenizer first splits a text at the names of added tokens, so a text may be split there. This holds for names that
   are matched verbatim (not `normalized`), strip no spaces, match inside words, and cannot overlap another name.
2. The assumption is tested with a few texts. If splitting changes the tokens of one, as when only the start of a text
   gets a space, no text is split.
3. Only names that occur in prompts are considered, because vocabularies have thousands.
"""

import re
from collections.abc import Callable, Collection, Iterator, Sequence

import msgspec

from dragoman.grammar.lru_cache import LruCache

Encode = Callable[[str], list[int]]

MIN_PIECE_LENGTH = 512
"""Shorter pieces are not cached; they are tokenized in less than half a millisecond."""
MAX_PIECES = 4096
MAX_CHARACTERS = 4 * 1024 * 1024
"""Total length of the cached pieces; their tokens take about ten times as many bytes."""
MAX_PIECE_LENGTH = MAX_CHARACTERS // 16
"""Longer pieces are not cached, because they would evict too many others."""
TEST_TEXTS = ("ab c{0} d  e{0}{0}\nfg{0}", "{0}a{0} b {0}\n\n{0}É…字 12{0}'s", " {0} a{0}b\t{0}.A")


class AddedToken(msgspec.Struct, frozen=True):
    """An added token in `tokenizer.json`, matched before all others."""

    id: int
    content: str
    special: bool = False
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False


class CachingEncoder:
    """Tokenizes text with `encode` and caches long pieces; `names` are the names at which text may be split."""

    def __init__(self, encode: Encode, names: Collection[str], min_length: int = MIN_PIECE_LENGTH) -> None:
        self.splits_text = bool(names)
        self._encode = encode
        self._names = re.compile("|".join(map(re.escape, names)) or "(?!)")
        self._min_length = min_length
        self._cache: LruCache[tuple[int, ...]] = LruCache(MAX_PIECES, MAX_CHARACTERS)

    def encode(self, text: str) -> list[int]:
        if len(text) < self._min_length:
            return self._encode(text)
        tokens: list[int] = []
        for piece, is_long in self._pieces(text):
            tokens += self._encode_cached(piece) if is_long else self._encode(piece)
        return tokens

    def _pieces(self, text: str) -> Iterator[tuple[str, bool]]:
        done = start = 0
        for end, next_start in (*(found.span() for found in self._names.finditer(text)), (len(text), len(text))):
            if end - start >= self._min_length:
                if start > done:
                    yield text[done:start], False
                yield text[start:end], True
                done = end
            start = next_start
        if done < len(text):
            yield text[done:], False

    def _encode_cached(self, piece: str) -> Sequence[int]:
        found = self._cache.get(piece)
        if found is None:
            found = tuple(self._encode(piece))
            if len(piece) <= MAX_PIECE_LENGTH:
                self._cache.put(piece, found)
        return found


def create_encoder(encode: Encode, added: Sequence[AddedToken], candidates: Collection[int]) -> CachingEncoder:
    """Create an encoder that splits text at the names of those candidate tokens where it is safe."""
    literal = [token for token in added if token.content and not token.normalized]
    names = [token.content for token in literal if token.id in candidates and _is_separable(token, literal)]
    return CachingEncoder(encode, names if _splits_safely(encode, names) else ())


def _is_separable(token: AddedToken, others: Sequence[AddedToken]) -> bool:
    if token.single_word or token.lstrip or token.rstrip:
        return False
    name = token.content
    return not any(_overlap(name, other.content) or _overlap(other.content, name) for other in others)


def _overlap(first: str, second: str) -> bool:
    """Whether `second` may begin inside `first`; for equal names, after the first character."""
    if first == second:
        return any(first.endswith(first[:size]) for size in range(1, len(first)))
    return second in first or any(first.endswith(second[:size]) for size in range(1, len(second)))


def _splits_safely(encode: Encode, names: Sequence[str]) -> bool:
    encoder = CachingEncoder(encode, names, min_length=1)
    texts = [sample.format(name) for sample in TEST_TEXTS for name in names]
    return all(encoder.encode(text) == encode(text) for text in texts)
