"""Loads llama.cpp's C library from the xllamacpp wheel and declares its structs, prototypes and log callback.

The struct layouts are valid for exactly one version of the wheel. Another version is refused, and so is a library whose
default values are not where the layouts expect them.
"""

import ctypes
import importlib.metadata
import importlib.util
import os
import re
import threading
from collections import deque
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import ClassVar, Literal

from dragoman.core.errors import ConfigError

SUPPORTED = "2026.10.11549"
LOG_ERROR = 4
FLASH_ATTENTION_OFF = 0
MAX_SEQUENCES = 256
"""llama.cpp's limit on the sequences of a context."""
Kv = Literal["f16", "q8_0"]
KV_TYPES = {"f16": 1, "q8_0": 8}
"""ggml's type numbers."""


def _fields(*groups: tuple[str, type]) -> list[tuple[str, type]]:
    """Expand groups of consecutive fields that have the same type."""
    return [(name, kind) for names, kind in groups for name in names.split()]


class _ModelParams(ctypes.Structure):
    _fields_: ClassVar = _fields(
        ("devices tensor_buft_overrides", c_void_p),
        ("n_gpu_layers split_mode load_mode lazy_mode main_gpu", c_int32),
        ("tensor_split progress_callback progress_callback_user_data kv_overrides", c_void_p),
        ("vocab_only check_tensors use_extra_bufts no_host no_alloc load_mtp", c_bool),
    )


class _ContextParams(ctypes.Structure):
    _fields_: ClassVar = _fields(
        ("n_ctx n_batch n_ubatch n_seq_max n_rs_seq n_outputs_max n_outputs_max_per_seq", c_uint32),
        ("n_threads n_threads_batch ctx_type rope_scaling_type pooling_type attention_type flash_attn_type", c_int32),
        ("rope_freq_base rope_freq_scale yarn_ext_factor yarn_attn_factor yarn_beta_fast yarn_beta_slow", c_float),
        ("yarn_orig_ctx", c_uint32),
        ("defrag_thold", c_float),
        ("cb_eval cb_eval_user_data", c_void_p),
        ("type_k type_v", c_int32),
        ("moe_cache_size", c_size_t),
        ("abort_callback abort_callback_data", c_void_p),
        ("embeddings offload_kqv no_perf op_offload swa_full kv_unified", c_bool),
        ("samplers", c_void_p),
        ("n_samplers", c_size_t),
        ("ctx_other", c_void_p),
    )


class _SamplerChainParams(ctypes.Structure):
    _fields_: ClassVar = [("no_perf", c_bool)]


class Batch(ctypes.Structure):
    _fields_: ClassVar = _fields(("n_tokens", c_int32), ("token embd pos n_seq_id seq_id logits", c_void_p))


_LogCallback = ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)
ProgressCallback = ctypes.CFUNCTYPE(c_bool, c_float, c_void_p)

_INT_GETTERS = """
llama_model_n_ctx_train llama_model_n_layer llama_model_n_embd llama_model_n_embd_out llama_model_n_head
llama_model_n_head_kv llama_model_meta_count llama_vocab_n_tokens llama_vocab_bos llama_vocab_eos
llama_vocab_fim_pre llama_vocab_fim_suf llama_vocab_fim_mid
"""
_BOOL_GETTERS = """
llama_model_has_encoder llama_model_has_decoder llama_model_is_recurrent llama_model_is_hybrid
llama_model_is_diffusion llama_vocab_get_add_bos
"""

# name: (result, *arguments)
_PROTOTYPES: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(_INT_GETTERS.split(), (c_int32, c_void_p)),
    **dict.fromkeys(_BOOL_GETTERS.split(), (c_bool, c_void_p)),
    "llama_backend_init": (None,),
    "llama_set_abort_callback": (None, c_void_p, c_void_p, c_void_p),
    "llama_log_set": (None, _LogCallback, c_void_p),
    "llama_model_default_params": (_ModelParams,),
    "llama_context_default_params": (_ContextParams,),
    "llama_sampler_chain_default_params": (_SamplerChainParams,),
    "llama_model_load_from_file": (c_void_p, c_char_p, _ModelParams),
    "llama_model_free": (None, c_void_p),
    "llama_model_get_vocab": (c_void_p, c_void_p),
    "llama_model_desc": (c_int32, c_void_p, c_char_p, c_size_t),
    "llama_model_chat_template": (c_char_p, c_void_p, c_char_p),
    "llama_model_meta_key_by_index": (c_int32, c_void_p, c_int32, c_char_p, c_size_t),
    "llama_model_meta_val_str_by_index": (c_int32, c_void_p, c_int32, c_char_p, c_size_t),
    "llama_vocab_get_attr": (c_int32, c_void_p, c_int32),
    "llama_vocab_is_eog": (c_bool, c_void_p, c_int32),
    "llama_vocab_get_suppress_tokens": (POINTER(c_int32), c_void_p, POINTER(c_int32)),
    "llama_tokenize": (c_int32, c_void_p, c_char_p, c_int32, c_void_p, c_int32, c_bool, c_bool),
    "llama_token_to_piece": (c_int32, c_void_p, c_int32, c_char_p, c_int32, c_int32, c_bool),
    "llama_detokenize": (c_int32, c_void_p, c_void_p, c_int32, c_char_p, c_int32, c_bool, c_bool),
    "llama_adapter_lora_init": (c_void_p, c_void_p, c_char_p),
    "llama_adapter_get_alora_n_invocation_tokens": (c_uint64, c_void_p),
    "llama_set_adapters_lora": (c_int32, c_void_p, POINTER(c_void_p), c_size_t, POINTER(c_float)),
    "llama_init_from_model": (c_void_p, c_void_p, _ContextParams),
    "llama_free": (None, c_void_p),
    "llama_n_ctx_seq": (c_uint32, c_void_p),
    "llama_get_memory": (c_void_p, c_void_p),
    "llama_memory_clear": (None, c_void_p, c_bool),
    "llama_memory_seq_rm": (c_bool, c_void_p, c_int32, c_int32, c_int32),
    "llama_memory_seq_cp": (None, c_void_p, c_int32, c_int32, c_int32, c_int32),
    "llama_decode": (c_int32, c_void_p, Batch),
    "llama_encode": (c_int32, c_void_p, Batch),
    "llama_get_embeddings": (c_void_p, c_void_p),
    "llama_get_logits_ith": (c_void_p, c_void_p, c_int32),
    "llama_sampler_chain_init": (c_void_p, _SamplerChainParams),
    "llama_sampler_chain_add": (None, c_void_p, c_void_p),
    "llama_sampler_init_top_k": (c_void_p, c_int32),
    "llama_sampler_init_top_p": (c_void_p, c_float, c_size_t),
    "llama_sampler_init_min_p": (c_void_p, c_float, c_size_t),
    "llama_sampler_init_temp": (c_void_p, c_float),
    "llama_sampler_init_dist": (c_void_p, c_uint32),
    "llama_sampler_sample": (c_int32, c_void_p, c_void_p, c_int32),
    "llama_sampler_free": (None, c_void_p),
}


class _Log:
    """Silences llama.cpp's log and keeps its last errors, which explain a failed load."""

    def __init__(self) -> None:
        self.errors: deque[str] = deque(maxlen=16)
        self.callback = _LogCallback(self._receive)

    def _receive(self, level: int, text: bytes | None, _: object) -> None:
        if level == LOG_ERROR and text:
            self.errors.append(text.decode("utf-8", "replace").strip())

    def reason(self) -> str:
        """Return the first error, which is closest to the cause, without the names of C functions."""
        lines = (
            re.sub(r"^\w+: (error loading model: |failed to apply lora adapter: )?", "", line) for line in self.errors
        )
        return next(lines, "llama.cpp gave no reason")


log = _Log()
_lock = threading.Lock()
_loaded: ctypes.CDLL | None = None


def library() -> ctypes.CDLL:
    """Return the C library. The first call loads and checks it."""
    global _loaded
    with _lock:
        if _loaded is None:
            _check_version()
            # Without this, llama.cpp starts a debugger before it aborts, which delays the exit and fills the log.
            os.environ.setdefault("GGML_NO_BACKTRACE", "1")
            # A thread that spins for long at a barrier keeps the core from the thread it waits for: on a busy machine
            # a step took ten times as long. Read by OpenMP when the library is loaded.
            os.environ.setdefault("GOMP_SPINCOUNT", "1000")
            loaded = ctypes.CDLL(str(_extension_path()))
            for name, (result, *arguments) in _PROTOTYPES.items():
                function = getattr(loaded, name)
                function.restype, function.argtypes = result, arguments
            _check_layout(loaded)
            loaded.llama_log_set(log.callback, None)
            loaded.llama_backend_init()
            _loaded = loaded
        return _loaded


def _check_version() -> None:
    try:
        installed = importlib.metadata.version("xllamacpp")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"the llama engine needs xllamacpp: pip install xllamacpp=={SUPPORTED}") from None
    if installed != SUPPORTED:
        raise ConfigError(
            f"the llama engine needs xllamacpp {SUPPORTED}, but {installed} is installed: "
            f"pip install xllamacpp=={SUPPORTED}"
        )


def _extension_path() -> Path:
    spec = importlib.util.find_spec("xllamacpp")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    candidates = [Path(folder) / f"xllamacpp{suffix}" for folder in folders for suffix in EXTENSION_SUFFIXES]
    for path in candidates:
        if path.is_file():
            return path
    raise ConfigError("the installed xllamacpp has no extension module: reinstall the package")


def _check_layout(loaded: ctypes.CDLL) -> None:
    context, model = loaded.llama_context_default_params(), loaded.llama_model_default_params()
    defaults = (
        *(context.n_ctx, context.n_batch, context.n_ubatch, context.n_seq_max, context.n_threads),
        *(context.rope_scaling_type, context.yarn_ext_factor, context.type_k, context.type_v, context.n_samplers),
        *(context.offload_kqv, context.kv_unified, context.ctx_other),
        *(model.n_gpu_layers, model.split_mode, model.main_gpu, model.use_extra_bufts, model.no_alloc),
    )
    if defaults != (512, 2048, 512, 1, 4, -1, -1.0, 1, 1, 0, True, False, None, -1, 1, 0, True, False):
        raise ConfigError(
            f"the structs of the installed xllamacpp do not match version {SUPPORTED}: reinstall the package"
        )
