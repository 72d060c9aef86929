"""Runs a load test at one concurrency level after another.

1. Count: measure the tokens per word.
2. Warm up: send one request of the full size, which is not measured. It fills the server's cache with the shared
   prefix and gives the exact number of prompt tokens.
3. Each level: `concurrency` clients send one request after another until all requests of the level are sent.

A prompt is never sent twice, unless all of it is shared. An interrupted run keeps the figures measured so far.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator

from dragoman.core.errors import ConfigError
from dragoman.loadtest.figures import LoadPlan, LoadResult, MeasuredLevel, Sample, summarize
from dragoman.loadtest.prompts import Prompts, TokenRatio, measure
from dragoman.loadtest.target import LENGTH_FIELDS, Target

LENGTH_TOLERANCE = 0.01
"""Prompts whose length is off by more than this share are generated again."""
PROBE_SECONDS = 0.01


class Sweep:
    def __init__(self, target: Target, plan: LoadPlan, progress: Callable[[str], None]) -> None:
        self.target = target
        self.plan = plan
        self.progress = progress
        self.levels: list[MeasuredLevel] = []
        self.uncounted = False
        self.numbers = itertools.count(1)

    async def run(self) -> None:
        await self.target.choose_model()
        prompts = await self._prepare_prompts()
        for concurrency in self.plan.concurrency:
            self.progress(f"{self.plan.requests_at(concurrency)} requests, {concurrency} at once")
            await self._run_level(concurrency, prompts)

    async def _prepare_prompts(self) -> Prompts:
        tokens = self.plan.prompt_tokens
        measured = await measure(self.target.count_tokens, tokens, self.plan.seed)
        self.progress(f"warming up {self.target.model}")
        self.uncounted = measured is None
        ratio = measured or TokenRatio(fixed=0, per_word=1)
        words = ratio.words(tokens)
        if words < 1:
            shortest = round(ratio.fixed + ratio.per_word) + 1
            raise ConfigError(f"--prompt {tokens}: the shortest prompt has {shortest} tokens with this model")
        prompts, actual = await self._warm_up(words)
        missing = 0 if self.uncounted else tokens - actual
        if abs(missing) > tokens * LENGTH_TOLERANCE:
            prompts, _ = await self._warm_up(max(1, words + round(missing / ratio.per_word)))
        return prompts

    async def _warm_up(self, words: int) -> tuple[Prompts, int]:
        """Return prompts with this many words, and the number of tokens of one of them."""
        prompts = Prompts(self.plan.seed, words, self.plan.shared)
        sample = await self.target.send_first(prompts.text(0), self.plan.output_tokens)
        return prompts, sample.usage.prompt if sample.usage is not None else 0

    async def _run_level(self, concurrency: int, prompts: Prompts) -> None:
        numbers = itertools.islice(self.numbers, self.plan.requests_at(concurrency))
        samples: list[Sample] = []
        delays: list[float] = []
        probe = asyncio.create_task(_measure_delay(delays))
        start = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as clients:
                for _ in range(concurrency):
                    clients.create_task(self._run_client(numbers, prompts, samples))
        finally:
            probe.cancel()
            if samples:
                seconds = time.perf_counter() - start
                self.levels.append(MeasuredLevel(summarize(concurrency, samples, seconds, delays), tuple(samples)))

    async def _run_client(self, numbers: Iterator[int], prompts: Prompts, samples: list[Sample]) -> None:
        for number in numbers:
            sample = await self.target.send(prompts.text(number), self.plan.output_tokens)
            samples.append(sample)

    def result(self) -> LoadResult:
        refused = tuple(name for name in LENGTH_FIELDS if name not in self.target.length_fields)
        model = self.target.model or ""
        return LoadResult(self.target.url, model, self.plan, tuple(self.levels), refused, self.uncounted)


async def _measure_delay(delays: list[float]) -> None:
    """Record how late this program's own timers fire."""
    while True:
        due = time.perf_counter() + PROBE_SECONDS
        await asyncio.sleep(PROBE_SECONDS)
        delays.append(time.perf_counter() - due)
