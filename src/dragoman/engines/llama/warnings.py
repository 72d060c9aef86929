"""What a model of llama can be configured to be, and is hardly meant to: as far as its file and this machine tell."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from dragoman.core.errors import ConfigError
from dragoman.engines.llama import hardware
from dragoman.engines.llama.memory_fit import expected_bytes
from dragoman.engines.llama.options import LlamaOptions
from dragoman.files.gguf import Value, read_metadata

Doubt = tuple[str, str]
"""A key, and the words."""


def doubts(options: LlamaOptions) -> Iterator[Doubt]:
    if options.threads is not None and options.threads > (cpus := hardware.cpus()):
        yield "threads", f"{options.threads} threads for {cpus} CPUs are slower than {cpus}"
    try:
        metadata = read_metadata(Path(options.path).expanduser())
    except ConfigError:
        # It is not here yet, or others say what is wrong with it.
        return
    yield from _of_context(options, metadata)


def _of_context(options: LlamaOptions, metadata: Mapping[str, Value]) -> Iterator[Doubt]:
    architecture = metadata.get("general.architecture")
    trained = metadata.get(f"{architecture}.context_length")
    looks_ahead = metadata.get(f"{architecture}.attention.causal") is False
    if isinstance(trained, int) and options.context is not None and options.context > trained:
        beyond = (
            "longer texts are refused all the same" if looks_ahead else "what it writes beyond them is of little use"
        )
        yield "context", f"this model was made for {trained} tokens; {beyond}"
    if looks_ahead:
        return
    room = options.slots, options.context, options.cache_sequences, options.kv
    needed, there = expected_bytes(metadata, *room, times=1 + len(options.adapters)), hardware.memory()
    if needed > there:
        key = "slots" if options.context is None else "context"
        words = f"so many tokens for each slot need {needed / 1e9:.0f} GB of memory, and there are {there / 1e9:.0f}"
        yield key, f"{words}: lower context or slots"
