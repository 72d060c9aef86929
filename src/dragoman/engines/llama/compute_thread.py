"""Runs all computation with one model in a single thread, one call at a time in the order of arrival.

Each computation uses all cores, so running two at once is no faster. One thread is required because OpenMP keeps a team
of helper threads for every thread that ever computed. With more helpers than cores they sleep at every barrier, which
costs a third of the speed on two cores.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

STOPPED = "the engine has been stopped"
P = ParamSpec("P")
T = TypeVar("T")


class ComputeThread:
    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dragoman-compute")

    def run(self, compute: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return self._thread.submit(compute, *args, **kwargs).result()

    def close(self) -> None:
        self._thread.shutdown()
