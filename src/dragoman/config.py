"""What the operator wants, read once at the start: file, environment, flags.

    file     := --config, or $DRAGOMAN_CONFIG, or ./dragoman.yaml if there is one (JSON is YAML)
    models   := name: source
              | name: {engine: llama, source or path: SOURCE, ...the engine's own options}
    aliases  := pattern: name              `gpt-*: smollm2`
    default, host, port, api_keys, strict, event_log, hosts, limits, grace_seconds

Rules
1. A flag wins over the environment, the environment over the file.
2. Nothing configured means the built-in model `smollm2`.
3. A mistake is one line with the file, the line and the key. Unknown keys are mistakes.
4. A relative path in a file starts from the folder of that file.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml

from dragoman.engines import ENGINES, engine_class
from dragoman.errors import ConfigError
from dragoman.formats import named
from dragoman.sources import BUILT_IN, is_path

FILE_NAME = "dragoman.yaml"
MODEL_NAME = re.compile(r"(?!/)(?!.*\.\.)[A-Za-z0-9._:/-]+")
ALIAS_NAME = re.compile(r"(?!/)(?!.*\.\.)[A-Za-z0-9._:/*?-]+")

Count = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Word = Annotated[str, msgspec.Meta(min_length=1)]


class ModelSpec(msgspec.Struct, frozen=True):
    """`options` are for the engine; `source` says where its file comes from."""

    name: str
    engine: str
    source: str | None = None
    options: Mapping[str, Any] = {}

    @property
    def is_open(self) -> bool:
        """Whether it stands for all models that its engine finds, each called NAME/MODEL."""
        return self.options.get("models") == "all"

    def has(self, name: str) -> bool:
        """Whether that may be one of them."""
        return self.is_open and name.lower().startswith(f"{self.name.lower()}/")


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    body_bytes: Count = 32 * 1024 * 1024
    header_bytes: Count = 32 * 1024
    body_seconds: Seconds = 30.0
    queue: Annotated[int, msgspec.Meta(ge=0)] = 64
    """Requests that may wait for one model."""
    queue_seconds: Seconds = 60.0
    stall_seconds: Seconds = 600.0
    """Silence of an engine after which a request is given up."""
    write_seconds: Seconds = 30.0
    """How long a client may leave what it was sent unread."""
    keepalive_seconds: Seconds = 10.0
    choices: Count = 128
    stop_strings: Count = 32
    kept_responses: Count = 1000
    """Responses that are kept for a while, so that a later request can go on from one."""
    kept_bytes: Count = 64 * 1024 * 1024
    kept_seconds: Seconds = 24 * 3600.0


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    models: tuple[ModelSpec, ...] = ()
    aliases: Mapping[str, str] = {}
    default: str | None = None
    host: Word = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8000
    api_keys: tuple[Word, ...] = ()
    strict: bool = False
    event_log: Word | None = None
    hosts: tuple[Word, ...] | None = None
    """The names by which clients may call the server; None: decided by `host`."""
    limits: Limits = Limits()
    grace_seconds: Annotated[float, msgspec.Meta(ge=0)] = 30.0


class Flags(msgspec.Struct, frozen=True):
    """What the command line says; None and empty mean that it does not."""

    models: Sequence[str] = ()
    aliases: Sequence[str] = ()
    default: str | None = None
    host: str | None = None
    port: int | None = None
    api_keys: Sequence[str] = ()
    strict: bool = False
    event_log: str | None = None


def load_settings(
    path: str | None, flags: Flags, environ: Mapping[str, str], *, offered: Sequence[str] = ()
) -> Settings:
    """`offered` are models of engines that the caller brings along; they need no entry anywhere."""
    file = _read(path or environ.get("DRAGOMAN_CONFIG") or (FILE_NAME if Path(FILE_NAME).is_file() else None))
    models = file.models() | dict(map(_model_flag, flags.models))
    if not models and not offered:
        models = {"smollm2": ModelSpec("smollm2", "llama", "smollm2")}
    aliases = dict(map(_alias_flag, flags.aliases))
    settings = file.settings()
    if flags.port is not None and not 0 <= flags.port <= 65535:
        raise ConfigError(f"--port {flags.port}: expected a number from 0 to 65535")
    key = environ.get("DRAGOMAN_API_KEY")
    result = Settings(
        models=tuple(models.values()),
        aliases=aliases | {pattern: name for pattern, name in file.aliases().items() if pattern not in aliases},
        default=flags.default or settings.default,
        host=flags.host or settings.host,
        port=settings.port if flags.port is None else flags.port,
        api_keys=tuple(flags.api_keys) or ((key,) if key else settings.api_keys),
        strict=flags.strict or settings.strict,
        event_log=flags.event_log or settings.event_log,
        hosts=settings.hosts,
        limits=settings.limits,
        grace_seconds=settings.grace_seconds,
    )
    _check_names(result, offered, flags, file)
    return result


def _check_names(settings: Settings, offered: Sequence[str], flags: Flags, file: "_File") -> None:
    """Aliases and the default name models that there are. Upper and lower case are the same here."""
    names = [*(model.name for model in settings.models), *offered]
    known = {name.lower() for name in names}
    models = f"models: {', '.join(names)}"
    by_flag = dict(map(_alias_flag, flags.aliases))
    for pattern, name in settings.aliases.items():
        is_known = name.lower() in known or any(model.has(name) for model in settings.models)
        if is_known and pattern.lower() not in known:
            continue
        wrong = "a model has this name already" if is_known else f"no model is called {name!r}; {models}"
        if pattern in by_flag:
            raise ConfigError(f"--alias {pattern}={name}: {wrong}")
        raise file.error(f"aliases.{pattern}", wrong)
    if settings.default is not None and settings.default.lower() not in known:
        wrong = f"no model is called {settings.default!r}; {models}"
        raise ConfigError(f"--default: {wrong}") if flags.default else file.error("default", wrong)


def _model_flag(flag: str) -> tuple[str, ModelSpec]:
    name, equals, source = flag.partition("=")
    if not equals and name in BUILT_IN:
        source = name
    if not source or not MODEL_NAME.fullmatch(name):
        raise ConfigError(f"--model {flag}: expected NAME=SOURCE, or a built-in name ({', '.join(BUILT_IN)})")
    return name, ModelSpec(name, "llama", source)


def _alias_flag(flag: str) -> tuple[str, str]:
    pattern, _, name = flag.partition("=")
    if not name or not ALIAS_NAME.fullmatch(pattern):
        raise ConfigError(f"--alias {flag}: expected PATTERN=NAME, as in 'gpt-*=smollm2'")
    return pattern, name


class _File:
    """A configuration file as plain values, and the line of each key (`models.smollm2.slots`)."""

    def __init__(self, name: str, values: dict[str, Any], lines: Mapping[str, int]) -> None:
        self.name = name
        self.values = values
        self.lines = lines

    def error(self, key: str, words: str) -> ConfigError:
        known = key
        while known and known not in self.lines:
            known = re.sub(r"(\.[^.\[]*|\[[^\[]*|^[^.\[]*)$", "", known)
        return ConfigError(f"{self.name}:{self.lines.get(known, 1)}: {key}: {words}")

    def convert(self, value: Any, wanted: Any, key: str) -> Any:
        """msgspec's findings, in the place and the words of the file."""
        try:
            return msgspec.convert(value, wanted)
        except msgspec.ValidationError as error:
            what, _, place = str(error).partition(" - at `$")
            inner = place.removesuffix("`")
            where = (key + inner) if key else inner.lstrip(".")
            missing = re.fullmatch(r"Object missing required field `(.+)`", what)
            unknown = re.fullmatch(r"Object contains unknown field `(.+)`", what)
            if missing:
                raise self.error(where, f"{missing[1]} is missing") from error
            if unknown:
                raise self.error(f"{where}.{unknown[1]}", "unknown key") from error
            raise self.error(where, what[0].lower() + what[1:].replace("`", "")) from error

    def check_keys(self, keys: Mapping[str, Any], known: Sequence[str], key: str = "") -> None:
        for name in keys:
            if name not in known:
                raise self.error(f"{key}.{name}" if key else name, f"unknown key; keys: {', '.join(known)}")

    def mapping(self, key: str) -> dict[str, Any]:
        value = self.values.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.error(key, f"expected a mapping, got {_kind(value)}")
        return value

    def settings(self) -> Settings:
        self.check_keys(self.values, Settings.__struct_fields__)
        self.check_keys(self.mapping("limits"), Limits.__struct_fields__, "limits")
        apart = ("models", "aliases")
        plain = {key: value for key, value in self.values.items() if key not in apart and value is not None}
        converted: Settings = self.convert(plain, Settings, "")
        return converted

    def aliases(self) -> dict[str, str]:
        for pattern, name in self.mapping("aliases").items():
            if not ALIAS_NAME.fullmatch(pattern):
                raise self.error(f"aliases.{pattern}", "an alias has letters, digits and . _ - : / * ? only")
            self.convert(name, str, f"aliases.{pattern}")
        return self.mapping("aliases")

    def models(self) -> dict[str, ModelSpec]:
        models: dict[str, ModelSpec] = {}
        seen: dict[str, str] = {}
        for name, entry in self.mapping("models").items():
            key = f"models.{name}"
            if not MODEL_NAME.fullmatch(name):
                raise self.error(key, "a model's name has letters, digits and . _ - : / only, and begins with no /")
            if name.lower() in seen:
                raise self.error(key, f"{seen[name.lower()]} is the same name but for its case")
            seen[name.lower()] = name
            models[name] = self.model(name, {} if entry is None else entry, key)
        return models

    def model(self, name: str, entry: Any, key: str) -> ModelSpec:
        if isinstance(entry, str):
            entry = {"source": entry}
        if not isinstance(entry, dict):
            raise self.error(key, f"expected a source or a mapping, got {_kind(entry)}")
        if "path" in entry and "source" in entry:
            raise self.error(f"{key}.path", "path and source are the same thing; give one of them")
        engine = self.convert(entry.get("engine", "llama"), Word, f"{key}.engine")
        given = "path" if "path" in entry else "source"
        source = self.convert(entry.get(given), Word | None, f"{key}.{given}")
        if source is None and engine == "llama" and name in BUILT_IN:
            source = name
        options = {option: value for option, value in entry.items() if option not in ("engine", "path", "source")}
        self.check_options(engine, source, options, key)
        return ModelSpec(name, engine, self.from_here(source), options)

    def check_options(self, engine: str, source: str | None, options: dict[str, Any], key: str) -> None:
        try:
            wanted = engine_class(engine).Options
        except ConfigError as error:
            raise self.error(f"{key}.engine", str(error)) from error
        takes_file = "path" in wanted.__struct_fields__
        if source is not None and not takes_file:
            raise self.error(f"{key}.source", f"the engine {engine} takes no source")
        own = [name for name in wanted.__struct_fields__ if name != "path"]
        self.check_keys(options, ["engine", *(["source", "path"] if takes_file else []), *own], key)
        if takes_file and source is None and "path" in _required(wanted):
            raise self.error(key, f"source is missing: a path, pypi:PACKAGE or a built-in name ({', '.join(BUILT_IN)})")
        self.convert(options if source is None else options | {"path": source}, wanted, key)
        if engine in ENGINES:
            self.check_format(wanted, options, f"{key}.format")

    def check_format(self, wanted: type[msgspec.Struct], options: dict[str, Any], key: str) -> None:
        """An engine's default may mean that it finds out by itself; anything else is a format that there is."""
        default = next((field.default for field in msgspec.structs.fields(wanted) if field.name == "format"), None)
        chosen: Any = options.get("format", default)
        try:
            if chosen != default:
                named(chosen)
        except ConfigError as error:
            raise self.error(key, str(error)) from error

    def from_here(self, source: str | None) -> str | None:
        if source is None or not is_path(source):
            return source
        return str(Path(self.name).expanduser().parent / Path(source).expanduser())


def _required(struct: type[msgspec.Struct]) -> list[str]:
    return [field.name for field in msgspec.structs.fields(struct) if field.required]


def _kind(value: Any) -> str:
    return {"dict": "mapping", "NoneType": "nothing"}.get(type(value).__name__, type(value).__name__)


def _read(path: str | None) -> _File:
    if path is None:
        return _File("", {}, {})
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the configuration {path} is not UTF-8 text") from error
    if path.endswith(".json"):
        # JSON may be indented with tabs and YAML may not; inside JSON's strings there are none.
        text = text.replace("\t", " ")
    return _parse(path, text)


def _parse(path: str, text: str) -> _File:
    lines: dict[str, int] = {}
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        values = None if root is None else _Reader(path, loader, lines).value(root, "")
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(f"{path}:{mark.line + 1 if mark else 1}: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: nested too deeply") from error
    if values is not None and not isinstance(values, dict):
        raise ConfigError(f"{path}:1: expected a mapping such as `models: ...`, got {_kind(values)}")
    return _File(path, values or {}, lines)


class _Reader:
    """YAML's nodes as values, keeping the lines that PyYAML's own constructor forgets."""

    def __init__(self, path: str, loader: yaml.SafeLoader, lines: dict[str, int]) -> None:
        self.path = path
        self.loader = loader
        self.lines = lines

    def value(self, node: yaml.Node, key: str) -> Any:
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, key)
        if isinstance(node, yaml.SequenceNode):
            return [self.item(inner, f"{key}[{index}]") for index, inner in enumerate(node.value)]
        plain = self.loader.construct_object(node)
        return self.text(plain, node, key) if isinstance(plain, str) else plain

    def text(self, plain: str, node: yaml.Node, key: str) -> str:
        """JSON escapes a character beyond the first 65,536 as two halves; PyYAML leaves it in them."""
        try:
            return plain.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self.path}:{node.start_mark.line + 1}: {key}: half a character") from error

    def item(self, node: yaml.Node, key: str) -> Any:
        self.lines[key] = node.start_mark.line + 1
        return self.value(node, key)

    def mapping(self, node: yaml.MappingNode, key: str) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            name = key_node.value
            line = key_node.start_mark.line + 1
            if key_node.tag != "tag:yaml.org,2002:str":
                shown = name if isinstance(name, str) else "this key"
                raise ConfigError(f'{self.path}:{line}: {key or shown}: a key is text; write "{shown}" in quotes')
            inner = f"{key}.{name}" if key else name
            if name in values:
                raise ConfigError(f"{self.path}:{line}: {inner}: given twice, first in line {self.lines[inner]}")
            self.lines[inner] = line
            values[name] = self.value(value_node, inner)
        return values
