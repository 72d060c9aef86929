"""So many requests at once, then more: each client asks again as soon as it is answered.

1. Count: how many words the wanted tokens are.
2. Warm up: one request of the wanted size that nobody counts. It also puts what the prompts have in common into the
   server's cache, and tells how many tokens they really have.
3. Each level: as many clients as it has concurrency take the next prompt from one pile until there is none.

No prompt is asked twice, in no level, unless all of it is in common. What was measured before an interruption is kept.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator

from dragoman.core.errors import ConfigError
from dragoman.loadtest.figures import Measured, Plan, Result, Sample, summary
from dragoman.loadtest.prompts import Measure, Prompts, measure
from dragoman.loadtest.target import LENGTH_FIELDS, Target

NEAR = 0.01
"""The share by which a prompt may differ from the wanted length without being made anew."""

BEAT_SECONDS = 0.01


class Sweep:
    def __init__(self, target: Target, plan: Plan, tell: Callable[[str], None]) -> None:
        self.target = target
        self.plan = plan
        self.tell = tell
        self.levels: list[Measured] = []
        self.uncounted = False
        self.numbers = itertools.count(1)

    async def run(self) -> None:
        await self.target.choose_model()
        prompts = await self._prompts()
        for concurrency in self.plan.concurrency:
            self.tell(f"{self.plan.requests_at(concurrency)} requests, {concurrency} at once")
            await self._level(concurrency, prompts)

    async def _prompts(self) -> Prompts:
        wanted = self.plan.prompt_tokens
        found = await measure(self.target.count, wanted, self.plan.seed)
        self.tell(f"warming up {self.target.model}")
        self.uncounted = found is None
        counting = found or Measure(fixed=0, per_word=1)
        words = counting.words(wanted)
        if words < 1:
            least = round(counting.fixed + counting.per_word) + 1
            raise ConfigError(f"--prompt {wanted}: the shortest prompt has {least} tokens with this model")
        prompts, tokens = await self._warmed_up(words)
        missing = 0 if self.uncounted else wanted - tokens
        if abs(missing) > wanted * NEAR:
            prompts, _ = await self._warmed_up(max(1, words + round(missing / counting.per_word)))
        return prompts

    async def _warmed_up(self, words: int) -> tuple[Prompts, int]:
        """Prompts of so many words, and how many tokens one of them has."""
        prompts = Prompts(self.plan.seed, words, self.plan.shared)
        sample = await self.target.ask_first(prompts.text(0), self.plan.output_tokens)
        return prompts, sample.usage.prompt if sample.usage is not None else 0

    async def _level(self, concurrency: int, prompts: Prompts) -> None:
        pile = itertools.islice(self.numbers, self.plan.requests_at(concurrency))
        seen: list[Sample] = []
        late: list[float] = []
        own_clock = asyncio.create_task(_lateness(late))
        begun = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as clients:
                for _ in range(concurrency):
                    clients.create_task(self._client(pile, prompts, seen))
        finally:
            own_clock.cancel()
            if seen:
                seconds = time.perf_counter() - begun
                self.levels.append(Measured(summary(concurrency, seen, seconds, late), tuple(seen)))

    async def _client(self, pile: Iterator[int], prompts: Prompts, seen: list[Sample]) -> None:
        for number in pile:
            sample = await self.target.ask(prompts.text(number), self.plan.output_tokens)
            seen.append(sample)

    def result(self) -> Result:
        refused = tuple(name for name in LENGTH_FIELDS if name not in self.target.length_fields)
        model = self.target.model or ""
        return Result(self.target.url, model, self.plan, tuple(self.levels), refused, self.uncounted)


async def _lateness(late: list[float]) -> None:
    """By how much this program itself comes too late to what it wants to do, again and again."""
    while True:
        due = time.perf_counter() + BEAT_SECONDS
        await asyncio.sleep(BEAT_SECONDS)
        late.append(time.perf_counter() - due)
