"""Errors and warnings about settings that were read: their text, and the file, line and key they belong to.

    host    := name | address                               hosts := name | address | "[" address of IPv6 "]"
    origin  := "*" | scheme "://" host [":" port]
    traces  := ("http" | "https") "://" host [":" port] [path]

A setting from a file is reported with the file, its line and its key. A setting from a flag, or a default, is reported
with its key.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from dragoman.config.config_file import find_known_key
from dragoman.config.model_spec import ModelSpec
from dragoman.config.settings import Settings
from dragoman.core.errors import ConfigError
from dragoman.engines import engine_class
from dragoman.engines.llama.options import AUTO_LAYOUT_WARNING
from dragoman.files import sources

_MODEL = re.compile(r"models\.(.+?)(\.source|\.engine|\.(adapters|args)\..*)?")
_HOST = re.compile(r"[A-Za-z0-9._:%-]+")
_HOST_NAME = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]")
_ORIGIN = re.compile(r"\*|null|[A-Za-z][A-Za-z0-9+.-]*://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]+)?/?")
_WILDCARD = re.compile(r"[*?]")


class Diagnostic(msgspec.Struct, frozen=True):
    """A problem with one setting; `key` is written as `models.mine.source`."""

    key: str
    message: str


class Locations(msgspec.Struct, frozen=True):
    """The lines of a file's keys, and the keys that flags override."""

    file: str
    lines: Mapping[str, int]
    by_flag: frozenset[str] = frozenset()

    def format(self, diagnostics: Iterable[Diagnostic]) -> list[str]:
        """Return one line of text for each, ordered by line number; those without a line come first."""
        return [text for _, text in sorted(map(self._format, diagnostics), key=lambda entry: entry[0])]

    def _format(self, diagnostic: Diagnostic) -> tuple[int, str]:
        key = self._written_key(diagnostic.key)
        known = find_known_key(key, self.lines.keys() | self.by_flag)
        if known and known not in self.by_flag:
            return self.lines[known], f"{self.file}:{self.lines[known]}: {key}: {diagnostic.message}"
        model = _MODEL.fullmatch(diagnostic.key)
        return 0, f"{f'model {model[1]}' if model else diagnostic.key}: {diagnostic.message}"

    def _written_key(self, key: str) -> str:
        """Return the key as it is in the file: `source` may be `path` or the whole entry, and a list one string."""
        model, directory = key.removesuffix(".source"), key.removesuffix("[0]")
        forms = [key, *((f"{model}.path", model) if model != key else (directory,))]
        return next((form for form in forms if form in self.lines), key)


def find_invalid_text(settings: Settings) -> Iterator[Diagnostic]:
    """Yield the strings that have the right type but the wrong form."""
    if not _HOST.fullmatch(settings.host):
        yield Diagnostic("host", f"expected a name or an address to listen on, as 127.0.0.1, got {settings.host!r}")
    for at, name in enumerate(settings.hosts or ()):
        if not _HOST_NAME.fullmatch(name):
            message = f"expected a name without scheme, port and path, as llm.example or [::1], got {name!r}"
            yield Diagnostic(f"hosts[{at}]", message)
    for at, origin in enumerate(settings.cors.origins):
        if not _ORIGIN.fullmatch(origin):
            message = f"expected an origin, as https://app.example or http://localhost:3000, or *, got {origin!r}"
            yield Diagnostic(f"cors.origins[{at}]", message)
    traces = settings.telemetry.traces
    if traces is not None and not _is_http_url(traces.endpoint):
        message = f"expected an address, as http://127.0.0.1:4318/v1/traces, got {traces.endpoint!r}"
        yield Diagnostic("telemetry.traces.endpoint", message)


def _is_http_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def find_warnings(settings: Settings) -> Iterator[Diagnostic]:
    """Yield settings that are valid but probably unintended. The server starts anyway."""
    for at, directory in enumerate(settings.models_dir or ()):
        if not Path(directory).expanduser().is_dir():
            yield Diagnostic(f"models_dir[{at}]", f"there is no folder {directory} yet, so it has no models")
    for pattern in settings.aliases:
        literal = _WILDCARD.split(pattern)[0]
        owner = next((model for model in settings.models if model.has(literal)), None)
        if owner is not None:
            message = f"never used: requests for names that begin with {owner.name}/ go to {owner.name}"
            yield Diagnostic(f"aliases.{pattern}", message)
    if settings.layout == "auto":
        yield Diagnostic("layout", AUTO_LAYOUT_WARNING.format("MODEL"))
    for model in settings.models:
        yield from (Diagnostic(f"models.{model.name}.{key}", message) for key, message in _engine_warnings(model))


def _engine_warnings(model: ModelSpec) -> Sequence[tuple[str, str]]:
    """Ask the engine, which reads the model file if it is present."""
    engine = engine_class(model.engine)
    try:
        path = None if model.file is None else sources.locate(model.file)
        options = dict(model.options) if model.source is None else {**model.options, "path": str(path or model.source)}
        return engine.doubts(msgspec.convert(options, engine.Options))
    except (ConfigError, msgspec.ValidationError):
        # These are reported as errors.
        return ()
