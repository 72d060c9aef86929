"""What would keep a model of vLLM from being loaded, and can be seen without vLLM, whose import takes seconds. That a
folder is not there is found by `catalog.foreseen.wrong_files`, for every engine."""

import re
from collections.abc import Iterator
from pathlib import Path

from dragoman.core.errors import ConfigError
from dragoman.engines.vllm import adapters
from dragoman.engines.vllm.options import HUB, VllmOptions, adapter_folders, collisions
from dragoman.files.sources import BUILT_IN, is_model_folder

NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
"""Of a model of the hub; the oldest are of no organisation."""


def mistakes(options: VllmOptions) -> Iterator[tuple[str, str]]:
    """Each with the key of the option that it is about."""
    words = _wrong_source(options.path)
    if words is not None:
        yield "source", words
    yield from collisions(options)
    for name, folder in adapter_folders(options).items():
        if not folder.is_dir():
            continue
        try:
            adapters.check(folder, Path(options.path).expanduser())
        except ConfigError as error:
            yield f"adapters.{name}", str(error)


def _wrong_source(path: str) -> str | None:
    folder = Path(path).expanduser()
    if not path.startswith(HUB) and folder.is_dir():
        if is_model_folder(folder):
            return None
        return f"the folder {path} has no config.json; vllm takes folders as Hugging Face lays them out"
    if path.startswith(("/", ".", "~")):
        return None
    name = path.removeprefix(HUB)
    if name in BUILT_IN:
        return f"{name} is a GGUF file, for `engine: llama`; vllm takes a folder, or ORG/REPO of the hub"
    if not NAME.fullmatch(name):
        return f"{name!r} is neither a folder nor ORG/REPO of the hub"
    return None
