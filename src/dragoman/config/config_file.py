"""A configuration file as plain values, the line of each of its keys, and the mistakes that were found in it.

A mistake is noted and the reading goes on: whoever wrote the file hears of all of them together.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import msgspec
import yaml

from dragoman.config.paths import located
from dragoman.core.errors import ConfigError
from dragoman.files.sources import is_path

Parse = Callable[[object], object]
MERGE = "tag:yaml.org,2002:merge"
MOST_VALUES = 50_000


class File:
    """`lines` has the line of each key, as `models.smollm2.slots`."""

    def __init__(self, name: str, values: dict[str, Any], lines: Mapping[str, int]) -> None:
        self.name = name
        self.values = values
        self.lines = lines
        self._mistakes: list[tuple[int, str, str]] = []
        self._unread: dict[str, str] = {}
        """What was wrong with values that could not even be read, by key."""

    @property
    def mistakes(self) -> list[str]:
        """In the order of the lines. Of a value that could not be read nothing else is told: another stands for it."""
        told = [mistake for mistake in self._mistakes if self._unread.get(mistake[1], mistake[2]) == mistake[2]]
        return [f"{self.name}:{line}: {key}: {words}" for line, key, words in sorted(told, key=lambda told: told[0])]

    def note(self, key: str, words: str) -> None:
        known = key
        while known and known not in self.lines:
            known = re.sub(r"(\.[^.\[]*|\[[^\[]*|^[^.\[]*)$", "", known)
        self.note_at(self.lines.get(known, 1), key, words)

    def note_at(self, line: int, key: str, words: str) -> None:
        self._mistakes.append((line, key, words))

    def note_unread(self, key: str, words: str) -> None:
        self._unread[key] = words
        self.note(key, words)

    def convert(self, value: Any, wanted: Any, key: str) -> Any:
        """The value as what is wanted; None where it is something else, which is noted."""
        try:
            return msgspec.convert(value, wanted)
        except msgspec.ValidationError as error:
            before = len(self._mistakes)
            self._convert_inner(value, wanted, key)
            if len(self._mistakes) == before:
                self._note_invalid(str(error), key, wanted)
            return None

    def _convert_inner(self, value: Any, wanted: Any, key: str) -> None:
        """Note what is wrong with each part of a list or a mapping; msgspec tells the first only."""
        inner = _struct_in(wanted)
        entry = next((get_args(kind)[0] for kind in _kinds(wanted) if get_origin(kind) in (tuple, list)), None)
        named = next((get_args(kind)[1] for kind in _kinds(wanted) if get_origin(kind) in (Mapping, dict)), None)
        if isinstance(value, dict) and inner is not None:
            self.fitting(value, inner, key)
            if inner.__struct_config__.forbid_unknown_fields:
                self.check_keys(value, inner.__struct_fields__, key)
        elif isinstance(value, list) and entry is not None:
            for at, part in enumerate(value):
                self.convert(part, entry, f"{key}[{at}]")
        elif isinstance(value, dict) and named is not None:
            for name, part in value.items():
                self.convert(part, named, f"{key}.{name}")

    def _note_invalid(self, finding: str, key: str, wanted: Any) -> None:
        """msgspec's finding, in the place and the words of the file."""
        what, _, place = finding.partition(" - at `$")
        inner = place.removesuffix("`")
        where = (key + inner) if key else inner.lstrip(".")
        missing = re.fullmatch(r"Object missing required field `(.+)`", what)
        unknown = re.fullmatch(r"Object contains unknown field `(.+)`", what)
        blamed = re.fullmatch(r"(\w+): (.+)", what)
        if blamed and not inner and blamed[1] in getattr(wanted, "__struct_fields__", ()):
            # Of values that do not go together, the one that a struct names.
            self.note(f"{where}.{blamed[1]}" if where else blamed[1], blamed[2])
        elif missing:
            self.note(where, f"{missing[1]} is missing")
        elif unknown:
            self.note(f"{where}.{unknown[1]}", "unknown key")
        else:
            choices = _choices(wanted) if what.startswith("Invalid enum value") else []
            among = f"; expected {' or '.join(map(str, choices))}" if choices else ""
            self.note(where, what[0].lower() + what[1:].replace("`", "") + among)

    def fitting(self, values: Mapping[str, Any], wanted: type[msgspec.Struct], key: str = "") -> dict[str, Any]:
        """The values that fit their fields of a struct, one by one: a mistake in one hides none in another."""
        fitting = {}
        for field in msgspec.structs.fields(wanted):
            inner = f"{key}.{field.name}" if key else field.name
            if field.name in values:
                before = len(self._mistakes)
                self.convert(values[field.name], field.type, inner)
                if len(self._mistakes) == before:
                    fitting[field.name] = values[field.name]
            elif field.required:
                self.note(key, f"{field.name} is missing")
        return fitting

    def section(self, values: Mapping[str, Any], wanted: type[msgspec.Struct], key: str = "") -> dict[str, Any]:
        """The same with the sections inside it, each of them mistake by mistake too; unknown keys are mistakes."""
        self.check_keys(values, wanted.__struct_fields__, key)
        sections = {field.name: inner for field in msgspec.structs.fields(wanted) if (inner := _struct_in(field.type))}
        fitting = self.fitting({name: value for name, value in values.items() if name not in sections}, wanted, key)
        for name, inner in sections.items():
            given = self.mapping(values, name, key)
            if isinstance(values.get(name), dict):
                made = self.section(given, inner, f"{key}.{name}" if key else name)
                # What is right of it is looked at further, whatever else is wrong.
                if all(field.name in made for field in msgspec.structs.fields(inner) if field.required):
                    fitting[name] = made
        return fitting

    def check_keys(self, keys: Mapping[str, Any], known: Sequence[str], key: str = "") -> None:
        for name in keys:
            if name not in known:
                self.note(f"{key}.{name}" if key else name, f"unknown key; keys: {', '.join(known)}")

    def parsed(self, values: Mapping[str, Any], name: str, parse: Parse, key: str = "") -> Any:
        """What `parse` makes of a value; None where there is none, or one that it refuses."""
        if values.get(name) is None:
            return None
        try:
            return parse(values[name])
        except ConfigError as error:
            self.note(f"{key}.{name}" if key else name, str(error))
            return None

    def mapping(self, values: Mapping[str, Any], name: str, key: str = "") -> dict[str, Any]:
        value = values.get(name)
        if value is None or isinstance(value, dict):
            return value or {}
        self.note(f"{key}.{name}" if key else name, f"expected a mapping, got {kind(value)}")
        return {}

    def from_here(self, source: str) -> str:
        """A relative path starts from the folder of the file."""
        return located(source, self.folder) if is_path(source) and "://" not in source else source

    @property
    def folder(self) -> Path:
        return Path(self.name).expanduser().parent


def _struct_in(wanted: Any) -> type[msgspec.Struct] | None:
    """The struct that a field is, or may be instead of nothing."""
    return next((kind for kind in _kinds(wanted) if isinstance(kind, type) and issubclass(kind, msgspec.Struct)), None)


def _kinds(wanted: Any) -> tuple[Any, ...]:
    """What a type may be instead of nothing, or of one another."""
    return get_args(wanted) if get_origin(wanted) in (Union, UnionType) else (wanted,)


def _choices(wanted: Any) -> list[Any]:
    """The words that one of a fixed choice may be."""
    if get_origin(wanted) is Literal:
        return list(get_args(wanted))
    return [choice for inner in get_args(wanted) for choice in _choices(inner)]


def kind(value: Any) -> str:
    return {"dict": "mapping", "NoneType": "nothing"}.get(type(value).__name__, type(value).__name__)


def read(path: str | None) -> File:
    if path is None:
        return File("", {}, {})
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


def _parse(path: str, text: str) -> File:
    lines: dict[str, int] = {}
    file = File(path, {}, lines)
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        values = None if root is None else _Reader(file, loader, lines).value(root, "")
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(f"{path}:{mark.line + 1 if mark else 1}: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: nested too deeply") from error
    if values is not None and not isinstance(values, dict):
        raise ConfigError(f"{path}:1: expected a mapping such as `models: ...`, got {kind(values)}")
    file.values = values or {}
    return file


class _Reader:
    """YAML's nodes as values, keeping the lines that PyYAML's own constructor forgets."""

    def __init__(self, file: File, loader: yaml.SafeLoader, lines: dict[str, int]) -> None:
        self.file = file
        self.loader = loader
        self.lines = lines
        self._read = 0

    def _count(self, node: yaml.Node) -> None:
        """A few anchors that refer to one another can stand for more than any machine holds."""
        self._read += 1
        if self._read > MOST_VALUES:
            words = f"more than {MOST_VALUES:,} values; do anchors refer to one another?"
            raise ConfigError(f"{self.file.name}:{node.start_mark.line + 1}: {words}")

    def value(self, node: yaml.Node, key: str) -> Any:
        self._count(node)
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, key)
        if isinstance(node, yaml.SequenceNode):
            return [self.item(inner, f"{key}[{index}]") for index, inner in enumerate(node.value)]
        plain = self.loader.construct_object(node)
        if isinstance(plain, float) and math.isnan(plain):
            self.file.note_unread(key, "expected a number")
            return 1.0
        return self.text(plain, key) if isinstance(plain, str) else plain

    def text(self, plain: str, key: str) -> str:
        """JSON escapes a character beyond the first 65,536 as two halves; PyYAML leaves it in them."""
        try:
            return plain.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
        except UnicodeDecodeError:
            self.file.note_unread(key, "half a character")
            return "half a character"

    def item(self, node: yaml.Node, key: str) -> Any:
        self.lines[key] = node.start_mark.line + 1
        return self.value(node, key)

    def mapping(self, node: yaml.MappingNode, key: str) -> dict[str, Any]:
        values: dict[str, Any] = {}
        merged: list[tuple[yaml.Node, yaml.Node]] = []
        for key_node, value_node in node.value:
            name = key_node.value
            if key_node.tag == MERGE:
                merged += self.merged(value_node, key)
                continue
            line = key_node.start_mark.line + 1
            if key_node.tag != "tag:yaml.org,2002:str":
                shown = name if isinstance(name, str) else "this key"
                # It has no line of its own.
                self.file.note_at(line, key or shown, f'a key is text; write "{shown}" in quotes')
                continue
            inner = f"{key}.{name}" if key else name
            if name in values:
                self.file.note_at(line, inner, f"given twice, first in line {self.lines[inner]}")
                continue
            self.lines[inner] = line
            values[name] = self.value(value_node, inner)
        for key_node, value_node in merged:
            inner = f"{key}.{key_node.value}" if key else key_node.value
            if key_node.value not in values:
                self.lines[inner] = key_node.start_mark.line + 1
                values[key_node.value] = self.value(value_node, inner)
        return values

    def merged(self, node: yaml.Node, key: str) -> list[tuple[yaml.Node, yaml.Node]]:
        """The keys of `<<: *other` and `<<: [*one, *other]`, the first ones first; what is written beside it wins."""
        self._count(node)
        if isinstance(node, yaml.SequenceNode):
            return [pair for part in node.value for pair in self.merged(part, key)]
        if not isinstance(node, yaml.MappingNode):
            self.file.note_at(
                node.start_mark.line + 1, f"{key}.<<" if key else "<<", "expected a mapping or a list of them"
            )
            return []
        own = [pair for pair in node.value if pair[0].tag == "tag:yaml.org,2002:str"]
        further = [pair[1] for pair in node.value if pair[0].tag == MERGE]
        return own + [pair for inner in further for pair in self.merged(inner, key)]
