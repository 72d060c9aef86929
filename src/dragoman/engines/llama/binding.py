"""A model, its decoder and its samplers, as typed Python over the C functions. With `library` the only user of ctypes.

Rules
1. What C keeps a pointer to (the arrays of a batch) is held by Python as long as C may use it.
2. A `Model` may be used from any thread; a `Context` and its samplers only from the thread that decodes.
"""

import ctypes
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dragoman.core.errors import ConfigError
from dragoman.engines.llama.kv_size import KV_TYPES, Kv, Shape
from dragoman.engines.llama.library import FLASH_ATTENTION_OFF, Batch, ProgressCallback, library, log

MAX_SEQUENCES = 256
"""llama.cpp's own limit on the sequences of a context."""
TOKENIZED_AT_ONCE = 4096
"""Characters."""

ABORTED = 2
"""What `decode` says when it was told to stop."""

Logits = NDArray[np.float32]
Vectors = NDArray[np.float32]

POOLING = {"1": "mean", "2": "first", "3": "last"}
"""How a model's file says that its vectors of a text's tokens become one; a chat model's says nothing."""
NO_POOLING, RANKING = 0, "4"

ATTRIBUTE_UNKNOWN, ATTRIBUTE_CONTROL = 1, 8
NO_TOKEN = -1


class Model:
    """A model file in memory, and what its vocabulary and metadata say."""

    def __init__(self, path: Path, progress: Callable[[float], None] | None = None) -> None:
        self.library = c = library()
        params = c.llama_model_default_params()
        # Kept in a name while C may call it; what it returns says that loading is to go on.
        told = ProgressCallback(lambda share, _: progress is None or progress(share) is None)
        params.progress_callback = ctypes.cast(told, ctypes.c_void_p)
        log.errors.clear()
        self.handle = c.llama_model_load_from_file(str(path).encode(), params)
        if not self.handle:
            raise ConfigError(f"llama: {path} is not a model that can be loaded: {log.reason()}")
        self.vocab = vocab = c.llama_model_get_vocab(self.handle)
        self.vocab_size: int = c.llama_vocab_n_tokens(vocab)
        self.bos: int = c.llama_vocab_bos(vocab)
        self.eos: int = c.llama_vocab_eos(vocab)
        self.add_bos: bool = c.llama_vocab_get_add_bos(vocab)
        self.trained_context: int = c.llama_model_n_ctx_train(self.handle)
        self.metadata = self._metadata()
        self.infill = self._infill()
        self.suppressed = self._suppressed()
        self.hidden = frozenset(
            token
            for token in range(self.vocab_size)
            if c.llama_vocab_get_attr(vocab, token) & (ATTRIBUTE_CONTROL | ATTRIBUTE_UNKNOWN)
        )
        self.ends = frozenset(token for token in range(self.vocab_size) if c.llama_vocab_is_eog(vocab, token))
        self.shown: frozenset[int] = frozenset()
        self.pieces = tuple(self._piece(token) for token in range(self.vocab_size))
        self.longest_piece = max(map(len, self.pieces))

    @property
    def description(self) -> str:
        buffer = ctypes.create_string_buffer(256)
        self.library.llama_model_desc(self.handle, buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace")

    @property
    def chat_template(self) -> str | None:
        found: bytes | None = self.library.llama_model_chat_template(self.handle, None)
        return None if found is None else found.decode("utf-8", "replace")

    @property
    def control(self) -> tuple[str, ...]:
        """The names of the tokens that content must never produce."""
        return tuple(self.name(token) for token in sorted(self.hidden))

    @property
    def generates(self) -> bool:
        """Whether it writes text token by token, as everything here expects."""
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
    def looks_ahead(self) -> bool:
        """Whether every token sees those after it, so that a text can only be taken in as a whole."""
        return self.metadata.get(f"{self.architecture}.attention.causal") == "false"

    @property
    def pooling(self) -> str:
        """mean, first or last: which of its tokens' vectors stand for a text."""
        return POOLING.get(self.metadata.get(f"{self.architecture}.pooling_type", ""), "mean")

    @property
    def ranks(self) -> bool:
        """Whether it was made to say how well two texts go together, and nothing else."""
        return self.metadata.get(f"{self.architecture}.pooling_type") == RANKING

    @property
    def forgets(self) -> bool:
        """Whether its memory is a running state, of which the end cannot be taken back."""
        c, handle = self.library, self.handle
        return bool(c.llama_model_is_recurrent(handle) or c.llama_model_is_hybrid(handle))

    def state_bytes(self, kv: Kv) -> int:
        """About how much memory a token in a sequence takes."""
        c, handle = self.library, self.handle
        counts = (c.llama_model_n_layer, c.llama_model_n_head, c.llama_model_n_head_kv, c.llama_model_n_embd)
        widths = (self.metadata.get(f"{self.architecture}.attention.{name}_length", "") for name in ("key", "value"))
        told = (int(width) if width.isdecimal() else 0 for width in widths)
        return max(Shape(*(int(count(handle)) for count in counts), *told).token_bytes(kv), 1)

    def name(self, token: int) -> str:
        return "" if token == NO_TOKEN else self.pieces[token].decode("utf-8", "replace")

    def text(self, token: int) -> bytes:
        """What a reader sees of a token: nothing of a control token, unless it is a marker that was asked for."""
        return b"" if token in self.hidden and token not in self.shown else self.pieces[token]

    def show(self, markers: Collection[str]) -> None:
        """Let readers see the control tokens of these names, but not those that end a text."""
        self.shown = frozenset(self.control_ids(markers).values()) - self.ends

    def control_ids(self, names: Collection[str]) -> dict[str, int]:
        """The control tokens that have one of the names."""
        return {name: token for token in sorted(self.hidden) if (name := self.name(token)) in names}

    def tokenize(self, text: str, special: bool) -> list[int]:
        """Long text in parts: the time that llama.cpp takes grows with the square of the control tokens in it. A part
        begins at a control token, where nothing that comes before has any influence."""
        if not special or len(text) <= TOKENIZED_AT_ONCE:
            return self._tokenize(text, special)
        tokens: list[int] = []
        start = 0
        for found in self._control_texts.finditer(text):
            if found.start() - start >= TOKENIZED_AT_ONCE:
                tokens += self._tokenize(text[start : found.start()], special)
                start = found.start()
        return tokens + self._tokenize(text[start:], special)

    def tokenize_whole(self, text: str) -> list[int]:
        """A text that is content and nothing else, with the tokens that the vocabulary wants around it."""
        return self._tokenize(text, special=False, framed=True)

    @cached_property
    def _control_texts(self) -> re.Pattern[str]:
        longest_first = sorted(self.control, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def _tokenize(self, text: str, special: bool, framed: bool = False) -> list[int]:
        data = text.encode("utf-8", "replace")
        room = len(data) + 16
        while True:
            found = np.empty(room, dtype=np.int32)
            count = self.library.llama_tokenize(self.vocab, data, len(data), found.ctypes.data, room, framed, special)
            if count >= 0:
                return [int(token) for token in found[:count]]
            room = -count

    def detokenize(self, tokens: Sequence[int]) -> str:
        ids = np.array(tokens, dtype=np.int32)
        room = sum(len(self.pieces[token]) for token in tokens) + 16
        while True:
            buffer = ctypes.create_string_buffer(room)
            count = self.library.llama_detokenize(self.vocab, ids.ctypes.data, len(ids), buffer, room, False, True)
            if count >= 0:
                return buffer.raw[:count].decode("utf-8", "replace")
            room = -count

    def close(self) -> None:
        if self.handle:
            self.library.llama_model_free(self.handle)
            self.handle = None

    def _piece(self, token: int) -> bytes:
        room = 64
        while True:
            buffer = ctypes.create_string_buffer(room)
            count = self.library.llama_token_to_piece(self.vocab, token, buffer, room, 0, True)
            if count >= 0:
                return buffer.raw[:count]
            room = -count

    def _infill(self) -> tuple[int, int, int] | None:
        """The tokens before the prefix, before the suffix and before what is to be written between them."""
        c = self.library
        marks = (
            c.llama_vocab_fim_pre(self.vocab),
            c.llama_vocab_fim_suf(self.vocab),
            c.llama_vocab_fim_mid(self.vocab),
        )
        return None if NO_TOKEN in marks else marks

    def _suppressed(self) -> tuple[int, ...]:
        """Tokens that the model's makers want never to be sampled."""
        count = ctypes.c_int32(0)
        found = self.library.llama_vocab_get_suppress_tokens(self.vocab, ctypes.byref(count))
        return tuple(found[: count.value]) if count.value > 0 else ()

    def _metadata(self) -> Mapping[str, str]:
        c = self.library
        count = c.llama_model_meta_count(self.handle)
        read = (c.llama_model_meta_key_by_index, c.llama_model_meta_val_str_by_index)
        pairs = ((self._string(read[0], index), self._string(read[1], index)) for index in range(count))
        return dict(pairs)

    def _string(self, function: Callable[..., int], index: int) -> str:
        room = 256
        while True:
            buffer = ctypes.create_string_buffer(room)
            length = function(self.handle, index, buffer, room)
            if length < room:
                return buffer.value.decode("utf-8", "replace")
            room = length + 1


class Adapter:
    """Changes to the weights of a model, from a file; freed with the model."""

    def __init__(self, model: Model, path: Path) -> None:
        c = model.library
        log.errors.clear()
        self.handle = c.llama_adapter_lora_init(model.handle, str(path).encode())
        if not self.handle:
            raise ConfigError(f"llama: {path} is not an adapter for this model: {log.reason()}")
        if c.llama_adapter_get_alora_n_invocation_tokens(self.handle):
            raise ConfigError(f"llama: {path} is an adapter that certain tokens switch on, which is not supported")


class Context:
    """The memory of `sequences` independent token sequences of up to `length` tokens, and the decoder over it.

    One that makes `vectors` gives one for every row instead of logits, and its sequences have `length` tokens together.
    Of some models it has no memory: what is decoded is forgotten at once.
    """

    def __init__(
        self,
        model: Model,
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
        """`rows` is the largest batch, `outputs` the most rows of it that may ask for logits. llama.cpp plans for
        one of every sequence, and ends the process where there is no room for these: so there always is."""
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
                f"llama: no room for {sequences} texts of {length} tokens ({log.reason()}): "
                f"lower context or slots or cache_sequences{'' if kv == 'f16' else ', or leave out kv: ' + kv}"
            )
        self.memory = c.llama_get_memory(self.handle)
        if not self.memory and not vectors:
            self.close()
            raise ConfigError("llama: this model keeps nothing of a text in memory: it makes embeddings, not text")
        self.length: int = c.llama_n_ctx_seq(self.handle)
        self._allocate(rows)
        # llama.cpp asks now and then whether to go on. A function of the C library that reads a digit can be asked in
        # the midst of computing, when nothing of Python can.
        self._abort = ctypes.create_string_buffer(b"0")
        asked = ctypes.cast(ctypes.CDLL(None).atoi, ctypes.c_void_p)
        c.llama_set_abort_callback(self.handle, asked, ctypes.addressof(self._abort))

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
        """Work off one batch; 0 is success, 1 no room in the memory, ABORTED what it says, anything else a failure."""
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

    def abort(self) -> None:
        """End the decode that another thread is in; what of it is in memory then, nobody knows."""
        self._abort.value = b"1"

    def adapt(self, adapter: Adapter, scale: float) -> None:
        """Decode from now on with the adapter's changes, so many times as strong."""
        handles, scales = (ctypes.c_void_p * 1)(adapter.handle), (ctypes.c_float * 1)(scale)
        self.library.llama_set_adapters_lora(self.handle, handles, 1, scales)

    def use_threads(self, single: int, many: int) -> None:
        """For batches of one row, and for larger ones."""
        self.library.llama_set_n_threads(self.handle, single, many)

    def vectors(self, rows: int) -> Vectors:
        """Those of the first rows of the last batch, all of which asked for them: a view, until the next one."""
        address = self.library.llama_get_embeddings(self.handle)
        if not address:
            raise RuntimeError("the rows have no vectors")
        return np.ctypeslib.as_array((ctypes.c_float * (rows * self.width)).from_address(address)).reshape(rows, -1)

    def logits(self, row: int) -> Logits:
        """The logits of a row that asked for them: a view, writable, valid until the next decode."""
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
        """Forget what lies behind the first `length` tokens; False where the memory cannot do that."""
        if length == 0:
            self.clear(sequence)
            return True
        return bool(self.library.llama_memory_seq_rm(self.memory, sequence, length, -1))

    def copy(self, source: int, target: int) -> None:
        # A part of a sequence would end the process: separate streams are copied whole.
        self.library.llama_memory_seq_cp(self.memory, source, target, -1, -1)

    def close(self) -> None:
        if self.handle:
            self.library.llama_free(self.handle)
            self.handle = None


class Sampler:
    """Draws a token from a row's logits: top_k, top_p, min_p, temperature, then chance."""

    def __init__(self, *, top_k: int, top_p: float, min_p: float, temperature: float, seed: int) -> None:
        self.library = c = library()
        self.handle = c.llama_sampler_chain_init(c.llama_sampler_chain_default_params())
        for link in (
            c.llama_sampler_init_top_k(top_k),
            c.llama_sampler_init_top_p(top_p, 1),
            c.llama_sampler_init_min_p(min_p, 1),
            c.llama_sampler_init_temp(temperature),
            c.llama_sampler_init_dist(seed),
        ):
            c.llama_sampler_chain_add(self.handle, link)

    def draw(self, context: Context, row: int) -> int:
        token: int = self.library.llama_sampler_sample(self.handle, context.handle, row)
        return token

    def close(self) -> None:
        if self.handle:
            self.library.llama_sampler_free(self.handle)
            self.handle = None
