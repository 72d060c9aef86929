"""How much memory the state of texts takes, and how much of it there is.

A token in a sequence has a key and a value in every layer. `kv` says how exactly they are kept: f16, or q8_0, which is
eight bits each and a half float for every 32 of them.
"""

import logging
import math
import os
from pathlib import Path
from typing import Literal

import msgspec

from dragoman.engines.llama.binding import MAX_SEQUENCES, Model
from dragoman.errors import ConfigError

log = logging.getLogger("dragoman.engine")

Kv = Literal["f16", "q8_0"]

DEFAULT_MEMORY_SHARE = 0.25
"""How much of the machine's memory the slots may take where the configuration does not say their size."""
LEAST_DEFAULT_CONTEXT = 4096
MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""A container's limit, which is often far below the machine's memory."""


class Room(msgspec.Struct, frozen=True):
    """`sequences` of `length` tokens each: the slots, and those in which beginnings are kept."""

    length: int
    slots: int
    cached: int

    @property
    def sequences(self) -> int:
        return self.slots + self.cached


def room(model: Model, slots: int, length: int | None, cached: int | None, kv: Kv, *, times: int = 1) -> Room:
    """What a configuration leaves open is chosen by the memory there is; more than there is is refused. `times` is how
    often the same is needed."""
    token_bytes = times * model.state_bytes(kv)
    length = length or _default_length(model, slots, token_bytes)
    if model.forgets:
        return Room(length, slots, 0)
    if cached is None:
        cached = _default_cached(slots, length * token_bytes)
    elif slots + cached > MAX_SEQUENCES:
        raise ConfigError(f"llama: slots and cache_sequences together must be at most {MAX_SEQUENCES}")
    found = Room(length, slots, cached)
    _check(found, found.sequences * length * token_bytes, times)
    return found


def _check(room: Room, needed: int, times: int) -> None:
    """llama.cpp would try, and the system would kill the process."""
    if needed <= memory():
        return
    kept = f" and {room.cached} cache_sequences" if room.cached else ""
    each = "" if times == 1 else ", for the model and each adapter,"
    raise ConfigError(
        f"llama: {room.slots} slots{kept} of {room.length} tokens{each} need {needed / 1e9:.0f} GB of memory, "
        f"there are {memory() / 1e9:.0f}: lower context or slots{' or cache_sequences' if room.cached else ''}"
    )


def _default_cached(slots: int, sequence_bytes: int) -> int:
    """No more than there is room for in the share of the memory that is meant for state."""
    fitting = memory() * DEFAULT_MEMORY_SHARE / sequence_bytes - slots
    return int(max(min(slots, fitting, MAX_SEQUENCES - slots), 0))


def _default_length(model: Model, slots: int, token_bytes: int) -> int:
    length = model.trained_context
    fitting = memory() * DEFAULT_MEMORY_SHARE / (slots * token_bytes)
    while length > max(fitting, LEAST_DEFAULT_CONTEXT):
        length //= 2
    if length < model.trained_context:
        log.warning(
            "the memory is too small for %d slots of %d tokens: each has %d; set context or slots to choose yourself",
            *(slots, model.trained_context, length),
        )
    return length


def memory() -> float:
    """Bytes of memory that the process may have; infinite where the system does not say."""
    try:
        machine: float = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        machine = math.inf
    return min(machine, _container_limit())


def _container_limit() -> float:
    try:
        return int(MEMORY_LIMIT.read_text())
    except (OSError, ValueError):
        # No control groups of version 2 here, or "max".
        return math.inf
