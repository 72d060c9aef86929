"""Divides the prefill rows of a plan between principals, and between the prompts of each. Pure functions.

The rules are those of the `scheduler`.
"""

import math
from collections.abc import Callable, Mapping, Sequence

from dragoman.core.decaying_counter import DecayingCounter

REST_ROWS = 8
"""Rows of the other prompts in a plan that ends those of one principal."""
FIRST_SHARE = 0.75
"""Part of the budget for the principal with the fewest recent rows."""
RECENT_ROWS_SECONDS = 10.0
"""The weight of past rows halves in this time."""


class RecentUsage:
    """Prefill rows of each principal, of which older ones count less."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._rows = DecayingCounter(RECENT_ROWS_SECONDS, least=1, clock=clock)

    def order(self, owners: Sequence[str], missing: Mapping[str, int]) -> list[str]:
        """Return the distinct owners, the one with the fewest rows first, and of equals the one of the oldest job.
        `missing` are rows to come."""
        return sorted(dict.fromkeys(owners), key=lambda owner: self._rows.get(owner) + missing.get(owner, 0))

    def has_lighter(self, missing: Mapping[str, int]) -> bool:
        """Whether another principal had fewer rows than each of these with its rows to come; without any, whether there
        are several principals."""
        if not missing:
            return len(self._rows) > 1
        least = min(self._rows.get(owner) + rows for owner, rows in missing.items())
        return any(self._rows.get(principal) < least for principal in self._rows if principal not in missing)

    def record(self, owners: Sequence[str], rows: Sequence[int]) -> None:
        self._rows.add(zip(owners, rows, strict=True))


def share_between(order: Sequence[str], owners: Sequence[str], wants: Sequence[int], budget: int) -> list[int]:
    """Divide the budget between the owners in this order, then between the requests of each."""
    given = [0] * len(wants)
    parts = share_in_order(
        [sum(want for want, who in zip(wants, owners, strict=True) if who == owner) for owner in order], budget
    )
    for owner, part in zip(order, parts, strict=True):
        mine = [at for at, who in enumerate(owners) if who == owner]
        for at, rows in zip(mine, shortest_first([wants[at] for at in mine], part), strict=True):
            given[at] = rows
    return given


def share_in_order(wants: Sequence[int], budget: int) -> list[int]:
    """Give each FIRST_SHARE of what is left, the last one all of it, and what remains to the first that want more."""
    given, left = [], budget
    for at, want in enumerate(wants):
        is_last = at == len(wants) - 1
        given.append(min(want, left if is_last else math.ceil(left * FIRST_SHARE)))
        left -= given[-1]
    return _give_rest(given, wants, range(len(wants)), left)


def cap_beside_finished(owners: Sequence[str], wants: Sequence[int], given: list[int]) -> list[int]:
    """If one owner gets all that it wants and another does not, leave the other REST_ROWS."""
    unfinished = {owner for owner, want, got in zip(owners, wants, given, strict=True) if got < want}
    if not unfinished or unfinished.issuperset(owners):
        return given
    left = dict.fromkeys(unfinished, REST_ROWS)
    capped = []
    for owner, got in zip(owners, given, strict=True):
        if owner in left:
            got = min(got, left[owner])
            left[owner] -= got
        capped.append(got)
    return capped


def shortest_first(wants: Sequence[int], budget: int) -> list[int]:
    """Give half of the budget to the first, and the rest to the smallest requests first."""
    given = [min(want, (budget + 1) // 2) if at == 0 else 0 for at, want in enumerate(wants)]
    order = sorted(range(len(wants)), key=lambda at: wants[at] - given[at])
    return _give_rest(given, wants, order, budget - sum(given))


def _give_rest(given: list[int], wants: Sequence[int], order: Sequence[int], left: int) -> list[int]:
    """Give each in this order what it still wants, as far as the rest of the budget goes."""
    for at in order:
        more = min(wants[at] - given[at], left)
        given[at] += more
        left -= more
    return given
