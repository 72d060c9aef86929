"""Generates prompts with a given number of tokens and a given shared prefix, for an unknown tokenizer.

    text := HEAD common-words own-words

The server counts the tokens of two texts. The difference gives the tokens per word. The words are short and frequent,
so that most of them are one token in any vocabulary.

1. Prompts of one seed share their common words. The first own word differs for as many prompts as there are WORDS.
2. The texts used for counting are not used as prompts.
"""

import random
from collections.abc import Awaitable, Callable

import msgspec

HEAD = "Write a very long story in which each of these words appears, one after the other:"
"""Asks for a long reply, for servers without a minimum length."""
COMMON_WORDS = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one
you were all her she there would their we him been has when who will no more if out so up said what its about than
into them can only other time new some could these two may first then do any like my now over such our man me even
most made after also did many before must well back through years where much your way down should because long each
just state those people too how little good world make very year still see own work men day get here between both
life being under three never know same last another while us off might great go come since against right came take
used himself few house use during without again place around however home small found thought went say part once
high upon school every does got number until always away something fact less water public put thing almost hand
enough far took head yet better set nothing night end why called eyes find going look asked later next knew give
"""
WORDS = tuple(COMMON_WORDS.split())
SHORT_TEXT_WORDS = 1
"""Words of the shorter of the two counted texts."""
MAX_EXTRA_WORDS = 512
"""Additional words of the longer one. It stays shorter than the prompts, so that it fits into the context."""


class TokenRatio(msgspec.Struct, frozen=True):
    """tokens = fixed + words * per_word"""

    fixed: float
    per_word: float

    def words(self, tokens: int) -> int:
        return round((tokens - self.fixed) / self.per_word)


async def measure(count: Callable[[str], Awaitable[int]], tokens: int, seed: int) -> TokenRatio | None:
    """Measure the tokens per word with texts of at most `tokens` tokens. None if the server does not count."""
    short = await count(_counting_text(seed, SHORT_TEXT_WORDS))
    extra_words = max(1, min((tokens - short) // 2, MAX_EXTRA_WORDS))
    long = await count(_counting_text(seed, SHORT_TEXT_WORDS + extra_words))
    if long <= short:
        return None
    per_word = (long - short) / extra_words
    return TokenRatio(short - SHORT_TEXT_WORDS * per_word, per_word)


def _counting_text(seed: int, words: int) -> str:
    return " ".join([HEAD, *random.Random(f"{seed} counted").choices(WORDS, k=words)])


class Prompts:
    def __init__(self, seed: int, words: int, shared: float) -> None:
        self.seed = seed
        common = round(words * shared)
        self.own = words - common
        self.common = [HEAD, *random.Random(f"{seed} common").choices(WORDS, k=common)]
        self.order = random.Random(f"{seed} order").sample(WORDS, k=len(WORDS))

    def text(self, number: int) -> str:
        if not self.own:
            return " ".join(self.common)
        first = self.order[number % len(self.order)]
        return " ".join([*self.common, first, *random.Random(f"{self.seed} {number}").choices(WORDS, k=self.own - 1)])
