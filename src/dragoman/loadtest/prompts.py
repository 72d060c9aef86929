"""Texts that have a wanted number of tokens and a wanted share in common, for a tokenizer that is only known by counts.

    text := HEAD common-words own-words

How many words a number of tokens is, two texts tell that the server counts: the longer has as many tokens more as its
words have. The words are short and frequent, most of them one token in any vocabulary.

1. Texts with the same seed have their common words in common. Of as many as there are WORDS each goes on with another
   one, by its number in the order of the seed; after that first words come again, and the words after them do not.
2. A text that was used for counting is none of these.
"""

import random
from collections.abc import Awaitable, Callable

import msgspec

HEAD = "Write a very long story in which each of these words appears, one after the other:"
"""Where a server cannot be told to write on, its model at least has a reason to."""
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
LITTLE = 1
"""Words of the shorter of the two texts that are counted."""
AT_MOST = 512
"""Words that the longer has more; of a short prompt as few as leave it shorter than what is wanted, which fits."""


class Measure(msgspec.Struct, frozen=True):
    """How a server counts: tokens = fixed + words * per_word."""

    fixed: float
    per_word: float

    def words(self, tokens: int) -> int:
        return round((tokens - self.fixed) / self.per_word)


async def measure(count: Callable[[str], Awaitable[int]], tokens: int, seed: int) -> Measure | None:
    """How the server behind `count` counts texts of up to about so many tokens; None if more words are not more."""
    little = await count(_counted(seed, LITTLE))
    more = max(1, min((tokens - little) // 2, AT_MOST))
    much = await count(_counted(seed, LITTLE + more))
    if much <= little:
        return None
    per_word = (much - little) / more
    return Measure(little - LITTLE * per_word, per_word)


def _counted(seed: int, words: int) -> str:
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
