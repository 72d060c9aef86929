"""Typed Python classes over llama.cpp: models and contexts.

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

import msgspec
import numpy as np
from numpy.typing import NDArray

from dragoman.core.errors import ConfigError, EngineFailed
from dragoman.engines.llama.library import FLASH_ATTENTION_OFF, KV_TYPES, Batch, Kv, ProgressCallback, library, log
from dragoman.files.gguf import check_model

TOKENIZER_PART = 4096
"""Characters that are tokenized at once."""

ABORTED = 2
"""Result of `decode` after `abort`."""

Logits = NDArray[np.float32]
Vectors = NDArray[np.float32]


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
        self.handle = handle = c.llama_model_load_from_file(str(path).encode(), params)
        if not handle:
            # It names the sizes of a file that is cut off.
            check_model(path)
            raise ConfigError(f"llama: cannot load {path}: {log.reason()}")
        self.metadata = _read_metadata(c, handle)
        self.architecture = self.metadata.get("general.architecture", "")
        template: bytes | None = c.llama_model_chat_template(handle, None)
        self.chat_template = None if template is None else template.decode("utf-8", "replace")
        self.trained_context: int = c.llama_model_n_ctx_train(handle)
        self.generates_text = bool(
            c.llama_model_has_decoder(handle)
            and not c.llama_model_has_encoder(handle)
            and not c.llama_model_is_diffusion(handle)
        )
        """Whether the model generates text token by token."""
        self.is_bidirectional = self.metadata.get(f"{self.architecture}.attention.causal") == "false"
        """Whether tokens attend to later tokens, so that a text must be decoded in one batch."""
        self.is_recurrent = bool(c.llama_model_is_recurrent(handle) or c.llama_model_is_hybrid(handle))
        """Whether the model has a running state, from which the last tokens cannot be removed."""
        pooling = self.metadata.get(f"{self.architecture}.pooling_type", "")
        self.pooling = POOLING.get(pooling, "mean")
        """How the token vectors become the vector of a text: mean, first or last."""
        self.is_reranker = pooling == RANK_POOLING
        self._read_vocabulary()

    def _read_vocabulary(self) -> None:
        c = self.library
        self.vocab = vocab = c.llama_model_get_vocab(self.handle)
        self.vocab_size: int = c.llama_vocab_n_tokens(vocab)
        self.bos: int = c.llama_vocab_bos(vocab)
        self.eos: int = c.llama_vocab_eos(vocab)
        self.add_bos: bool = c.llama_vocab_get_add_bos(vocab)
        infill = (c.llama_vocab_fim_pre(vocab), c.llama_vocab_fim_suf(vocab), c.llama_vocab_fim_mid(vocab))
        self.infill: tuple[int, int, int] | None = None if NO_TOKEN in infill else infill
        """The tokens before the prefix, before the suffix and before the text to insert."""
        count = ctypes.c_int32(0)
        suppressed = c.llama_vocab_get_suppress_tokens(vocab, ctypes.byref(count))
        self.suppressed: tuple[int, ...] = tuple(suppressed[: count.value]) if count.value > 0 else ()
        """Tokens that must never be sampled, according to the model file."""
        tokens = range(self.vocab_size)
        hidden = ATTRIBUTE_CONTROL | ATTRIBUTE_UNKNOWN
        self.hidden = frozenset(token for token in tokens if c.llama_vocab_get_attr(vocab, token) & hidden)
        self.shown: frozenset[int] = frozenset()
        self.ends = frozenset(token for token in tokens if c.llama_vocab_is_eog(vocab, token))
        self.pieces = tuple(_read_piece(c, vocab, token) for token in tokens)
        self.longest_piece = max(map(len, self.pieces))
        self.control = tuple(self.name(token) for token in sorted(self.hidden))
        """Names of the tokens that message content must never produce."""

    @property
    def description(self) -> str:
        return _read_string(partial(self.library.llama_model_desc, self.handle))

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

    def tokenize_text(self, text: str, special: bool = False) -> list[int]:
        """Tokenize a text and add the vocabulary's begin and end tokens."""
        if not special:
            return self._tokenize(text, special=False, add_special=True)
        frame = self._tokenize("", special=False, add_special=True)
        begin = 0 if len(frame) == 1 and frame[0] != self.bos else 1
        return [*frame[:begin], *self.tokenize(text, special=True), *frame[begin:]]

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

    def load_adapter(self, path: Path) -> int:
        """Return a handle of the LoRA adapter, which is freed with the model."""
        log.errors.clear()
        adapter: int | None = self.library.llama_adapter_lora_init(self.handle, str(path).encode())
        if not adapter:
            raise ConfigError(f"llama: {path} is not an adapter for this model: {log.reason()}")
        if self.library.llama_adapter_get_alora_n_invocation_tokens(adapter):
            raise ConfigError(f"llama: {path} is an activated LoRA (aLoRA), which is not supported")
        return adapter

    def close(self) -> None:
        if self.handle:
            self.library.llama_model_free(self.handle)
            self.handle = None


def _read_metadata(c: ctypes.CDLL, handle: int) -> Mapping[str, str]:
    read_key, read_value = c.llama_model_meta_key_by_index, c.llama_model_meta_val_str_by_index
    indices = range(c.llama_model_meta_count(handle))
    return {
        _read_string(partial(read_key, handle, index)): _read_string(partial(read_value, handle, index))
        for index in indices
    }


def _read_piece(c: ctypes.CDLL, vocab: int, token: int) -> bytes:
    return _read_buffer(lambda *buffer: c.llama_token_to_piece(vocab, token, *buffer, 0, True), 64)


def _read_string(read: Callable[..., int]) -> str:
    return _read_buffer(read, 256).decode("utf-8", "replace")


def _read_buffer(read: Callable[..., int], size: int) -> bytes:
    """Call a C function that fills a buffer. If the buffer is too small, it returns the length, perhaps negated."""
    while True:
        buffer = ctypes.create_string_buffer(size)
        count = read(buffer, size)
        if 0 <= count < size:
            return buffer.raw[:count]
        size = abs(count) + 1


class ContextParams(msgspec.Struct, frozen=True, kw_only=True):
    """Memory for `sequences` independent sequences of up to `length` tokens.

    `rows` is the maximum batch size, `outputs` the maximum number of rows with logits. With `vectors`, rows have
    embedding vectors instead of logits, and all sequences together have `length` tokens.
    """

    sequences: int
    length: int
    rows: int
    outputs: int
    threads: int
    flash_attention: bool = True
    kv: Kv = "f16"
    vectors: bool = False


class Context:
    """A decoder and its memory. Some embedding models have no memory."""

    def __init__(self, model: LlamaModel, given: ContextParams) -> None:
        # llama.cpp reserves one row per sequence and aborts the process if they do not fit.
        rows, outputs = max(given.rows, given.sequences), max(given.outputs, given.sequences)
        self.library = c = model.library
        self.vocab_size = model.vocab_size
        self.width: int = c.llama_model_n_embd_out(model.handle)
        params = c.llama_context_default_params()
        params.n_ctx = given.length if given.vectors else given.length * given.sequences
        params.n_seq_max = given.sequences
        params.n_batch = params.n_ubatch = rows
        if not given.flash_attention:
            params.flash_attn_type = FLASH_ATTENTION_OFF
        params.type_k = params.type_v = KV_TYPES[given.kv]
        params.n_outputs_max, params.n_outputs_max_per_seq = min(outputs, rows), 0
        params.n_threads = params.n_threads_batch = given.threads
        params.kv_unified = params.embeddings = given.vectors
        if given.vectors:
            params.pooling_type = NO_POOLING
        params.no_perf = True
        log.errors.clear()
        self.handle = c.llama_init_from_model(model.handle, params)
        if not self.handle:
            raise ConfigError(
                f"llama: cannot allocate {given.sequences} sequences of {given.length} tokens ({log.reason()}): "
                f"lower context or slots or cache_sequences{'' if given.kv == 'f16' else ', or remove kv: ' + given.kv}"
            )
        self.memory = c.llama_get_memory(self.handle)
        if not self.memory and not given.vectors:
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

    def warm_up(self, rows: int = 1) -> None:
        """Load the weights into memory before the first request, and check that the model runs."""
        self.decode_or_fail([0] * rows, range(rows), [0] * rows, [False] * (rows - 1) + [True])
        self.clear_all()

    def abort(self) -> None:
        """Abort the decode that runs in another thread. The affected sequences are then in an undefined state."""
        self._abort.value = b"1"

    def set_adapter(self, adapter: int, scale: float) -> None:
        """Apply an adapter to all further decodes."""
        handles, scales = (ctypes.c_void_p * 1)(adapter), (ctypes.c_float * 1)(scale)
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
