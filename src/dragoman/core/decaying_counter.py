"""Sums of recent amounts by name, of which older ones count less."""

from collections.abc import Callable, Iterable, Iterator


class DecayingCounter:
    """Amounts halve every `half_life` seconds. Sums below `least` are forgotten."""

    def __init__(self, half_life: float, least: float, clock: Callable[[], float]) -> None:
        self._half_life = half_life
        self._least = least
        self._clock = clock
        self._sums: dict[str, float] = {}
        self._time = clock()

    def add(self, amounts: Iterable[tuple[str, float]]) -> None:
        self._decay()
        for name, amount in amounts:
            self._sums[name] = self._sums.get(name, 0.0) + amount

    def get(self, name: str) -> float:
        """Return the sum at the time of the last `add` of any name."""
        return self._sums.get(name, 0.0)

    def get_now(self, name: str) -> float:
        self._decay()
        return self.get(name)

    def __len__(self) -> int:
        return len(self._sums)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sums)

    def _decay(self) -> None:
        now = self._clock()
        factor = 0.5 ** ((now - self._time) / self._half_life)
        self._time = now
        self._sums = {name: left for name, total in self._sums.items() if (left := total * factor) >= self._least}
