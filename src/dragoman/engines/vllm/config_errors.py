"""Finds and describes configuration errors of vLLM models.

Rules
1. `find_errors` needs no vLLM, whose import takes seconds. `models.static_info.wrong_files` reports missing
   directories, for every engine.
2. vLLM's error about an argument is reported with the name the operator used: `args.NAME`, our own option, or else
   vLLM's section and field. Errors of the operator's own arguments come first.
3. All errors are reported, without links to the documentation of the validation library.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dragoman.core.errors import ConfigError
from dragoman.engines.vllm import adapters
from dragoman.engines.vllm.options import (
    HUB,
    OPTION_BY_ARG,
    VllmOptions,
    adapter_directories,
    arg_names,
    find_collisions,
)
from dragoman.files.sources import BUILT_IN, is_model_directory

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
"""A model name on the Hugging Face hub; the oldest models have no organization."""
MAX_VALUE_CHARACTERS = 60
_WORKER_ERROR = re.compile(r"Worker failed with error '(.+)', please check")


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
            adapters.check(directory, Path(options.path).expanduser())
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
