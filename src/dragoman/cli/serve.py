"""`dragoman serve`: everything that can be wrong is found before the server starts, cheapest first."""

import argparse
import inspect
import logging
import os
import sys
from collections.abc import Sequence

from dragoman.cli import layout
from dragoman.cli.diagnostics import in_the_way, unservable
from dragoman.cli.settings import look_here
from dragoman.config.loading import Flags, Loaded, load
from dragoman.config.locations import Mistake
from dragoman.config.settings import Settings
from dragoman.config.warnings import doubts
from dragoman.core.engine import Engine
from dragoman.core.errors import ConfigError
from dragoman.core.urls import public
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

Without --config the file is $DRAGOMAN_CONFIG, or ./dragoman.yaml if there is one; without any model, smollm2 is served.
Flags win over the environment ($DRAGOMAN_API_KEY), the environment over the file.
"""


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "serve",
        help="serve models over HTTP",
        description="Serve models to programs that speak the OpenAI or the Anthropic API. Missing ones are downloaded.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    many = "may be given several times"
    parser.add_argument(
        "models",
        metavar="MODEL",
        nargs="*",
        help="the same as --model; one without a name has that of its file or folder",
    )
    parser.add_argument("--config", metavar="FILE", help="a configuration file (YAML or JSON)")
    parser.add_argument(
        "--model",
        metavar="NAME=SOURCE",
        action="append",
        default=[],
        help=f"serve a model under this name; SOURCE is a path to a GGUF file, {sources.KINDS}, or the folder of a "
        "model for vllm, where that is installed. "
        f"NAME alone is a built-in model ({', '.join(sources.BUILT_IN)}); {many}",
    )
    parser.add_argument(
        "--alias",
        metavar="PATTERN=NAME",
        action="append",
        default=[],
        help=f"answer to other names as well; * and ? stand for anything; {many}",
    )
    parser.add_argument(
        "--engine",
        metavar="MODULE:CLASS",
        help="serve an engine of your own, found from this folder; or vllm (or llama): that of every --model",
    )
    parser.add_argument("--default", metavar="NAME", help="the model for requests that name none")
    parser.add_argument(
        "--models-dir",
        metavar="DIR",
        action="append",
        default=[],
        help=f"serve the models in this folder too (that of `dragoman pull`); {many}",
    )
    parser.add_argument(
        "--memory", metavar="SIZE", help="what all loaded models may take together, as 12GiB (no limit)"
    )
    parser.add_argument("--keep-alive", metavar="TIME", help="how long an unused model stays loaded, as 10m (forever)")
    parser.add_argument("--host", help="the address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, help="the port to listen on (8000)")
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        action="append",
        default=[],
        help=f"let in only callers with this key; {many}",
    )
    parser.add_argument("--anonymous", action="store_true", help="let in callers without a key, whatever the address")
    parser.add_argument(
        "--workers", metavar="N", type=int, help="processes that clients talk to (one for every four CPUs, at most 4)"
    )
    parser.add_argument("--socket", metavar="PATH", help="listen on this Unix socket instead of an address")
    parser.add_argument("--tls-certificate", metavar="FILE", help="serve HTTPS with this certificate (PEM)")
    parser.add_argument("--tls-key", metavar="FILE", help="and this private key")
    parser.add_argument("--strict", action="store_true", help="refuse parameters that a model cannot honour")
    parser.add_argument("--event-log", metavar="FILE", help="append one JSON line per request to this file")
    layout.add(parser, "GGUF models")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    look_here()
    is_own = arguments.engine is not None and not _takes_models(arguments.engine)
    engines = [_own_engine(arguments.engine)] if is_own else []
    if arguments.engine is not None and not engines and not _models(arguments):
        raise ConfigError(f"--engine {arguments.engine}: of which model? Give --model NAME=SOURCE too")
    loaded = _loaded(arguments, engines)
    settings = loaded.settings
    # Imported only here: the other commands and mistakes in flags need no server.
    from dragoman.server import serve
    from dragoman.server.preflight_checks import check_exposure, check_place

    _refuse(loaded, in_the_way(settings))
    check_exposure(settings)
    check_place(settings)
    _fetch_models(settings)

    running = settings

    def reread() -> Settings:
        nonlocal running
        written = _loaded(arguments, engines)
        # What is wrong with the configuration that holds is no reason to hold on to the rest of it.
        known = unservable(running)
        found = unservable(written.settings)
        _refuse(written, [*in_the_way(written.settings), *(mistake for mistake in found if mistake not in known)])
        for words in written.places.told([*found, *doubts(written.settings)]):
            log.warning("%s", words)
        running = written.settings
        return running

    serve.run(settings, engines, reread, loaded.places.told([*unservable(settings), *doubts(settings)]))
    return 0


def _takes_models(name: str) -> bool:
    """Whether it is one of ours that runs what `--model` names."""
    return name in ENGINES and "path" in engine_class(name).Options.__struct_fields__


def _models(arguments: argparse.Namespace) -> list[str]:
    return [*arguments.models, *arguments.model]


def _own_engine(name: str) -> Engine:
    cls = engine_class(name)
    try:
        inspect.signature(cls).bind()
    except TypeError as error:
        if name in ENGINES:
            raise ConfigError(f"--engine {name}: it needs an entry in a configuration file, under `models:`") from error
        raise ConfigError(f"--engine {name}: {cls.__name__} must be made without arguments ({error})") from error
    return cls()


def _loaded(arguments: argparse.Namespace, engines: Sequence[Engine]) -> Loaded:
    flags = Flags(
        models=_models(arguments),
        engine=None if engines else arguments.engine,
        aliases=arguments.alias,
        default=arguments.default,
        models_dir=arguments.models_dir,
        memory=arguments.memory,
        keep_alive=arguments.keep_alive,
        host=arguments.host,
        port=arguments.port,
        api_keys=arguments.api_key,
        strict=arguments.strict,
        event_log=arguments.event_log,
        workers=arguments.workers,
        socket=arguments.socket,
        tls_certificate=arguments.tls_certificate,
        tls_key=arguments.tls_key,
        anonymous=arguments.anonymous,
        layout=arguments.layout,
    )
    offered = [model.name for engine in engines for model in engine.models()]
    if engines and not offered:
        raise ConfigError(f"--engine {arguments.engine}: it offers no models; `models()` must name at least one")
    if not all(arguments.api_key):
        raise ConfigError("--api-key is empty")
    loaded = load(arguments.config, flags, os.environ, offered=offered)
    for model in loaded.settings.models:
        if model.name in offered:
            raise ConfigError(f"model {model.name}: the engine {arguments.engine} offers this name too; rename one")
    return loaded


def _refuse(loaded: Loaded, mistakes: Sequence[Mistake]) -> None:
    if mistakes:
        raise ConfigError(*loaded.places.told(mistakes))


def _fetch_models(settings: Settings) -> None:
    """The default model before anything else; another one that is not here is downloaded when it is first asked for."""
    wanted = settings.default or (settings.models[0].name if settings.models else "")
    for model in settings.models:
        if model.file is None:
            continue
        try:
            is_here = sources.locate(model.file) is not None
            if not is_here and wanted.lower() in (name.lower() for name in model.names):
                sources.fetch(model.file, _say)
                is_here = True
        except ConfigError as error:
            raise ConfigError(f"model {model.name}: {error}") from error
        if not is_here:
            _say(f"model {model.name} is downloaded when it is first asked for ({public(model.file)})")


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
