"""Reads a configuration file into plain values, with the line of each key, and converts the values to settings.

An error is recorded and reading continues, so that one run reports all errors.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

import msgspec
import yaml

from dragoman.config.diagnostics import Diagnostic, Locations
from dragoman.core.choices import describe_choices
from dragoman.core.errors import ConfigError, parse_validation_error
from dragoman.files.sources import is_path

STRING_TAG = "tag:yaml.org,2002:str"
MERGE_TAG = "tag:yaml.org,2002:merge"
T = TypeVar("T")


def resolve_path(path: str, directory: Path) -> str:
    """Return the path, relative to the directory of the file that contains it."""
    return str(directory / Path(path).expanduser())


def resolve_source(source: str, directory: Path) -> str:
    """Return the source of a model; if it is a path, relative to the directory of the file that contains it."""
    return resolve_path(source, directory) if is_path(source) and "://" not in source else source


def join_key(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


class ConfigFile:
    """The values of a file, and the errors found in them and in the flags."""

    def __init__(self, values: dict[str, Any], locations: Locations, errors: Iterable[Diagnostic] = ()) -> None:
        self.values = values
        self.locations = locations
        self._errors = list(errors)

    @property
    def directory(self) -> Path:
        return Path(self.locations.file).expanduser().parent

    def add_error(self, key: str, message: str) -> None:
        self._errors.append(Diagnostic(key, message))

    def raise_errors(self) -> None:
        if self._errors:
            raise ConfigError(*self.locations.format(self._errors))

    def parse(self, value: T, parser: Callable[[T], Any], key: str) -> Any:
        """Return the parsed value. None if it is absent or invalid."""
        try:
            return None if value is None else parser(value)
        except ConfigError as error:
            self.add_error(key, str(error))
            return None

    def get_mapping(self, values: Mapping[str, Any], key: str) -> dict[str, Any]:
        return self.convert(values.get(key) or {}, dict[str, Any], key) or {}

    def check_keys(self, keys: Iterable[str], known: Iterable[str], key: str = "") -> None:
        known = list(known)
        for name in keys:
            if name not in known:
                self.add_error(join_key(key, name), f"unknown key; keys: {', '.join(known)}")

    def convert(self, value: Any, target: Any, key: str) -> Any:
        """Return the value as the target type; None if it is invalid. Of a struct, only invalid fields are left out.

        msgspec reports only the first error, so each part of the value is converted separately. In a struct, null
        means the default.
        """
        before = len(self._errors)
        options = get_args(target) if get_origin(target) in (Union, UnionType) else (target,)
        struct = next((kind for kind in options if isinstance(kind, type) and issubclass(kind, msgspec.Struct)), None)
        item = next((get_args(kind)[0] for kind in options if get_origin(kind) in (tuple, list)), None)
        entry = next((get_args(kind)[1] for kind in options if get_origin(kind) in (Mapping, dict)), None)
        if isinstance(value, dict) and struct is not None:
            return self._convert_struct(value, struct, key)
        if isinstance(value, list) and item is not None:
            value = [self.convert(part, item, f"{key}[{at}]") for at, part in enumerate(value)]
        elif isinstance(value, dict) and entry is not None:
            value = {name: self.convert(part, entry, f"{key}.{name}") for name, part in value.items()}
        return self._convert(value, target, key) if len(self._errors) == before else None

    def _convert_struct(self, values: dict[str, Any], struct: type[msgspec.Struct], key: str) -> Any:
        fields, before = msgspec.structs.fields(struct), len(self._errors)
        if struct.__struct_config__.forbid_unknown_fields:
            self.check_keys(values, struct.__struct_fields__, key)
        valid = {}
        for field in fields:
            if values.get(field.name) is not None:
                converted = self.convert(values[field.name], field.type, join_key(key, field.name))
                if converted is not None:
                    valid[field.name] = converted
            elif field.required:
                self.add_error(key, f"{field.name} is missing")
        if not all(field.name in valid for field in fields if field.required):
            return None
        if len(self._errors) == before:
            return self._convert(valid, struct, key)
        try:
            return msgspec.convert(valid, struct)
        except msgspec.ValidationError:
            # The rest lacks the fields with the errors that were reported.
            return None

    def _convert(self, value: Any, target: Any, key: str) -> Any:
        try:
            return msgspec.convert(value, target)
        except msgspec.ValidationError as error:
            path, message = parse_validation_error(error)
        field, _, rest = message.partition(": ")
        if rest and field in getattr(target, "__struct_fields__", ()):
            # The struct's __post_init__ names one of several fields that contradict each other.
            path, message = f".{field}", rest
        if message.startswith("expected "):
            message = message.replace("`", "").replace("object", "mapping").replace("array", "list")
        elif message.startswith("invalid enum value"):
            message += describe_choices(target, path)
        self.add_error((key + path).lstrip("."), message)
        return None


def read_config_file(path: str | None, flags: Mapping[str, str]) -> ConfigFile:
    """Read a file. `flags` are those of the command line, by the keys that they set."""
    if path is None:
        return ConfigFile({}, Locations(flags=flags))
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the configuration {path} is not UTF-8 text") from error
    if path.endswith(".json"):
        # YAML does not allow tabs as indentation. JSON strings cannot contain a raw tab.
        text = text.replace("\t", " ")
    try:
        reader = _NodeReader(yaml.SafeLoader(text))
        values = reader.read_document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(f"{path}:{mark.line + 1 if mark else 1}: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: nested too deeply") from error
    if values is not None and not isinstance(values, dict):
        raise ConfigError(f"{path}:1: expected a mapping such as `models: ...`, got {type(values).__name__}")
    return ConfigFile(values or {}, Locations(path, reader.lines, flags), reader.errors)


class _NodeReader:
    """Converts YAML nodes to values and records the line of each key, which PyYAML's own constructor drops."""

    def __init__(self, loader: yaml.SafeLoader) -> None:
        self.lines: dict[str, int] = {}
        self.errors: list[Diagnostic] = []
        self._loader = loader

    def read_document(self) -> Any:
        root = self._loader.get_single_node()
        return None if root is None else self._read(root, "")

    def _read(self, node: yaml.Node, key: str) -> Any:
        if isinstance(node, yaml.MappingNode):
            return self._read_mapping(node, key)
        if isinstance(node, yaml.SequenceNode):
            return [self._read_at(item, item, f"{key}[{at}]") for at, item in enumerate(node.value)]
        value = self._loader.construct_object(node)
        if isinstance(value, float) and math.isnan(value):
            raise _value_error(node, f"{key}: expected a number")
        if isinstance(value, str):
            try:
                # JSON escapes a character above U+FFFF as two surrogates, which PyYAML does not join.
                return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
            except UnicodeDecodeError:
                raise _value_error(node, f"{key}: lone surrogate") from None
        return value

    def _read_at(self, place: yaml.Node, node: yaml.Node, key: str) -> Any:
        self.lines[key] = place.start_mark.line + 1
        return self._read(node, key)

    def _read_mapping(self, node: yaml.MappingNode, key: str) -> dict[str, Any]:
        own: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for name, value in node.value:
            if name.tag == STRING_TAG and name.value in own:
                first = own[name.value][0].start_mark.line + 1
                self._add_error(join_key(key, name.value), f"given twice, first in line {first}", name)
            elif name.tag == STRING_TAG:
                own[name.value] = name, value
            elif name.tag != MERGE_TAG:
                shown = name.value if isinstance(name.value, str) else "this key"
                self._add_error(key or shown, f'keys must be strings; write "{shown}" in quotes', name)
        self._loader.flatten_mapping(node)
        merged = {name.value: (name, value) for name, value in node.value if name.tag == STRING_TAG}
        pairs = own | {name: pair for name, pair in merged.items() if name not in own}
        # An alias of this node finds its keys merged, without duplicates.
        node.value = list(pairs.values())
        return {name: self._read_at(place, value, join_key(key, name)) for name, (place, value) in pairs.items()}

    def _add_error(self, key: str, message: str, node: yaml.Node) -> None:
        self.errors.append(Diagnostic(key, message, line=node.start_mark.line + 1))


def _value_error(node: yaml.Node, message: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=message, problem_mark=node.start_mark)
