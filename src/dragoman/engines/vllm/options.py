"""Configuration of a vLLM model, and the engine arguments made from it."""

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec

from dragoman.core.errors import ConfigError
from dragoman.core.types import Count
from dragoman.engines.vllm.adapters import read_rank

HUB = "hf:"
"""Prefix of a model name on the Hugging Face hub."""
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Adapter ranks that vLLM can be configured for."""
OPTION_BY_ARG = {"model": "source", "max_model_len": "context", "max_num_seqs": "slots"}
"""Our options for arguments of vLLM."""


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


def build_engine_args(options: VllmOptions) -> dict[str, Any]:
    """Build vLLM's engine arguments from our options and the operator's `args`."""
    lora = _lora_args(adapter_directories(options)) if options.adapters else {}
    args = {name: options.args[written] for name, written in arg_names(options.args).items()}
    return {"disable_log_stats": True, **lora, **_args_from_options(options), **args}


def arg_names(args: Mapping[str, Any]) -> dict[str, str]:
    """Map argument names to how the operator wrote them: `max-num-seqs` stands for `max_num_seqs`."""
    return {written.replace("-", "_"): written for written in args}


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
