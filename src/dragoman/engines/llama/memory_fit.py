"""Fits the KV caches of a model into the machine's memory, and warns about options that do not fit the machine.

A token takes a key and a value in every layer, for every KV head. `kv` is their type: f16, or q8_0, which takes eight
bits per number and a 16-bit scale for every 32 numbers.
"""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from dragoman.core.errors import ConfigError
from dragoman.engines.llama import hardware
from dragoman.engines.llama.binding import MAX_SEQUENCES, Kv, LlamaModel
from dragoman.engines.llama.options import AUTO_LAYOUT_WARNING, LlamaOptions
from dragoman.files.gguf import Value, read_metadata

log = logging.getLogger("dragoman.engine")

DEFAULT_MEMORY_SHARE = 0.25
"""Share of the memory for KV caches whose size is not configured."""
MIN_DEFAULT_CONTEXT = 4096
KV_BLOCKS = {"f16": (2, 1), "q8_0": (34, 32)}
"""Bytes of a block, and how many numbers it holds."""


class KvShape(msgspec.Struct, frozen=True):
    layers: int
    heads: int
    kv_heads: int
    width: int
    """Embedding width of the model."""
    key_width: int = 0
    """Widths of a head's key and value. 0: the embedding width divided by the number of heads."""
    value_width: int = 0

    def token_bytes(self, kv: Kv) -> int:
        head_width = self.width // max(self.heads, 1)
        widths = (self.key_width or head_width) + (self.value_width or head_width)
        block_bytes, block_size = KV_BLOCKS[kv]
        return self.layers * self.kv_heads * widths * block_bytes // block_size


class ContextSize(msgspec.Struct, frozen=True):
    """`slots` and `cached` sequences of `length` tokens each."""

    length: int
    slots: int
    cached: int

    @property
    def sequences(self) -> int:
        return self.slots + self.cached


def fit_context(model: LlamaModel, options: LlamaOptions) -> ContextSize:
    """Choose the sizes that the options leave open. Raises `ConfigError` if the memory is too small."""
    contexts = 1 + len(options.adapters)
    token_bytes = contexts * kv_bytes_per_token(model, options.kv)
    cached = 0 if model.is_recurrent else options.cache_sequences
    size = _choose_size(model.trained_context, token_bytes, options.slots, options.context, cached)
    if options.context is None and size.length < model.trained_context:
        log.warning(
            "the memory is too small for %d slots of %d tokens: each gets %d; set context or slots to choose yourself",
            *(size.slots, model.trained_context, size.length),
        )
    if not model.is_recurrent:
        _check_memory(size, size.sequences * size.length * token_bytes, contexts)
    return size


def kv_bytes_per_token(model: LlamaModel, kv: Kv) -> int:
    return max(KvShape(*model.attention_shape).token_bytes(kv), 1)


def expected_bytes(metadata: Mapping[str, Value], options: LlamaOptions) -> int:
    """Estimate the memory for the KV caches from the file's metadata. 0 if the metadata is incomplete."""

    def number(key: str) -> int:
        value = metadata.get(f"{metadata.get('general.architecture')}.{key}", 0)
        return int(value) if isinstance(value, int | float) else 0

    heads = number("attention.head_count")
    widths = number("attention.key_length"), number("attention.value_length")
    kv_heads = number("attention.head_count_kv") or heads
    shape = KvShape(number("block_count"), heads, kv_heads, number("embedding_length"), *widths)
    token_bytes = (1 + len(options.adapters)) * shape.token_bytes(options.kv)
    if not token_bytes:
        return 0
    trained = number("context_length")
    size = _choose_size(trained, token_bytes, options.slots, options.context, options.cache_sequences)
    return token_bytes * size.length * size.sequences


def option_warnings(options: LlamaOptions) -> Iterator[tuple[str, str]]:
    """Yield the key and the text of a warning for each valid but probably unintended option."""
    if options.threads is not None and options.threads > (cpus := hardware.cpus()):
        yield "threads", f"{options.threads} threads on {cpus} CPUs are slower than {cpus}"
    if options.layout == "auto":
        yield "layout", AUTO_LAYOUT_WARNING.format(options.path)
    try:
        metadata = read_metadata(Path(options.path).expanduser())
    except ConfigError:
        return
    architecture = metadata.get("general.architecture")
    trained = metadata.get(f"{architecture}.context_length")
    is_embedding_model = metadata.get(f"{architecture}.attention.causal") is False
    if isinstance(trained, int) and options.context is not None and options.context > trained:
        beyond = "longer inputs are refused" if is_embedding_model else "its output beyond them is of poor quality"
        yield "context", f"this model was trained for {trained} tokens; {beyond}"
    if is_embedding_model:
        return
    needed, memory = expected_bytes(metadata, options), hardware.memory()
    if needed > memory:
        key = "slots" if options.context is None else "context"
        message = f"the slots need {needed / 1e9:.0f} GB of memory, but the machine has {memory / 1e9:.0f} GB"
        yield key, f"{message}: lower context or slots"


def _choose_size(trained: int, token_bytes: int, slots: int, length: int | None, cached: int | None) -> ContextSize:
    length = length or _default_length(trained, slots, token_bytes)
    return ContextSize(length, slots, _default_cached(slots, length * token_bytes) if cached is None else cached)


def _check_memory(size: ContextSize, needed: int, contexts: int) -> None:
    """Refuse to load a model for which the system would kill the process."""
    if needed <= hardware.memory():
        return
    cached = f" and {size.cached} cache_sequences" if size.cached else ""
    each = "" if contexts == 1 else ", for the model and each adapter,"
    raise ConfigError(
        f"llama: {size.slots} slots{cached} of {size.length} tokens{each} need {needed / 1e9:.0f} GB of memory, "
        f"but the machine has {hardware.memory() / 1e9:.0f} GB: "
        f"lower context or slots{' or cache_sequences' if size.cached else ''}"
    )


def _default_cached(slots: int, sequence_bytes: int) -> int:
    fitting = hardware.memory() * DEFAULT_MEMORY_SHARE / sequence_bytes - slots
    return int(max(min(slots, fitting, MAX_SEQUENCES - slots), 0))


def _default_length(trained: int, slots: int, token_bytes: int) -> int:
    length = trained
    fitting = hardware.memory() * DEFAULT_MEMORY_SHARE / (slots * token_bytes)
    while length > max(fitting, MIN_DEFAULT_CONTEXT):
        length //= 2
    return length
