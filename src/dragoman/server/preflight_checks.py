"""Checks a loaded configuration before the server starts: models, files, exposure without keys, the listen address.

`dragoman check` reports all diagnostics. `dragoman serve` refuses to start with errors, and logs the rest as warnings.
A reload is also refused if it would make a model unservable.
"""

import ipaddress
import os
import re
import socket
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec

from dragoman.config.diagnostics import Diagnostic, Level
from dragoman.config.loading import default_address
from dragoman.config.model_spec import ModelSpec
from dragoman.config.sections import MEMORY, POSTGRES, BudgetLimit, Keys, Tls
from dragoman.config.settings import Settings
from dragoman.core.errors import ConfigError
from dragoman.engines import engine_class
from dragoman.engines.llama.hardware import cpus
from dragoman.engines.llama.options import AUTO_LAYOUT_WARNING
from dragoman.files.discovery import Discovery, list_names
from dragoman.files.gguf import check_model
from dragoman.models.catalog import scan_folders
from dragoman.server.auth.jwt import JwtVerifier
from dragoman.server.http.server import bind_sockets, tls_context
from dragoman.server.routes import build_routes
from dragoman.storage.keys import KeyStore, store_path

WORKERS_PER_CPU, WORKER_MIB = 4, 32
"""Warn above this many workers per CPU; memory of an idle worker in MiB."""
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


def find_diagnostics(settings: Settings) -> list[Diagnostic]:
    """Return all errors and warnings about settings that were loaded, and about the files that they name."""
    default = settings.default_model
    found = [diagnostic for model in settings.models for diagnostic in _check_model(model, model is default)]
    found += _check_protocols(settings)
    return [*found, *_check_keys(settings.keys), *_check_files(settings), *_find_warnings(settings)]


def _check_model(model: ModelSpec, is_default: bool) -> Iterator[Diagnostic]:
    """Without its files, the default model is an error; any other one is unservable."""
    key = f"models.{model.name}"
    level: Level = "error" if is_default else "unservable"
    if model.ignored_keys:
        message = f"{model.location}: model {model.name}: ignored keys: {', '.join(model.ignored_keys)}"
        yield Diagnostic("models_yaml", message, "warning")
    adapters = {name: model.options["adapters"][name] for name in model.adapters}
    for name, entry in adapters.items():
        adapter = Path(entry if isinstance(entry, str) else entry["path"]).expanduser()
        if not (adapter.is_dir() if model.file is None else adapter.is_file()):
            yield Diagnostic(f"{key}.adapters.{name}", f"adapter not found: {adapter}", level)
    engine = engine_class(model.engine)
    try:
        path = model.locate()
        if path is not None and engine.loads_gguf:
            check_model(path)
    except ConfigError as error:
        yield Diagnostic(f"{key}.source", str(error), level)
        return
    try:
        options = model.build_options(path)
    except ConfigError as error:
        yield Diagnostic(f"{key}.source", str(error))
        return
    for name, message in engine.find_option_errors(options):
        yield Diagnostic(f"{key}.{name}" if name else key, message, "unservable")
    for name, message in engine.find_option_warnings(options):
        yield Diagnostic(f"{key}.{name}", message, "warning")


def _check_protocols(settings: Settings) -> Iterator[Diagnostic]:
    try:
        build_routes(settings)
    except ConfigError as error:
        yield Diagnostic("protocols", str(error))


def _check_keys(keys: Keys) -> Iterator[Diagnostic]:
    if keys.jwt is not None:
        try:
            JwtVerifier(keys.jwt, keys.limits)
        except ConfigError as error:
            yield Diagnostic("keys.jwt.key_file", str(error))
    path = store_path(keys)
    if keys.store is not None and not path.parent.is_dir():
        yield Diagnostic("keys.store", f"there is no folder {path.parent}; `dragoman keys create NAME` makes it")
        return
    try:
        KeyStore(path).all()
    except ConfigError as error:
        yield Diagnostic("keys.store", str(error))


def _check_files(settings: Settings) -> Iterator[Diagnostic]:
    if settings.tls is not None:
        yield from _check_tls(settings.tls)
    if settings.socket is not None and not Path(settings.socket).parent.is_dir():
        yield Diagnostic("socket", f"there is no folder {Path(settings.socket).parent}")
    address = settings.storage.address
    if address not in (MEMORY, default_address()) and not address.startswith(POSTGRES) and Path(address).is_dir():
        yield Diagnostic("storage", f"{address} is a folder; expected a file")
    for key, name in (("event_log", settings.event_log), ("record", settings.record)):
        path = None if name is None else Path(name)
        if path is None:
            continue
        if path.is_dir():
            yield Diagnostic(key, f"{path} is a folder; expected a file")
        elif not path.parent.is_dir():
            yield Diagnostic(key, f"there is no folder {path.parent}")
        elif not os.access(path if path.exists() else path.parent, os.W_OK):
            yield Diagnostic(key, f"{path} cannot be written: permission denied")
    if settings.record is not None and settings.record == settings.event_log:
        yield Diagnostic("record", f"{settings.record} is the event log; give the recording a file of its own")


def _check_tls(tls: Tls) -> Iterator[Diagnostic]:
    files = {"tls.certificate": tls.certificate, "tls.key": tls.key}
    missing = {key: path for key, path in files.items() if not Path(path).is_file()}
    yield from (Diagnostic(key, f"there is no file {path}") for key, path in missing.items())
    if not missing:
        try:
            tls_context(tls)
        except ConfigError as error:
            yield Diagnostic("tls", str(error))


def _find_warnings(settings: Settings) -> Iterator[Diagnostic]:
    for at, directory in enumerate(settings.models_dir or ()):
        if not Path(directory).expanduser().is_dir():
            yield Diagnostic(f"models_dir[{at}]", f"there is no folder {directory} yet, so it has no models", "warning")
    for pattern in settings.aliases:
        literal = re.split("[*?]", pattern)[0]
        owner = next((model.name for model in settings.models if model.includes(literal)), None)
        if owner is not None:
            message = f"never used: requests for names that begin with {owner}/ go to {owner}"
            yield Diagnostic(f"aliases.{pattern}", message, "warning")
    if settings.layout == "auto":
        yield Diagnostic("layout", AUTO_LAYOUT_WARNING.format("MODEL"), "warning")
    isolated = [model.name for model in settings.models if model.options.get("isolate") is True]
    if isolated and not _has_keys(settings):
        message = "has no effect without API keys: all callers share one identity"
        yield from (Diagnostic(f"models.{name}.isolate", message, "warning") for name in isolated)
    yield from _find_price_warnings(settings)
    workers = settings.workers or 1
    if workers > WORKERS_PER_CPU * cpus():
        message = f"{workers} processes are too many for {cpus()} CPUs; each needs {WORKER_MIB} MiB or more"
        yield Diagnostic("workers", message, "warning")


def _find_price_warnings(settings: Settings) -> Iterator[Diagnostic]:
    for pattern in find_unknown_models(settings, tuple(settings.prices)):
        message = "matches no configured model; names of aliases do not count"
        yield Diagnostic(f"prices.{pattern}", message, "warning")
    if settings.prices:
        return
    limits: dict[str, Sequence[BudgetLimit]] = {
        "budgets": settings.budgets,
        "keys.limits.budgets": settings.keys.limits.budgets,
    }
    for key, budgets in limits.items():
        for at, budget in enumerate(budgets):
            if budget.cost is not None:
                message = "has no effect without `prices`: all requests cost nothing"
                yield Diagnostic(f"{key}[{at}].cost", message, "warning")


def find_unknown_models(settings: Settings, patterns: Sequence[str]) -> list[str]:
    """The patterns that match no model. Without any configured model, the flags of the server name them."""
    names = {name.lower() for spec in settings.models for name in spec.names} | list_names(settings.folders)
    opened = [f"{spec.name.lower()}/" for spec in settings.models if spec.is_open]

    def is_known(pattern: str) -> bool:
        if opened and pattern.startswith((*opened, "*")):
            return True
        return any(fnmatchcase(name, pattern) for name in names)

    return [pattern for pattern in patterns if names and not is_known(pattern.lower())]


def check_exposure(settings: Settings) -> None:
    """Refuse to listen on a public address without keys."""
    for problem in find_exposure(settings):
        raise ConfigError(problem.message)


def find_exposure(settings: Settings) -> list[Diagnostic]:
    """Return the error that the server listens on a public address without keys, if it does."""
    if settings.socket is not None or _is_loopback(settings.host) or settings.keys.anonymous or _has_keys(settings):
        return []
    message = (
        f"{settings.host} can be reached from other machines, and no API key is set; "
        "give --api-key KEY, set DRAGOMAN_API_KEY, create one with `dragoman keys create`, "
        "or allow all callers with --anonymous"
    )
    return [Diagnostic("host", message)]


def find_damaged_files(settings: Settings) -> list[Diagnostic]:
    """Return a warning for each damaged file in the models directories. The server logs the same when it starts."""
    discovery = Discovery(settings.folders)
    configured = scan_folders(discovery, settings.models)
    problems = (problem for path, problem in discovery.problems.items() if path not in configured)
    return [Diagnostic("models_dir", f"not served: {problem}", "warning") for problem in problems]


def _has_keys(settings: Settings) -> bool:
    return bool(settings.api_keys or settings.keys.jwt or KeyStore(store_path(settings.keys)).all())


def check_listen_address(settings: Settings) -> None:
    """Check that the server can listen on its address with its TLS files."""
    if settings.tls is not None:
        tls_context(settings.tls)
    if settings.socket is not None:
        _check_socket(Path(settings.socket))
        return
    # Front ends share their port, so only this bind detects a server that uses it.
    for listener in bind_sockets(settings.host, settings.port):
        listener.close()


def _check_socket(path: Path) -> None:
    """Check that a Unix socket can be created. The stale socket of a killed server is removed."""
    if not path.parent.is_dir():
        raise ConfigError(f"socket {path}: there is no folder {path.parent}")
    if not path.exists():
        return
    if not path.is_socket():
        raise ConfigError(f"socket {path}: the path exists and is not a socket; remove it or choose another")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        except OSError as error:
            raise ConfigError(f"socket {path}: {error.strerror or error}") from error
        else:
            raise ConfigError(f"socket {path}: another server uses it; stop it or choose another path")


def with_hosts(settings: Settings) -> Settings:
    """Allow only loopback names in the Host header of a loopback server. This prevents DNS rebinding."""
    if settings.hosts is not None or not (settings.socket or _is_loopback(settings.host)):
        return settings
    return msgspec.structs.replace(settings, hosts=(*LOOPBACK_NAMES, settings.host))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
