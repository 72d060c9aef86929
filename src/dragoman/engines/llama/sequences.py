"""Assigns the sequences of the decoder's memory to jobs. No I/O: returns effects for the caller to apply.

    slots  0 … slots-1                  sequences in which jobs decode
    cache  slots … slots+cached-1       sequences that keep prefixes when their slot is given to another job

The tokens of an ended job stay in its slot, and a job with the same prefix can reuse them. A job reuses the longest
prefix in memory: in its slot, in the cache, or in the slot of a running job. llama.cpp can only copy whole sequences,
so a sequence is copied and then trimmed.

Rules
1. A slot belongs to at most one job. Cache sequences belong to no job.
2. Jobs occupy adjacent slots if possible: llama.cpp processes adjacent sequences in one pass and reads the weights
   again after each gap. That outweighs a copy, so adjacency comes first in the choice of a slot. If a gap persists, one
   job per plan is moved into it, because copies take time.
3. Prefixes of fewer than MIN_SHARED_TOKENS tokens are neither reused nor cached: computing them is as fast as copying
   a sequence.
4. Before a slot is given to a job, the tokens that only this slot holds are moved to the cache. The cache evicts
   prefixes that others hold too, then the least recently used. A prefix that was used before all of them is not cached.
5. At least the last two tokens of a prompt are decoded. The logits of the last one are needed, and llama.cpp computes a
   single row differently from several, so the same request would get different replies.
6. Prefixes are shared only within one salt.
7. Ended batch jobs count as used before all others.
8. A pinned prefix that only one sequence holds is never evicted. When its slot is given to a job it is moved to the
   cache completely. At most half of the cache is pinned.
"""

from collections.abc import Callable, Sequence

import msgspec

from dragoman.engines.llama.prefix_tree import PrefixTree

MIN_SHARED_TOKENS = 32
"""Smallest number of tokens worth sharing."""
MIN_DECODED_TOKENS = 2
"""Tokens at the end of a prompt that are always decoded."""
BATCH_AGE = 1 << 40
"""Uses by which the memory of an ended batch job appears older."""
GAP_PLANS = 2
"""Plans for which a gap waits for a new job, because the next turn of a conversation often comes at once."""


class Clear(msgspec.Struct, frozen=True):
    sequence: int


class Copy(msgspec.Struct, frozen=True):
    """Copy the whole of `source` to the empty sequence `target`."""

    source: int
    target: int


class Trim(msgspec.Struct, frozen=True):
    """Keep the first `length` tokens of a sequence."""

    sequence: int
    length: int


Effect = Clear | Copy | Trim


class PinnedPrefix(msgspec.Struct, frozen=True):
    tokens: tuple[int, ...]
    salt: str
    expires_at: float


class PinnedPrefixes:
    """Prefixes to keep for some time, whether or not they are in memory.

    There are at most `limit`; a new one replaces the oldest. A text that extends a pinned prefix replaces it and lasts
    at least as long.
    """

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        self.limit = limit
        self.clock = clock
        self._pins: list[PinnedPrefix] = []

    def add(self, tokens: Sequence[int], salt: str, seconds: float) -> None:
        text = tuple(tokens)
        extended = [pin for pin in self.live if pin.salt == salt and text[: len(pin.tokens)] == pin.tokens]
        expires_at = max([self.clock() + seconds, *(pin.expires_at for pin in extended)])
        others = [pin for pin in self._pins if pin not in extended]
        self._pins = [*others, PinnedPrefix(text, salt, expires_at)][-self.limit :] if self.limit else []

    @property
    def live(self) -> Sequence[PinnedPrefix]:
        """The prefixes that have not expired, oldest first."""
        now = self.clock()
        self._pins = [pin for pin in self._pins if pin.expires_at > now]
        return self._pins


class SequenceAllocator:
    def __init__(
        self, slots: int, cached: int = 0, *, sharing: bool = True, clock: Callable[[], float] = lambda: 0.0
    ) -> None:
        self.slots = range(slots)
        self.cache = range(slots, slots + cached)
        self.sharing = sharing
        self.held = PrefixTree()
        self.pins = PinnedPrefixes(cached // 2, clock)
        self.occupied: set[int] = set()
        """Slots that belong to a job."""
        self.filled: set[int] = set()
        """Sequences that may have tokens in memory."""
        self.last_use = dict.fromkeys(range(slots + cached), 0)
        self.effects: list[Effect] = []
        self._now = 0
        self._plans_with_gap = 0

    def find_prefix(self, prompt: Sequence[int], salt: str) -> tuple[int, frozenset[int]]:
        """Return how many tokens of a prompt can be reused, and the sequences that hold them."""
        length, holders = self.held.longest_prefix(prompt[:-MIN_DECODED_TOKENS], salt)
        return (length, holders) if length >= MIN_SHARED_TOKENS else (0, frozenset())

    def acquire(self, prompt: Sequence[int], salt: str, *, reuse: bool = True) -> tuple[int, int]:
        """Return a slot for a job, and how many tokens of its prompt are in it."""
        length, holders = self.find_prefix(prompt, salt) if reuse else (0, frozenset())
        pinned = self._pinned_sequences()

        def needs_caching(slot: int) -> bool:
            return self._lost_tokens(slot, length, holders) >= (1 if slot in pinned else MIN_SHARED_TOKENS)

        def rank(slot: int) -> tuple[int, bool, bool, int]:
            neighbours = (slot - 1 in self.occupied) + (slot + 1 in self.occupied)
            return -neighbours, slot not in holders, needs_caching(slot), self.last_use[slot]

        slot = min((slot for slot in self.slots if slot not in self.occupied), key=rank)
        source = max(holders, key=self.last_use.__getitem__, default=slot)
        if needs_caching(slot):
            self._move_to_cache(slot, source, pinned)
        if slot in holders:
            self.held.remove(slot)
            self.effects.append(Trim(slot, length))
        else:
            self._clear(slot)
            if length:
                self._touch(source)
                self.effects += [Copy(source, slot), Trim(slot, length)]
        self.occupied.add(slot)
        self.filled.add(slot)
        self._touch(slot)
        if self.sharing:
            self.held.add(slot, prompt[:length], salt)
        return slot, length

    def close_gap(self) -> tuple[int, int] | None:
        """Close a gap between jobs. Call it once per plan; returns the old and the new slot of a job that moves."""
        occupied = self.occupied
        if not self.sharing or not occupied or max(occupied) - min(occupied) < len(occupied):
            self._plans_with_gap = 0
            return None
        self._plans_with_gap += 1
        if self._plans_with_gap <= GAP_PLANS:
            return None
        windows = (range(first, first + len(occupied)) for first in self.slots[: 1 - len(occupied)])
        window = max(windows, key=lambda window: len(occupied.intersection(window)))
        slot, free = max(occupied.difference(window)), min(set(window) - occupied)
        pinned = self._pinned_sequences()
        if self.held.exclusive_length(free) >= (1 if free in pinned else MIN_SHARED_TOKENS):
            self._move_to_cache(free, slot, pinned)
        self._copy_text(slot, free)
        self.occupied.remove(slot)
        self.occupied.add(free)
        self._touch(free)
        return slot, free

    def append(self, slot: int, tokens: Sequence[int]) -> None:
        """Record tokens that were decoded in a slot."""
        if self.sharing:
            self.held.extend(slot, tokens)

    def release(self, slot: int, *, is_invalid: bool, is_batch: bool = False) -> None:
        """Release a job's slot. `is_invalid`: its memory is in an unknown state."""
        self.occupied.remove(slot)
        self._touch(slot)
        if is_batch:
            self.last_use[slot] -= BATCH_AGE
        if is_invalid or not self.sharing:
            self.held.remove(slot)

    def drain(self) -> tuple[Effect, ...]:
        effects, self.effects = tuple(self.effects), []
        return effects

    def _lost_tokens(self, slot: int, length: int, holders: frozenset[int]) -> int:
        """Return how many tokens would be lost from memory if the slot were given to the job."""
        exclusive = self.held.exclusive_length(slot)
        return min(exclusive, self.held.length(slot) - length) if slot in holders else exclusive

    def _pinned_sequences(self) -> frozenset[int]:
        """Return the sequences that are the only holders of a pinned prefix."""
        matches = [self.held.longest_prefix(pin.tokens, pin.salt) for pin in self.pins.live]
        return frozenset().union(
            *(holders for length, holders in matches if length >= MIN_SHARED_TOKENS and len(holders) == 1)
        )

    def _move_to_cache(self, slot: int, source: int, pinned: frozenset[int]) -> None:
        """Move the slot's text to the cache, if a sequence there may be evicted. `source` is about to be copied."""
        candidates = [sequence for sequence in self.cache if sequence != source and sequence not in pinned]
        if not candidates:
            return
        target = min(candidates, key=lambda sequence: (self._is_exclusive(sequence), self.last_use[sequence]))
        is_newer = self._is_exclusive(target) and self.last_use[target] > self.last_use[slot]
        if is_newer and slot not in pinned:
            return
        self._copy_text(slot, target)
        self.last_use[target] = self.last_use[slot]

    def _is_exclusive(self, sequence: int) -> bool:
        return self.held.exclusive_length(sequence) >= MIN_SHARED_TOKENS

    def _copy_text(self, source: int, target: int) -> None:
        """Copy the memory of a sequence and make `target` the holder of its text."""
        self._clear(target)
        self.effects.append(Copy(source, target))
        self.filled.add(target)
        self.held.move(source, target)

    def _clear(self, sequence: int) -> None:
        self.held.remove(sequence)
        if sequence in self.filled:
            self.filled.remove(sequence)
            self.effects.append(Clear(sequence))

    def _touch(self, sequence: int) -> None:
        self._now += 1
        self.last_use[sequence] = self._now
