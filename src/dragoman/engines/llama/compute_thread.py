"""Those who compute with a model take turns, in the order in which they asked, in one thread that is theirs together.

One at a time, since each would use all cores. In one thread, because OpenMP keeps a team of helpers for each thread
that ever computed, and once there are more of them than cores it sends them to sleep at every barrier: on two cores
that costs a third of the speed.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

STOPPED = "the engine has been stopped"
"""What those hear whose turn does not come any more."""
P = ParamSpec("P")
T = TypeVar("T")


class Turns:
    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dragoman-compute")

    def run(self, compute: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return self._thread.submit(compute, *args, **kwargs).result()

    def close(self) -> None:
        self._thread.shutdown()
