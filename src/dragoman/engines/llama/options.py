"""The configuration of a llama model: its options, what is wrong with them, and the sizes that they leave open.

A token of the KV cache takes a key and a value in every layer, for every KV head. `kv` is their type: f16, or q8_0,
which takes eight bits per number and a 16-bit scale for every 32 numbers.
"""

import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from dragoman.core.errors import ConfigError
from dragoman.core.types import Count
from dragoman.engines.llama import hardware
from dragoman.engines.llama.library import MAX_SEQUENCES, Kv
from dragoman.files.gguf import Value, read_metadata, read_outline

if TYPE_CHECKING:
    from dragoman.engines.llama.binding import LlamaModel

log = logging.getLogger("dragoman.engine")

MAX_THREADS = 512
"""llama.cpp aborts the process with more."""
MAX_CONTEXT = 20_000_000
MAX_BATCH = 65_536
AUTO_LAYOUT_WARNING = "auto has no effect: run `dragoman tune {}` to find the fastest layout for this machine"

DEFAULT_MEMORY_SHARE = 0.25
"""Share of the memory for KV caches whose size is not configured."""
MIN_DEFAULT_CONTEXT = 4096
KV_BLOCKS = {"f16": (2, 1), "q8_0": (34, 32)}
"""Bytes of a block, and how many numbers it holds."""


class AdapterOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: str
    scale: float = 1.0
    """Factor for the adapter's changes to the weights."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale):
            raise ValueError("scale: expected a finite number")

    @property
    def file(self) -> Path:
        return Path(self.path).expanduser()


class LlamaOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: str
    format: str | None = None
    """Syntax of the model's thinking and tool calls. None: detected from the chat template."""
    template_options: tuple[str, ...] = ()
    """Variables of the chat template that clients may set."""
    context: Annotated[int, msgspec.Meta(ge=1, le=MAX_CONTEXT)] | None = None
    """Tokens of prompt and reply together. None: the trained length, or less if the memory is small."""
    slots: Annotated[int, msgspec.Meta(ge=1, le=MAX_SEQUENCES)] = 4
    threads: Annotated[int, msgspec.Meta(ge=1, le=MAX_THREADS)] | None = None
    """Compute threads. None: what `dragoman tune` recorded, else one for each physical core."""
    batch: Annotated[int, msgspec.Meta(ge=1, le=MAX_BATCH)] = 512
    """Maximum number of prompt tokens in one step."""
    cache_sequences: Annotated[int, msgspec.Meta(ge=0, le=MAX_SEQUENCES)] | None = None
    """Sequences that cache prefixes beside those in the slots. None: as many as slots, or fewer if the memory is
    small."""
    isolate: bool = False
    """Share prefixes only between requests of one principal, so that response times reveal nothing about the prompts
    of others."""
    flash_attention: bool = True
    """Faster for short texts, slower for long ones. Without it, log probabilities of f16 weights depend much less on
    the requests that are decoded in the same step."""
    kv: Kv = "f16"
    """Type of the KV cache. q8_0 takes little more than half of the memory."""
    adapters: Mapping[str, str | AdapterOptions] = {}
    """LoRA adapters by the name of the resulting model: a path, or a path and a scale."""
    speculation: bool = True
    """Decode several tokens in one step if they are likely to repeat earlier text."""
    gap_ms: Count = 150
    """Target time between two tokens of a reply while prompts are being processed. Steps may take nearly twice as long
    if that makes long prompts much faster."""
    layout: Literal["auto", "as-is"] | None = None
    """`as-is` ignores what `dragoman tune` recorded. `auto` is the same as None, with a warning."""

    def __post_init__(self) -> None:
        if self.kv != "f16" and not self.flash_attention:
            raise ValueError(f"kv: {self.kv} needs flash attention: remove flash_attention: false")
        if self.slots + (self.cache_sequences or 0) > MAX_SEQUENCES:
            raise ValueError(
                f"cache_sequences: {self.cache_sequences} and {self.slots} slots are more than {MAX_SEQUENCES}, "
                "the maximum of llama.cpp: lower one of them"
            )

    @property
    def file(self) -> Path:
        return Path(self.path).expanduser()

    @property
    def adapter_options(self) -> Mapping[str, AdapterOptions]:
        return {
            name: AdapterOptions(entry) if isinstance(entry, str) else entry for name, entry in self.adapters.items()
        }


def find_mistakes(options: LlamaOptions) -> Iterator[tuple[str, str]]:
    """Yield a key and a message for each adapter file that does not fit the model. Missing files are skipped."""
    try:
        architecture = read_metadata(options.file).get("general.architecture")
    except ConfigError:
        architecture = None
    for name, adapter in options.adapter_options.items():
        message = _find_adapter_problem(adapter.file, architecture) if adapter.file.is_file() else None
        if message is not None:
            yield f"adapters.{name}", message


def _find_adapter_problem(file: Path, architecture: Value | None) -> str | None:
    try:
        metadata = read_outline(file).metadata
    except ConfigError as error:
        return str(error)
    own = metadata.get("general.architecture")
    if metadata.get("general.type") != "adapter" or metadata.get("adapter.type") != "lora":
        return f"{file} is not a LoRA adapter; create one with llama.cpp's convert_lora_to_gguf.py"
    if architecture is not None and own != architecture:
        return f"{file} is for models of architecture {own}, but this model is {architecture}"
    return None


def find_warnings(options: LlamaOptions) -> Iterator[tuple[str, str]]:
    """Yield the key and the text of a warning for each valid but probably unintended option."""
    if options.threads is not None and options.threads > (cpus := hardware.cpus()):
        yield "threads", f"{options.threads} threads on {cpus} CPUs are slower than {cpus}"
    if options.layout == "auto":
        yield "layout", AUTO_LAYOUT_WARNING.format(options.path)
    try:
        metadata = read_metadata(options.file)
    except ConfigError:
        return
    architecture = metadata.get("general.architecture")
    trained = metadata.get(f"{architecture}.context_length")
    is_embedding_model = metadata.get(f"{architecture}.attention.causal") is False
    if isinstance(trained, int) and options.context is not None and options.context > trained:
        beyond = "longer inputs are refused" if is_embedding_model else "its output beyond them is of poor quality"
        yield "context", f"this model was trained for {trained} tokens; {beyond}"
    needed, memory = expected_kv_bytes(metadata, options), hardware.memory()
    if needed > memory and not is_embedding_model:
        key = "slots" if options.context is None else "context"
        message = f"the slots need {needed / 1e9:.0f} GB of memory, but the machine has {memory / 1e9:.0f} GB"
        yield key, f"{message}: lower context or slots"


class ContextSize(msgspec.Struct, frozen=True):
    """`slots` and `cached` sequences of `length` tokens each."""

    length: int
    slots: int
    cached: int

    @property
    def sequences(self) -> int:
        return self.slots + self.cached


def fit_context(model: "LlamaModel", options: LlamaOptions) -> ContextSize:
    """Choose the sizes that the options leave open. Raises `ConfigError` if the memory is too small."""
    c, handle = model.library, model.handle
    counts = (c.llama_model_n_layer, c.llama_model_n_head, c.llama_model_n_head_kv, c.llama_model_n_embd)
    token_bytes = max(_kv_bytes_per_token(model.metadata, options, *(int(count(handle)) for count in counts)), 1)
    cached = 0 if model.is_recurrent else options.cache_sequences
    size = _choose_size(options, cached, model.trained_context, token_bytes)
    if options.context is None and size.length < model.trained_context:
        log.warning(
            "the memory is too small for %d slots of %d tokens: each gets %d; set context or slots to choose yourself",
            *(size.slots, model.trained_context, size.length),
        )
    needed, memory = size.sequences * size.length * token_bytes, hardware.memory()
    if needed > memory and not model.is_recurrent:
        # The system would kill the process.
        cached_too = f" and {size.cached} cache_sequences" if size.cached else ""
        each = ", for the model and each adapter," if options.adapters else ""
        raise ConfigError(
            f"llama: {size.slots} slots{cached_too} of {size.length} tokens{each} need {needed / 1e9:.0f} GB of "
            f"memory, but the machine has {memory / 1e9:.0f} GB: "
            f"lower context or slots{' or cache_sequences' if size.cached else ''}"
        )
    return size


def expected_kv_bytes(metadata: Mapping[str, Value], options: LlamaOptions) -> int:
    """Estimate the memory for the KV caches from the file's metadata. 0 if the metadata is incomplete."""
    keys = ("block_count", "attention.head_count", "attention.head_count_kv", "embedding_length")
    layers, heads, kv_heads, width = (_read_number(metadata, key) for key in keys)
    token_bytes = _kv_bytes_per_token(metadata, options, layers, heads, kv_heads or heads, width)
    if not token_bytes:
        return 0
    size = _choose_size(options, options.cache_sequences, _read_number(metadata, "context_length"), token_bytes)
    return token_bytes * size.length * size.sequences


def _kv_bytes_per_token(
    metadata: Mapping[str, Value], options: LlamaOptions, layers: int, heads: int, kv_heads: int, width: int
) -> int:
    """Return the bytes of a token in the KV caches of the model and its adapters. `width` is that of an embedding."""
    # The file may set widths of a head's key and value that differ from the default.
    keys = ("attention.key_length", "attention.value_length")
    key_width, value_width = (_read_number(metadata, key) or width // max(heads, 1) for key in keys)
    block_bytes, block_size = KV_BLOCKS[options.kv]
    return (1 + len(options.adapters)) * (layers * kv_heads * (key_width + value_width) * block_bytes // block_size)


def _read_number(metadata: Mapping[str, Value], key: str) -> int:
    """Return 0 if there is no such number."""
    value = metadata.get(f"{metadata.get('general.architecture')}.{key}", 0)
    if isinstance(value, str):
        return int(value) if value.isdecimal() else 0
    return int(value) if isinstance(value, int | float) else 0


def _choose_size(options: LlamaOptions, cached: int | None, trained: int, token_bytes: int) -> ContextSize:
    tokens = hardware.memory() * DEFAULT_MEMORY_SHARE / token_bytes
    slots = options.slots
    length = options.context or max(trained, 1)
    while options.context is None and length > max(tokens / slots, MIN_DEFAULT_CONTEXT):
        length //= 2
    if cached is None:
        cached = int(max(min(slots, tokens / length - slots, MAX_SEQUENCES - slots), 0))
    return ContextSize(length, slots, cached)
