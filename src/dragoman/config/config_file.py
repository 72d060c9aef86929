"""Reads a configuration file into plain values, with the line of each key and all errors found.

An error is recorded and reading continues, so that one run reports all errors.
"""

import math
import re
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import msgspec
import yaml

from dragoman.core.errors import ConfigError
from dragoman.files.sources import is_path

MERGE_TAG = "tag:yaml.org,2002:merge"
STRING_TAG = "tag:yaml.org,2002:str"
MAX_VALUES = 50_000
_LAST_PART = re.compile(r"(\.[^.\[]*|\[[^\[]*|^[^.\[]*)$")


def resolve_path(path: str, directory: Path) -> str:
    """Return the path, relative to the directory of the file that contains it."""
    return str(directory / Path(path).expanduser())


def join_key(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def find_known_key(key: str, known: Container[str]) -> str:
    """Return the key, or its nearest known parent, or an empty string."""
    while key and key not in known:
        key = _LAST_PART.sub("", key)
    return key


class ConfigFile:
    """`lines` maps each key, such as `models.smollm2.slots`, to its line."""

    def __init__(self, name: str, values: dict[str, Any], lines: Mapping[str, int]) -> None:
        self.name = name
        self.values = values
        self.lines = lines
        self._errors: list[tuple[int, str, str]] = []
        self._unreadable: dict[str, str] = {}
        """Errors of values that were replaced by a placeholder, by key."""

    @property
    def errors(self) -> list[str]:
        """All errors in the order of their lines. Errors about a placeholder are left out."""
        errors = [error for error in self._errors if self._unreadable.get(error[1], error[2]) == error[2]]
        return [f"{self.name}:{line}: {key}: {text}" for line, key, text in sorted(errors, key=lambda error: error[0])]

    def add_error(self, key: str, message: str, line: int | None = None) -> None:
        """The line is that of the key or of its nearest parent, unless it is given."""
        self._errors.append((line or self.lines.get(find_known_key(key, self.lines), 1), key, message))

    def add_unreadable(self, key: str, message: str) -> None:
        self._unreadable[key] = message
        self.add_error(key, message)

    def convert(self, value: Any, target: Any, key: str) -> Any:
        """Return the value as the target type. If it does not fit, record the error and return None."""
        try:
            return msgspec.convert(value, target)
        except msgspec.ValidationError as error:
            before = len(self._errors)
            self._check_items(value, target, key)
            if len(self._errors) == before:
                self._add_msgspec_error(str(error), key, target)
            return None

    def _check_items(self, value: Any, target: Any, key: str) -> None:
        """Record the errors of each item of a list or a mapping. msgspec reports only the first."""
        struct = _find_struct(target)
        item = next((get_args(option)[0] for option in _union(target) if get_origin(option) in (tuple, list)), None)
        entry = next((get_args(option)[1] for option in _union(target) if get_origin(option) in (Mapping, dict)), None)
        if isinstance(value, dict) and struct is not None:
            self.select_valid(value, struct, key)
            if struct.__struct_config__.forbid_unknown_fields:
                self.check_keys(value, struct.__struct_fields__, key)
        elif isinstance(value, list) and item is not None:
            for at, part in enumerate(value):
                self.convert(part, item, f"{key}[{at}]")
        elif isinstance(value, dict) and entry is not None:
            for name, part in value.items():
                self.convert(part, entry, f"{key}.{name}")

    def _add_msgspec_error(self, error: str, key: str, target: Any) -> None:
        """Record msgspec's error with the key of the file."""
        problem, _, path = error.partition(" - at `$")
        inner = path.removesuffix("`")
        where = (key + inner) if key else inner.lstrip(".")
        missing = re.fullmatch(r"Object missing required field `(.+)`", problem)
        unknown = re.fullmatch(r"Object contains unknown field `(.+)`", problem)
        field = re.fullmatch(r"(\w+): (.+)", problem)
        if field and not inner and field[1] in getattr(target, "__struct_fields__", ()):
            # The struct's __post_init__ names one of several fields that contradict each other.
            self.add_error(join_key(where, field[1]), field[2])
        elif missing:
            self.add_error(where, f"{missing[1]} is missing")
        elif unknown:
            self.add_error(f"{where}.{unknown[1]}", "unknown key")
        else:
            choices = _choices(target) if problem.startswith("Invalid enum value") else []
            expected = f"; expected {' or '.join(map(str, choices))}" if choices else ""
            self.add_error(where, problem[0].lower() + problem[1:].replace("`", "") + expected)

    def select_valid(self, values: Mapping[str, Any], struct: type[msgspec.Struct], key: str = "") -> dict[str, Any]:
        """Return the values that are valid for their fields. Each field is checked separately."""
        valid = {}
        for field in msgspec.structs.fields(struct):
            if field.name in values:
                before = len(self._errors)
                self.convert(values[field.name], field.type, join_key(key, field.name))
                if len(self._errors) == before:
                    valid[field.name] = values[field.name]
            elif field.required:
                self.add_error(key, f"{field.name} is missing")
        return valid

    def select_valid_section(
        self, values: Mapping[str, Any], struct: type[msgspec.Struct], key: str = ""
    ) -> dict[str, Any]:
        """Like `select_valid`, but also for the sections inside. Unknown keys are errors."""
        self.check_keys(values, struct.__struct_fields__, key)
        sections = {
            field.name: inner for field in msgspec.structs.fields(struct) if (inner := _find_struct(field.type))
        }
        valid = self.select_valid({name: value for name, value in values.items() if name not in sections}, struct, key)
        for name, inner in sections.items():
            section = self.get_mapping(values, name, key)
            if isinstance(values.get(name), dict):
                selected = self.select_valid_section(section, inner, join_key(key, name))
                if all(field.name in selected for field in msgspec.structs.fields(inner) if field.required):
                    valid[name] = selected
        return valid

    def check_keys(self, keys: Mapping[str, Any], known: Sequence[str], key: str = "") -> None:
        for name in keys:
            if name not in known:
                self.add_error(join_key(key, name), f"unknown key; keys: {', '.join(known)}")

    def parse(self, values: Mapping[str, Any], name: str, parser: Callable[[object], object], key: str = "") -> Any:
        """Return the parsed value. None if it is absent or invalid."""
        if values.get(name) is None:
            return None
        try:
            return parser(values[name])
        except ConfigError as error:
            self.add_error(join_key(key, name), str(error))
            return None

    def get_mapping(self, values: Mapping[str, Any], name: str, key: str = "") -> dict[str, Any]:
        value = values.get(name)
        if value is None or isinstance(value, dict):
            return value or {}
        self.add_error(join_key(key, name), f"expected a mapping, got {type_name(value)}")
        return {}

    def resolve_source(self, source: str) -> str:
        return resolve_path(source, self.directory) if is_path(source) and "://" not in source else source

    @property
    def directory(self) -> Path:
        return Path(self.name).expanduser().parent


def _find_struct(target: Any) -> type[msgspec.Struct] | None:
    """Return the struct that a field type is, or that its union contains."""
    return next((item for item in _union(target) if isinstance(item, type) and issubclass(item, msgspec.Struct)), None)


def _union(target: Any) -> tuple[Any, ...]:
    return get_args(target) if get_origin(target) in (Union, UnionType) else (target,)


def _choices(target: Any) -> list[Any]:
    """Return the values of all literals in a type."""
    if get_origin(target) is Literal:
        return list(get_args(target))
    return [choice for inner in get_args(target) for choice in _choices(inner)]


def type_name(value: Any) -> str:
    return {"dict": "mapping", "NoneType": "nothing"}.get(type(value).__name__, type(value).__name__)


def read_config_file(path: str | None) -> ConfigFile:
    if path is None:
        return ConfigFile("", {}, {})
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the configuration {path} is not UTF-8 text") from error
    if path.endswith(".json"):
        # YAML does not allow tabs as indentation. JSON strings cannot contain a raw tab.
        text = text.replace("\t", " ")
    lines: dict[str, int] = {}
    file = ConfigFile(path, {}, lines)
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        values = None if root is None else _NodeReader(file, loader, lines).read(root, "")
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(f"{path}:{mark.line + 1 if mark else 1}: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: nested too deeply") from error
    if values is not None and not isinstance(values, dict):
        raise ConfigError(f"{path}:1: expected a mapping such as `models: ...`, got {type_name(values)}")
    file.values = values or {}
    return file


class _NodeReader:
    """Converts YAML nodes to values and records their lines, which PyYAML's own constructor drops."""

    def __init__(self, file: ConfigFile, loader: yaml.SafeLoader, lines: dict[str, int]) -> None:
        self._file = file
        self._loader = loader
        self._lines = lines
        self._count = 0

    def _count_node(self, node: yaml.Node) -> None:
        """A few anchors that refer to each other can expand to more values than fit into memory."""
        self._count += 1
        if self._count > MAX_VALUES:
            message = f"more than {MAX_VALUES:,} values; do anchors refer to one another?"
            raise ConfigError(f"{self._file.name}:{node.start_mark.line + 1}: {message}")

    def read(self, node: yaml.Node, key: str) -> Any:
        self._count_node(node)
        if isinstance(node, yaml.MappingNode):
            return self._read_mapping(node, key)
        if isinstance(node, yaml.SequenceNode):
            return [self._read_at(item.start_mark, item, f"{key}[{at}]") for at, item in enumerate(node.value)]
        value = self._loader.construct_object(node)
        if isinstance(value, float) and math.isnan(value):
            self._file.add_unreadable(key, "expected a number")
            return 1.0
        return self._join_surrogates(value, key) if isinstance(value, str) else value

    def _read_at(self, mark: yaml.Mark, node: yaml.Node, key: str) -> Any:
        self._lines[key] = mark.line + 1
        return self.read(node, key)

    def _join_surrogates(self, value: str, key: str) -> str:
        """JSON escapes a character above U+FFFF as two surrogates, which PyYAML does not join."""
        try:
            return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
        except UnicodeDecodeError:
            self._file.add_unreadable(key, "lone surrogate")
            return "lone surrogate"

    def _read_mapping(self, node: yaml.MappingNode, key: str) -> dict[str, Any]:
        values: dict[str, Any] = {}
        merged: list[tuple[yaml.Node, yaml.Node]] = []
        for key_node, value_node in node.value:
            name = key_node.value
            line = key_node.start_mark.line + 1
            inner = join_key(key, name) if isinstance(name, str) else key
            if key_node.tag == MERGE_TAG:
                merged += self._merged_pairs(value_node, key)
            elif key_node.tag != STRING_TAG:
                shown = name if isinstance(name, str) else "this key"
                self._file.add_error(key or shown, f'keys must be strings; write "{shown}" in quotes', line)
            elif name in values:
                self._file.add_error(inner, f"given twice, first in line {self._lines[inner]}", line)
            else:
                values[name] = self._read_at(key_node.start_mark, value_node, inner)
        for key_node, value_node in merged:
            if key_node.value not in values:
                inner = join_key(key, key_node.value)
                values[key_node.value] = self._read_at(key_node.start_mark, value_node, inner)
        return values

    def _merged_pairs(self, node: yaml.Node, key: str) -> list[tuple[yaml.Node, yaml.Node]]:
        """Return the pairs of `<<: *other` and `<<: [*one, *other]` in order of precedence."""
        self._count_node(node)
        if isinstance(node, yaml.SequenceNode):
            return [pair for part in node.value for pair in self._merged_pairs(part, key)]
        if not isinstance(node, yaml.MappingNode):
            message = "expected a mapping or a list of mappings"
            self._file.add_error(join_key(key, "<<"), message, node.start_mark.line + 1)
            return []
        own = [pair for pair in node.value if pair[0].tag == STRING_TAG]
        nested = [pair[1] for pair in node.value if pair[0].tag == MERGE_TAG]
        return own + [pair for inner in nested for pair in self._merged_pairs(inner, key)]
