"""How many texts there is room for in the memory."""

import logging
from collections.abc import Mapping

import msgspec

from dragoman.core.errors import ConfigError
from dragoman.engines.llama import hardware
from dragoman.engines.llama.binding import MAX_SEQUENCES, Model
from dragoman.engines.llama.kv_size import Kv, Shape
from dragoman.files.gguf import Value

log = logging.getLogger("dragoman.engine")

DEFAULT_MEMORY_SHARE = 0.25
"""How much of the machine's memory the slots may take where the configuration does not say their size."""
LEAST_DEFAULT_CONTEXT = 4096


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
    found = fitted(model.trained_context, token_bytes, slots, length, 0 if model.forgets else cached)
    if length is None and found.length < model.trained_context:
        log.warning(
            "the memory is too small for %d slots of %d tokens: each has %d; set context or slots to choose yourself",
            *(slots, model.trained_context, found.length),
        )
    if model.forgets:
        return found
    _check(found, found.sequences * found.length * token_bytes, times)
    return found


def fitted(trained: int, token_bytes: int, slots: int, length: int | None, cached: int | None) -> Room:
    """For a model that was trained for so many tokens, each of which takes so much memory."""
    length = length or _default_length(trained, slots, token_bytes)
    return Room(length, slots, _default_cached(slots, length * token_bytes) if cached is None else cached)


def expected_bytes(
    metadata: Mapping[str, Value], slots: int, length: int | None, cached: int | None, kv: Kv, *, times: int = 1
) -> int:
    """What the room for a model will take, by what its file says of it; 0 where that is too little."""

    def number(key: str) -> int:
        value = metadata.get(f"{metadata.get('general.architecture')}.{key}", 0)
        return int(value) if isinstance(value, int | float) else 0

    heads = number("attention.head_count")
    widths = number("attention.key_length"), number("attention.value_length")
    groups = number("attention.head_count_kv") or heads
    shape = Shape(number("block_count"), heads, groups, number("embedding_length"), *widths)
    token_bytes = times * shape.token_bytes(kv)
    if not token_bytes:
        return 0
    found = fitted(number("context_length"), token_bytes, slots, length, cached)
    return token_bytes * found.length * found.sequences


def _check(room: Room, needed: int, times: int) -> None:
    """llama.cpp would try, and the system would kill the process."""
    if needed <= hardware.memory():
        return
    kept = f" and {room.cached} cache_sequences" if room.cached else ""
    each = "" if times == 1 else ", for the model and each adapter,"
    raise ConfigError(
        f"llama: {room.slots} slots{kept} of {room.length} tokens{each} need {needed / 1e9:.0f} GB of memory, "
        f"there are {hardware.memory() / 1e9:.0f}: lower context or slots{' or cache_sequences' if room.cached else ''}"
    )


def _default_cached(slots: int, sequence_bytes: int) -> int:
    """No more than there is room for in the share of the memory that is meant for state."""
    fitting = hardware.memory() * DEFAULT_MEMORY_SHARE / sequence_bytes - slots
    return int(max(min(slots, fitting, MAX_SEQUENCES - slots), 0))


def _default_length(trained: int, slots: int, token_bytes: int) -> int:
    length = trained
    fitting = hardware.memory() * DEFAULT_MEMORY_SHARE / (slots * token_bytes)
    while length > max(fitting, LEAST_DEFAULT_CONTEXT):
        length //= 2
    return length
