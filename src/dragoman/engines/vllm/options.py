"""What a configuration may say about a model of vLLM, beside its name, and what vLLM is told of it."""

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec

from dragoman.core.errors import ConfigError
from dragoman.core.types import Count
from dragoman.engines.vllm.adapters import rank as adapter_rank

HUB = "hf:"
"""Before the name of a model of the Hugging Face hub."""
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Those that vLLM has room of for adapters."""
OURS = {"model": "source", "max_model_len": "context", "max_num_seqs": "slots"}
"""Our words for arguments of vLLM's."""


class VllmOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: str
    """A folder, or a name of the Hugging Face hub."""
    format: str | None = None
    """The syntax in which the model writes thoughts and calls; None: what its chat template shows."""
    template_options: tuple[str, ...] = ()
    """Variables of the chat template that callers may set."""
    context: Count | None = None
    """Tokens of prompt and reply together (vLLM's max_model_len); None: the model's own."""
    slots: Count | None = None
    """Generations at once (vLLM's max_num_seqs); None: as many as vLLM takes, and the others queue there."""
    isolate: bool = False
    """Beginnings are shared only between requests of one principal."""
    strict_tools: bool = False
    """Calls are kept to the schemas of their tools in every reply, not only where a request asks for that."""
    adapters: Mapping[str, str] = {}
    """Folders of LoRA adapters, by the name of the model that each makes of this one."""
    args: Mapping[str, Any] = {}
    """vLLM's own engine arguments, as they are."""


def arguments(options: VllmOptions) -> dict[str, Any]:
    """For vLLM: what we have words for, and the operator's own."""
    adapting = _room_for(adapter_folders(options)) if options.adapters else {}
    args = {name: options.args[written] for name, written in names(options.args).items()}
    return {"disable_log_stats": True, **adapting, **_ours(options), **args}


def names(args: Mapping[str, Any]) -> dict[str, str]:
    """How each was written: who comes from a command line has `max-num-seqs`."""
    return {written.replace("-", "_"): written for written in args}


def collisions(options: VllmOptions) -> list[tuple[str, str]]:
    """Arguments that are given twice, and how."""
    ours, args = _ours(options), names(options.args)
    twice = [
        (f"args.{args[name]}", f"{OURS[name]} sets it; give it once") for name in sorted(ours.keys() & args.keys())
    ]
    spelt = [written for written in options.args if args[written.replace("-", "_")] != written]
    return twice + [(f"args.{written}", f"given twice, also as {args[written.replace('-', '_')]}") for written in spelt]


def check_names(options: VllmOptions, known: Collection[str]) -> None:
    """`known` are the names of vLLM's engine arguments."""
    wrong = []
    for name, written in names(options.args).items():
        if name not in known:
            near = get_close_matches(name, known, 1)
            meant = f"; did you mean {near[0]}?" if near else ""
            wrong.append(f"args.{written}: vLLM has no such engine argument{meant}")
    if wrong:
        raise ConfigError(f"vllm: {'; '.join(wrong)}")


def source(options: VllmOptions) -> str:
    """As vLLM takes it: a folder, or a name of the hub."""
    path = options.path
    return path.removeprefix(HUB) if path.startswith(HUB) else str(Path(path).expanduser())


def _ours(options: VllmOptions) -> dict[str, Any]:
    ours = {"model": source(options), "max_model_len": options.context, "max_num_seqs": options.slots}
    return {name: value for name, value in ours.items() if value is not None}


def adapter_folders(options: VllmOptions) -> dict[str, Path]:
    return {name: Path(path).expanduser() for name, path in options.adapters.items()}


def _room_for(adapters: Mapping[str, Path]) -> dict[str, Any]:
    widest = 0
    for name, folder in adapters.items():
        try:
            widest = max(widest, adapter_rank(folder))
        except ConfigError as error:
            raise ConfigError(f"vllm: the adapter {name}: {error}") from error
    most = next((rank for rank in RANKS if rank >= widest), RANKS[-1])
    return {"enable_lora": True, "max_loras": len(adapters), "max_lora_rank": most}
