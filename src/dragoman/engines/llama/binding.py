"""Typed Python classes over llama.cpp: models, adapters and contexts.

Only this module and `library` use ctypes.

Rules
1. Python keeps a reference to everything that C holds a pointer to, such as the arrays of a batch.
2. A `LlamaModel` may be used from any thread; a `Context` only from the thread that decodes.
"""

import ctypes
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dragoman.core.errors import ConfigError, EngineFailed
from dragoman.engines.llama.library import FLASH_ATTENTION_OFF, Batch, ProgressCallback, library, log

MAX_SEQUENCES = 256
"""llama.cpp's limit on the sequences of a context."""
TOKENIZER_PART = 4096
"""Characters that are tokenized at once."""

ABORTED = 2
"""Result of `decode` after `abort`."""

Logits = NDArray[np.float32]
Vectors = NDArray[np.float32]

Kv = Literal["f16", "q8_0"]
KV_TYPES = {"f16": 1, "q8_0": 8}
"""ggml's type numbers."""

POOLING = {"1": "mean", "2": "first", "3": "last"}
"""Values of the metadata key `pooling_type`. Chat models lack the key."""
NO_POOLING, RANK_POOLING = 0, "4"

ATTRIBUTE_UNKNOWN, ATTRIBUTE_CONTROL = 1, 8
NO_TOKEN = -1


class LlamaModel:
    """A loaded model file with its vocabulary and metadata."""

    def __init__(self, path: Path, progress: Callable[[float], None] | None = None) -> None:
        self.library = c = library()
        params = c.llama_model_default_params()
        # The variable keeps the callback alive while C may call it. It returns True to continue loading.
        callback = ProgressCallback(lambda share, _: progress is None or progress(share) is None)
        params.progress_callback = ctypes.cast(callback, ctypes.c_void_p)
        log.errors.clear()
        self.handle = c.llama_model_load_from_file(str(path).encode(), params)
        if not self.handle:
            raise ConfigError(f"llama: cannot load {path}: {log.reason()}")
        self.vocab = vocab = c.llama_model_get_vocab(self.handle)
        self.vocab_size: int = c.llama_vocab_n_tokens(vocab)
        self.bos: int = c.llama_vocab_bos(vocab)
        self.eos: int = c.llama_vocab_eos(vocab)
        self.add_bos: bool = c.llama_vocab_get_add_bos(vocab)
        self.trained_context: int = c.llama_model_n_ctx_train(self.handle)
        self.metadata = self._read_metadata()
        self.infill = self._infill_tokens()
        self.suppressed = self._suppressed_tokens()
        self.hidden = frozenset(
            token
            for token in range(self.vocab_size)
            if c.llama_vocab_get_attr(vocab, token) & (ATTRIBUTE_CONTROL | ATTRIBUTE_UNKNOWN)
        )
        self.ends = frozenset(token for token in range(self.vocab_size) if c.llama_vocab_is_eog(vocab, token))
        self.shown: frozenset[int] = frozenset()
        self.pieces = tuple(self._token_piece(token) for token in range(self.vocab_size))
        self.longest_piece = max(map(len, self.pieces))

    @property
    def description(self) -> str:
        buffer = ctypes.create_string_buffer(256)
        self.library.llama_model_desc(self.handle, buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace")

    @property
    def chat_template(self) -> str | None:
        template: bytes | None = self.library.llama_model_chat_template(self.handle, None)
        return None if template is None else template.decode("utf-8", "replace")

    @property
    def control(self) -> tuple[str, ...]:
        """Names of the tokens that message content must never produce."""
        return tuple(self.name(token) for token in sorted(self.hidden))

    @property
    def is_decoder(self) -> bool:
        """Whether the model generates text token by token."""
        c, handle = self.library, self.handle
        return bool(
            c.llama_model_has_decoder(handle)
            and not c.llama_model_has_encoder(handle)
            and not c.llama_model_is_diffusion(handle)
        )

    @property
    def architecture(self) -> str:
        return self.metadata.get("general.architecture", "")

    @property
    def is_bidirectional(self) -> bool:
        """Whether tokens attend to later tokens, so that a text must be decoded in one batch."""
        return self.metadata.get(f"{self.architecture}.attention.causal") == "false"

    @property
    def pooling(self) -> str:
        """How the token vectors become the vector of a text: mean, first or last."""
        return POOLING.get(self.metadata.get(f"{self.architecture}.pooling_type", ""), "mean")

    @property
    def is_reranker(self) -> bool:
        return self.metadata.get(f"{self.architecture}.pooling_type") == RANK_POOLING

    @property
    def is_recurrent(self) -> bool:
        """Whether the model has a running state, from which the last tokens cannot be removed."""
        c, handle = self.library, self.handle
        return bool(c.llama_model_is_recurrent(handle) or c.llama_model_is_hybrid(handle))

    @property
    def attention_shape(self) -> tuple[int, ...]:
        """Layers, heads, KV heads, and the widths of embeddings, keys and values. The last two are 0 if unknown."""
        c, handle = self.library, self.handle
        counts = (c.llama_model_n_layer, c.llama_model_n_head, c.llama_model_n_head_kv, c.llama_model_n_embd)
        widths = (self.metadata.get(f"{self.architecture}.attention.{name}_length", "") for name in ("key", "value"))
        known_widths = (int(width) if width.isdecimal() else 0 for width in widths)
        return *(int(count(handle)) for count in counts), *known_widths

    def name(self, token: int) -> str:
        return "" if token == NO_TOKEN else self.pieces[token].decode("utf-8", "replace")

    def text(self, token: int) -> bytes:
        """Return a token's visible text. It is empty for control tokens, except those passed to `show`."""
        return b"" if token in self.hidden and token not in self.shown else self.pieces[token]

    def show(self, markers: Collection[str]) -> None:
        """Make the control tokens with these names visible, except those that end a text."""
        self.shown = frozenset(self.control_ids(markers).values()) - self.ends

    def control_ids(self, names: Collection[str]) -> dict[str, int]:
        return {name: token for token in sorted(self.hidden) if (name := self.name(token)) in names}

    def tokenize(self, text: str, special: bool) -> list[int]:
        """Tokenize long text in parts, because llama.cpp takes quadratic time in the number of control tokens.

        Each part begins at a control token, so the result is the same as for the whole text.
        """
        if not special or len(text) <= TOKENIZER_PART:
            return self._tokenize(text, special)
        tokens: list[int] = []
        start = 0
        for match in self._control_texts.finditer(text):
            if match.start() - start >= TOKENIZER_PART:
                tokens += self._tokenize(text[start : match.start()], special)
                start = match.start()
        return tokens + self._tokenize(text[start:], special)

    def tokenize_whole(self, text: str) -> list[int]:
        """Tokenize plain content and add the vocabulary's begin and end tokens."""
        return self._tokenize(text, special=False, add_special=True)

    @cached_property
    def _control_texts(self) -> re.Pattern[str]:
        longest_first = sorted(self.control, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def _tokenize(self, text: str, special: bool, add_special: bool = False) -> list[int]:
        data = text.encode("utf-8", "replace")
        size = len(data) + 16
        while True:
            ids = np.empty(size, dtype=np.int32)
            result = ids.ctypes.data
            count = self.library.llama_tokenize(self.vocab, data, len(data), result, size, add_special, special)
            if count >= 0:
                return [int(token) for token in ids[:count]]
            size = -count

    def detokenize(self, tokens: Sequence[int]) -> str:
        ids = np.array(tokens, dtype=np.int32)
        detokenize = partial(self.library.llama_detokenize, self.vocab, ids.ctypes.data, len(ids))
        size = sum(len(self.pieces[token]) for token in tokens) + 16
        return _read_buffer(lambda *buffer: detokenize(*buffer, False, True), size).decode("utf-8", "replace")

    def close(self) -> None:
        if self.handle:
            self.library.llama_model_free(self.handle)
            self.handle = None

    def _token_piece(self, token: int) -> bytes:
        read = partial(self.library.llama_token_to_piece, self.vocab, token)
        return _read_buffer(lambda *buffer: read(*buffer, 0, True), 64)

    def _infill_tokens(self) -> tuple[int, int, int] | None:
        """Return the tokens before the prefix, before the suffix and before the text to insert."""
        c, vocab = self.library, self.vocab
        tokens = (c.llama_vocab_fim_pre(vocab), c.llama_vocab_fim_suf(vocab), c.llama_vocab_fim_mid(vocab))
        return None if NO_TOKEN in tokens else tokens

    def _suppressed_tokens(self) -> tuple[int, ...]:
        """Return the tokens that must never be sampled, according to the model file."""
        count = ctypes.c_int32(0)
        tokens = self.library.llama_vocab_get_suppress_tokens(self.vocab, ctypes.byref(count))
        return tuple(tokens[: count.value]) if count.value > 0 else ()

    def _read_metadata(self) -> Mapping[str, str]:
        c = self.library
        read_key, read_value = c.llama_model_meta_key_by_index, c.llama_model_meta_val_str_by_index
        indices = range(c.llama_model_meta_count(self.handle))
        return {self._string(read_key, index): self._string(read_value, index) for index in indices}

    def _string(self, function: Callable[..., int], index: int) -> str:
        return _read_buffer(partial(function, self.handle, index), 256).decode("utf-8", "replace")


def _read_buffer(read: Callable[..., int], size: int) -> bytes:
    """Call a C function that fills a buffer. If the buffer is too small, it returns the length, perhaps negated."""
    while True:
        buffer = ctypes.create_string_buffer(size)
        count = read(buffer, size)
        if 0 <= count < size:
            return buffer.raw[:count]
        size = abs(count) + 1


class Adapter:
    """A LoRA adapter from a file. It is freed with the model."""

    def __init__(self, model: LlamaModel, path: Path) -> None:
        c = model.library
        log.errors.clear()
        self.handle = c.llama_adapter_lora_init(model.handle, str(path).encode())
        if not self.handle:
            raise ConfigError(f"llama: {path} is not an adapter for this model: {log.reason()}")
        if c.llama_adapter_get_alora_n_invocation_tokens(self.handle):
            raise ConfigError(f"llama: {path} is an activated LoRA (aLoRA), which is not supported")


class Context:
    """A decoder and its memory for `sequences` independent sequences of up to `length` tokens.

    With `vectors`, rows have embedding vectors instead of logits, and all sequences together have `length` tokens. Some
    embedding models have no memory.
    """

    def __init__(
        self,
        model: LlamaModel,
        *,
        sequences: int,
        length: int,
        rows: int,
        outputs: int,
        threads: int,
        flash_attention: bool = True,
        kv: str = "f16",
        vectors: bool = False,
    ) -> None:
        """`rows` is the maximum batch size, `outputs` the maximum number of rows with logits."""
        # llama.cpp reserves one row per sequence and aborts the process if they do not fit.
        rows, outputs = max(rows, sequences), max(outputs, sequences)
        self.library = c = model.library
        self.vocab_size = model.vocab_size
        self.width: int = c.llama_model_n_embd_out(model.handle)
        params = c.llama_context_default_params()
        params.n_ctx, params.n_seq_max = length if vectors else length * sequences, sequences
        params.n_batch = params.n_ubatch = rows
        if not flash_attention:
            params.flash_attn_type = FLASH_ATTENTION_OFF
        params.type_k = params.type_v = KV_TYPES[kv]
        params.n_outputs_max, params.n_outputs_max_per_seq = min(outputs, rows), 0
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = params.embeddings = vectors
        if vectors:
            params.pooling_type = NO_POOLING
        params.no_perf = True
        log.errors.clear()
        self.handle = c.llama_init_from_model(model.handle, params)
        if not self.handle:
            raise ConfigError(
                f"llama: cannot allocate {sequences} sequences of {length} tokens ({log.reason()}): "
                f"lower context or slots or cache_sequences{'' if kv == 'f16' else ', or remove kv: ' + kv}"
            )
        self.memory = c.llama_get_memory(self.handle)
        if not self.memory and not vectors:
            self.close()
            raise ConfigError("llama: this model has no KV cache: it creates embeddings and cannot generate text")
        self.length: int = c.llama_n_ctx_seq(self.handle)
        self._allocate(rows)
        # llama.cpp polls this callback while it computes, when Python code cannot run. The C function atoi reads the
        # buffer: "1" aborts.
        self._abort = ctypes.create_string_buffer(b"0")
        callback = ctypes.cast(ctypes.CDLL(None).atoi, ctypes.c_void_p)
        c.llama_set_abort_callback(self.handle, callback, ctypes.addressof(self._abort))

    def _allocate(self, rows: int) -> None:
        self.rows = rows
        self.tokens = np.zeros(rows, dtype=np.int32)
        self.positions = np.zeros(rows, dtype=np.int32)
        self.sequences = np.zeros(rows, dtype=np.int32)
        self.outputs = np.zeros(rows, dtype=np.int8)
        self.ones = np.ones(rows, dtype=np.int32)
        addresses = self.sequences.ctypes.data + np.arange(rows, dtype=np.uintp) * self.sequences.itemsize
        self.sequence_pointers = addresses.astype(np.uintp)
        self.batch = Batch(
            token=self.tokens.ctypes.data,
            pos=self.positions.ctypes.data,
            n_seq_id=self.ones.ctypes.data,
            seq_id=self.sequence_pointers.ctypes.data,
            logits=self.outputs.ctypes.data,
        )

    def decode(
        self, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[int], outputs: Sequence[bool]
    ) -> int:
        """Decode one batch. Returns 0 for success, 1 if the memory is full, ABORTED, or another error code."""
        self._abort.value = b"0"
        rows = len(tokens)
        self.tokens[:rows] = tokens
        self.positions[:rows] = positions
        self.sequences[:rows] = sequences
        self.outputs[:rows] = outputs
        self.batch.n_tokens = rows
        run = self.library.llama_decode if self.memory else self.library.llama_encode
        code: int = run(self.handle, self.batch)
        return code

    def decode_or_fail(
        self, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[int], outputs: Sequence[bool]
    ) -> None:
        if code := self.decode(tokens, positions, sequences, outputs):
            raise EngineFailed(f"llama.cpp could not run the model (code {code})")

    def abort(self) -> None:
        """Abort the decode that runs in another thread. The affected sequences are then in an undefined state."""
        self._abort.value = b"1"

    def adapt(self, adapter: Adapter, scale: float) -> None:
        """Apply an adapter to all further decodes."""
        handles, scales = (ctypes.c_void_p * 1)(adapter.handle), (ctypes.c_float * 1)(scale)
        self.library.llama_set_adapters_lora(self.handle, handles, 1, scales)

    def vectors(self, rows: int) -> Vectors:
        """Return the vectors of the first rows of the last batch: a view, valid until the next decode."""
        address = self.library.llama_get_embeddings(self.handle)
        if not address:
            raise RuntimeError("the rows have no vectors")
        return np.ctypeslib.as_array((ctypes.c_float * (rows * self.width)).from_address(address)).reshape(rows, -1)

    def logits(self, row: int) -> Logits:
        """Return the logits of an output row: a writable view, valid until the next decode."""
        address = self.library.llama_get_logits_ith(self.handle, row)
        if not address:
            raise RuntimeError(f"row {row} has no logits")
        return np.ctypeslib.as_array((ctypes.c_float * self.vocab_size).from_address(address))

    def clear(self, sequence: int) -> None:
        if self.memory:
            self.library.llama_memory_seq_rm(self.memory, sequence, -1, -1)

    def clear_all(self) -> None:
        if self.memory:
            self.library.llama_memory_clear(self.memory, False)

    def trim(self, sequence: int, length: int) -> bool:
        """Remove the tokens after the first `length`. Returns False if the memory does not support that."""
        if length == 0:
            self.clear(sequence)
            return True
        return bool(self.library.llama_memory_seq_rm(self.memory, sequence, length, -1))

    def copy(self, source: int, target: int) -> None:
        # llama.cpp aborts the process if only a part of a sequence is copied.
        self.library.llama_memory_seq_cp(self.memory, source, target, -1, -1)

    def close(self) -> None:
        if self.handle:
            self.library.llama_free(self.handle)
            self.handle = None
