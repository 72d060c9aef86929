"""`dragoman serve`: checks the configuration, downloads the default model, and runs the server."""

import argparse
import inspect
import logging
import os
from collections.abc import Sequence

from dragoman.cli.common import Commands, add_command, add_repeatable, add_working_directory, print_progress
from dragoman.config.diagnostics import Diagnostic
from dragoman.config.loading import Flags, LoadedConfig, load
from dragoman.config.settings import Settings
from dragoman.core.engine import Engine, known_models
from dragoman.core.errors import ConfigError
from dragoman.core.urls import remove_credentials
from dragoman.engines import ENGINES, engine_class
from dragoman.files import sources

log = logging.getLogger("dragoman")

EXAMPLES = """\
examples:
  dragoman serve
  dragoman serve ./model.gguf
  dragoman serve --model mine=./model.gguf --alias 'gpt-*=mine'
  dragoman serve --models-dir ./models --memory 12GiB --keep-alive 10m
  dragoman serve --model qwen=./Qwen3-8B
  dragoman serve --engine vllm --model qwen=Qwen/Qwen3-8B
  dragoman serve --engine my_module:MyEngine
  dragoman serve --host 0.0.0.0 --port 9000 --api-key "$(openssl rand -hex 16)"

The configuration file is --config, $DRAGOMAN_CONFIG, or ./dragoman.yaml if it exists. Without any model, smollm2 is
served. Flags override the environment ($DRAGOMAN_API_KEY), the environment overrides the file.
"""


def add(commands: Commands) -> None:
    description = "Serve models to programs that speak the OpenAI or the Anthropic API. Missing models are downloaded."
    parser = add_command(commands, "serve", "serve models over HTTP", description, EXAMPLES)
    parser.add_argument(
        "models",
        metavar="MODEL",
        nargs="*",
        help="the same as --model; without NAME= the model is named after its file or directory",
    )
    parser.add_argument("--config", metavar="FILE", help="a configuration file (YAML or JSON)")
    add_repeatable(
        parser,
        "--model",
        "NAME=SOURCE",
        f"serve a model under this name; SOURCE is a path to a GGUF file, {sources.SOURCE_KINDS}, or a model directory "
        f"if vllm is installed. NAME alone is a built-in model ({', '.join(sources.BUILT_IN)})",
    )
    aliases_help = "serve a model under other names too; * and ? are wildcards"
    add_repeatable(parser, "--alias", "PATTERN=NAME", aliases_help, dest="aliases")
    parser.add_argument(
        "--engine",
        metavar="MODULE:CLASS",
        help="serve your own engine, imported from the working directory; vllm or llama: the engine of every --model",
    )
    protocols_help = "answer in a wire protocol of your own too, imported from the working directory"
    add_repeatable(parser, "--protocol", "MODULE:CLASS", protocols_help, dest="protocols")
    parser.add_argument("--default", metavar="NAME", help="the model for requests without a model name")
    models_dir_help = "serve the models in this directory too (the directory of `dragoman pull`)"
    add_repeatable(parser, "--models-dir", "DIR", models_dir_help)
    models_yaml_help = "serve the models of this file too (NAME: PATH); a change is picked up while the server runs"
    parser.add_argument("--models-yaml", metavar="FILE", help=models_yaml_help)
    parser.add_argument("--require-model", action="store_true", help="refuse requests without a model name")
    parser.add_argument(
        "--memory", metavar="SIZE", help="memory for all loaded models together, such as 12GiB (no limit)"
    )
    parser.add_argument(
        "--keep-alive", metavar="TIME", help="how long an unused model stays loaded, such as 10m (forever)"
    )
    parser.add_argument("--host", help="the address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, help="the port to listen on (8000)")
    add_repeatable(parser, "--api-key", "KEY", "require this key", dest="api_keys")
    parser.add_argument("--anonymous", action="store_true", help="allow callers without a key, on any address")
    parser.add_argument(
        "--workers", metavar="N", type=int, help="front-end processes (one for every four CPUs, at most 4)"
    )
    parser.add_argument("--socket", metavar="PATH", help="listen on this Unix socket instead of an address")
    parser.add_argument("--tls-certificate", metavar="FILE", help="serve HTTPS with this certificate (PEM)")
    parser.add_argument("--tls-key", metavar="FILE", help="and this private key")
    parser.add_argument("--strict", action="store_true", help="reject parameters that a model cannot honour")
    parser.add_argument(
        "--storage",
        metavar="ADDRESS",
        help="where responses, usage, files and batches are stored: a file (default: dragoman.db in Dragoman's home "
        "directory), postgresql://..., or memory",
    )
    parser.add_argument("--event-log", metavar="FILE", help="append one JSON line per request to this file")
    parser.add_argument("--record", metavar="FILE", help="append requests with their replies, prompts included")
    parser.add_argument(
        "--layout", choices=("auto", "as-is"), help="as-is: ignore what `dragoman tune` recorded; auto: has no effect"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    add_working_directory()
    is_custom = arguments.engine is not None and not _loads_models(arguments.engine)
    engines = [_create_engine(arguments.engine)] if is_custom else []
    if arguments.engine is not None and not engines and not (arguments.models or arguments.model):
        raise ConfigError(f"--engine {arguments.engine}: give --model NAME=SOURCE too")
    config = _load(arguments, engines)
    settings = config.settings
    # Imported late: the other commands, and errors in flags, need no server modules.
    from dragoman.server import serve
    from dragoman.server.preflight_checks import check_exposure, check_listen_address, find_diagnostics

    diagnostics = find_diagnostics(settings)
    _raise_errors(config, [found for found in diagnostics if found.level == "error"])
    check_exposure(settings)
    check_listen_address(settings)
    _fetch_models(settings)

    running = settings

    def reload() -> Settings:
        nonlocal running
        new = _load(arguments, engines)
        # A model that is already unservable does not keep other changes from being applied.
        known = [found for found in find_diagnostics(running) if found.level == "unservable"]
        found = find_diagnostics(new.settings)
        _raise_errors(new, [problem for problem in found if problem.level != "warning" and problem not in known])
        for warning in new.locations.format(found):
            log.warning("%s", warning)
        running = new.settings
        return running

    serve.run(settings, engines, reload, config.locations.format(diagnostics))
    return 0


def _loads_models(name: str) -> bool:
    """Whether this is a built-in engine that loads the source of `--model`."""
    return name in ENGINES and "path" in engine_class(name).Options.__struct_fields__


def _create_engine(name: str) -> Engine:
    cls = engine_class(name)
    try:
        inspect.signature(cls).bind()
    except TypeError as error:
        if name in ENGINES:
            raise ConfigError(f"--engine {name}: it needs an entry in a configuration file, under `models:`") from error
        raise ConfigError(f"--engine {name}: {cls.__name__}() must work without arguments ({error})") from error
    return cls()


def _load(arguments: argparse.Namespace, engines: Sequence[Engine]) -> LoadedConfig:
    same = {name: getattr(arguments, name) for name in Flags.__struct_fields__ if name not in ("models", "engine")}
    models = [*arguments.models, *arguments.model]
    flags = Flags(models=models, engine=None if engines else arguments.engine, **same)
    offered = [model.name for engine in engines for model in known_models(engine)] if engines else None
    if not all(arguments.api_keys):
        raise ConfigError("--api-key is empty")
    config = load(arguments.config, flags, os.environ, offered=offered)
    for model in config.settings.models:
        if offered and model.name in offered:
            raise ConfigError(f"model {model.name}: the engine {arguments.engine} offers this name too; rename one")
    return config


def _raise_errors(config: LoadedConfig, errors: Sequence[Diagnostic]) -> None:
    if errors:
        raise ConfigError(*config.locations.format(errors))


def _fetch_models(settings: Settings) -> None:
    """Download the default model. The others are downloaded on their first request."""
    for model in settings.models:
        is_default = model is settings.default_model
        try:
            if model.file is None or sources.locate(model.file) is not None:
                continue
            if is_default:
                sources.fetch(model.file, print_progress)
                continue
        except ConfigError as error:
            if is_default:
                raise ConfigError(f"model {model.name}: {error}") from error
            # The server logs what is wrong with the other models.
            continue
        source = remove_credentials(model.file)
        print_progress(f"model {model.name} will be downloaded on its first request ({source})")
