"""Configuration of a vLLM model, the engine arguments made from it, and errors in it.

Rules
1. `find_errors` needs no vLLM, whose import takes seconds. `ModelSpec.locate` reports missing
   directories, for every engine.
2. vLLM's error about an argument is reported with the name the operator used: `args.NAME`, our own option, or else
   vLLM's section and field. Errors of the operator's own arguments come first.
3. All errors are reported, without links to the documentation of the validation library.
4. vLLM accepts a LoRA adapter for a model of another hidden size and computes wrong results, so the sizes are compared
   here if both can be read.

    adapter := adapter_config.json  {"r": RANK, ...}
               adapter_model.safetensors | adapter_model.bin | adapter_model.pt
"""

import re
import struct
from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec

from dragoman.core.errors import ConfigError
from dragoman.core.types import Count
from dragoman.files.sources import BUILT_IN, is_model_directory

HUB = "hf:"
"""Prefix of a model name on the Hugging Face hub."""
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Adapter ranks that vLLM can be configured for."""
OPTION_BY_ARG = {"model": "source", "max_model_len": "context", "max_num_seqs": "slots"}
"""Our options for arguments of vLLM."""
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
"""A model name on the Hugging Face hub; the oldest models have no organization."""
MAX_VALUE_CHARACTERS = 60
_WORKER_ERROR = re.compile(r"Worker failed with error '(.+)', please check")
CONFIG_FILE = "adapter_config.json"
WEIGHT_FILES = tuple(f"adapter_model.{suffix}" for suffix in ("safetensors", "bin", "pt"))
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format."""
INPUT_WEIGHTS = re.compile(r"\.layers\.\d+\.self_attn\.[qkv]_proj\.lora_A\.")
"""Weights whose input dimension is the hidden size of the model."""
OTHER_ENCODERS = re.compile(r"vision|visual|audio|encoder")


class VllmOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: str
    """A directory, or a name on the Hugging Face hub."""
    format: str | None = None
    """The syntax of reasoning and tool calls; None detects it from the chat template."""
    template_options: tuple[str, ...] = ()
    """Variables of the chat template that clients may set."""
    context: Count | None = None
    """Maximum tokens of prompt and reply together (vLLM's max_model_len); None uses the model's own."""
    slots: Count | None = None
    """Concurrent generations (vLLM's max_num_seqs); None uses vLLM's default, and vLLM queues the rest."""
    isolate: bool = False
    """Share cached prefixes only between requests of one principal."""
    strict_tools: bool = False
    """Enforce the schemas of tools in every reply, not only for strict tools."""
    adapters: Mapping[str, str] = {}
    """Directories of LoRA adapters, by the model name under which each is served."""
    args: Mapping[str, Any] = {}
    """vLLM's own engine arguments."""


class _AdapterConfig(msgspec.Struct):
    r: Count


class _Tensor(msgspec.Struct):
    """An entry in the header of a safetensors file."""

    shape: tuple[int, ...] = ()


class _ModelConfig(msgspec.Struct):
    hidden_size: int | None = None
    text_config: "_ModelConfig | None" = None
    """The section of a multimodal model."""


def build_engine_args(options: VllmOptions) -> dict[str, Any]:
    """Build vLLM's engine arguments from our options and the operator's `args`."""
    lora = _lora_args(adapter_directories(options)) if options.adapters else {}
    args = {name: options.args[written] for name, written in arg_names(options.args).items()}
    return {"disable_log_stats": True, **lora, **_args_from_options(options), **args}


def arg_names(args: Mapping[str, Any]) -> dict[str, str]:
    """Map argument names to how the operator wrote them: `max-num-seqs` stands for `max_num_seqs`."""
    return {written.replace("-", "_"): written for written in args}


def find_arg(options: VllmOptions, name: str) -> Any:
    """Return an argument of the operator; None if it is not set."""
    return options.args.get(arg_names(options.args).get(name, name))


def find_collisions(options: VllmOptions) -> list[tuple[str, str]]:
    """Find arguments that are set twice, as pairs of key and message."""
    ours, names = _args_from_options(options), arg_names(options.args)
    errors = [
        (f"args.{names[name]}", f"already set by the option {OPTION_BY_ARG[name]}; set only one of them")
        for name in sorted(ours.keys() & names.keys())
    ]
    for written in options.args:
        other = names[written.replace("-", "_")]
        if other != written:
            errors.append((f"args.{written}", f"set twice, also as {other}"))
    return errors


def check_arg_names(options: VllmOptions, known: Collection[str]) -> None:
    """Raise if `args` contains names that are not among vLLM's engine arguments."""
    errors = []
    for name, written in arg_names(options.args).items():
        if name not in known:
            matches = get_close_matches(name, known, 1)
            hint = f"; did you mean {matches[0]}?" if matches else ""
            errors.append(f"args.{written}: vLLM has no such engine argument{hint}")
    if errors:
        raise ConfigError(f"vllm: {'; '.join(errors)}")


def _args_from_options(options: VllmOptions) -> dict[str, Any]:
    path = options.path
    model = path.removeprefix(HUB) if path.startswith(HUB) else str(Path(path).expanduser())
    args = {"model": model, "max_model_len": options.context, "max_num_seqs": options.slots}
    return {name: value for name, value in args.items() if value is not None}


def adapter_directories(options: VllmOptions) -> dict[str, Path]:
    return {name: Path(path).expanduser() for name, path in options.adapters.items()}


def _lora_args(adapters: Mapping[str, Path]) -> dict[str, Any]:
    highest = 0
    for name, directory in adapters.items():
        try:
            highest = max(highest, read_rank(directory))
        except ConfigError as error:
            raise ConfigError(f"vllm: adapter {name}: {error}") from error
    max_rank = next((rank for rank in RANKS if rank >= highest), RANKS[-1])
    return {"enable_lora": True, "max_loras": len(adapters), "max_lora_rank": max_rank}


def find_errors(options: VllmOptions) -> Iterator[tuple[str, str]]:
    """Yield pairs of option key and message."""
    message = _source_error(options.path)
    if message is not None:
        yield "source", message
    yield from find_collisions(options)
    for name, directory in adapter_directories(options).items():
        if not directory.is_dir():
            continue
        try:
            check_adapter(directory, Path(options.path).expanduser())
        except ConfigError as error:
            yield f"adapters.{name}", str(error)


def _source_error(path: str) -> str | None:
    directory = Path(path).expanduser()
    if not path.startswith(HUB) and directory.is_dir():
        if is_model_directory(directory):
            return None
        return f"the directory {path} has no config.json; vllm needs a model directory in Hugging Face's layout"
    if path.startswith(("/", ".", "~")):
        return None
    name = path.removeprefix(HUB)
    if name in BUILT_IN:
        return f"{name} is a GGUF file, for `engine: llama`; vllm needs a directory or ORG/REPO on the hub"
    if not HUB_NAME.fullmatch(name):
        return f"{name!r} is neither a directory nor ORG/REPO on the hub"
    return None


def describe_error(error: Exception, options: VllmOptions) -> str:
    """Describe an error of vLLM about its arguments or the model in one line."""
    list_errors = getattr(error, "errors", None)
    if not callable(list_errors):
        return " ".join(str(error).split()) or type(error).__name__
    title = str(getattr(error, "title", ""))
    messages: dict[str, list[str]] = {}
    values: dict[str, str] = {}
    for entry in list_errors():
        field = _field_prefix(entry, title, options)
        messages.setdefault(field, []).append(str(entry["msg"]).removeprefix("Value error, "))
        values[field] = f", not {_shorten(entry.get('input'))}" if entry["loc"] else ""
    lines = [f"{field}{' or '.join(dict.fromkeys(texts))}{values[field]}" for field, texts in messages.items()]
    return "; ".join(sorted(lines, key=lambda line: not line.startswith("args.")))


def _field_prefix(entry: Mapping[str, Any], title: str, options: VllmOptions) -> str:
    if not entry["loc"]:
        return ""
    field = str(entry["loc"][0])
    written = arg_names(options.args).get(field)
    if written is not None:
        return f"args.{written}: "
    return f"{OPTION_BY_ARG[field]}: " if field in OPTION_BY_ARG else f"{title}.{field}: "


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_VALUE_CHARACTERS else f"{text[:MAX_VALUE_CHARACTERS]}..."


def last_line(error: Exception) -> str:
    """The last line of an error; for a worker's error only the part that vLLM quotes."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    quoted = _WORKER_ERROR.search(lines[-1])
    return quoted[1] if quoted else lines[-1]


def read_rank(directory: Path) -> int:
    file = directory / CONFIG_FILE
    try:
        return msgspec.json.decode(file.read_bytes(), type=_AdapterConfig).r
    except OSError as error:
        raise ConfigError(f"{directory} is not a LoRA adapter: it has no {CONFIG_FILE}") from error
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file} has no rank `r`; is it a LoRA adapter?") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{file} is not JSON") from error


def check_adapter(directory: Path, model: Path) -> None:
    """Raise if the directory is not an adapter that fits the model. `model` need not be a directory."""
    read_rank(directory)
    weights = next((directory / name for name in WEIGHT_FILES if (directory / name).is_file()), None)
    if weights is None:
        raise ConfigError(f"{directory} has no adapter weights: expected {' or '.join(WEIGHT_FILES)}")
    if weights.suffix != ".safetensors":
        return
    size, expected = _adapter_size(weights), _hidden_size(model)
    if size is not None and expected is not None and size != expected:
        raise ConfigError(f"{directory} is for a model with hidden size {size}; this model has {expected}")


def _adapter_size(file: Path) -> int | None:
    """The hidden size of the models that an adapter fits."""
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header = opened.read(length) if length <= MAX_HEADER_BYTES else b""
        tensors = msgspec.json.decode(header, type=dict[str, _Tensor])
    except (OSError, msgspec.DecodeError, struct.error) as error:
        raise ConfigError(f"{file} cannot be read as safetensors") from error
    for name, tensor in tensors.items():
        if INPUT_WEIGHTS.search(name) and not OTHER_ENCODERS.search(name):
            return tensor.shape[1] if len(tensor.shape) == 2 else None
    return None


def _hidden_size(model: Path) -> int | None:
    try:
        config = msgspec.json.decode((model / "config.json").read_bytes(), type=_ModelConfig)
    except (OSError, msgspec.DecodeError):
        return None
    text_size = None if config.text_config is None else config.text_config.hidden_size
    return text_size if config.hidden_size is None else config.hidden_size
