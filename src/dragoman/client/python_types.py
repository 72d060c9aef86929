"""JSON schemas of Python types and functions, and the way back from what a model wrote.

    output := JSON schema | dataclass | msgspec.Struct | whatever msgspec knows | pydantic model
    tool   := function with type hints; its docstring says what it does, and what its parameters are:
              "Args:" and "  name: words", or ":param name: words", or Annotated[type, "words"]

pydantic is not needed: its models are known by what they can do.
"""

import asyncio
import inspect
import re
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec

from dragoman.core.request import Image, Text, Tool, ToolCall, ToolResult

Schema = dict[str, Any]
_FENCED = re.compile(r"\s*```(?:json)?\s*\n(.*?)\n?```\s*", re.DOTALL)


class Shape(msgspec.Struct, frozen=True):
    """What a reply shall be; `read` makes an object of its text, or raises ValueError."""

    name: str
    schema: Mapping[str, Any]
    read: Callable[[str], Any]

    @property
    def is_strict(self) -> bool:
        """Whether it leaves nothing open, as OpenAI wants it of what it guarantees."""
        return _is_strict(self.schema)


def shape_of(given: Any) -> Shape:
    if isinstance(given, Mapping):
        return Shape(_name(given.get("title")), given, lambda text: msgspec.json.decode(_unfenced(text)))
    if _is_pydantic(given):
        schema = _closed(given.model_json_schema())
        return Shape(_name(given.__name__), schema, lambda text: given.model_validate_json(_unfenced(text)))
    decoder = msgspec.json.Decoder(given, dec_hook=_decoded)
    schema = _closed(_plain_schema(given))
    return Shape(_name(getattr(given, "__name__", None)), schema, lambda text: decoder.decode(_unfenced(text)))


def _name(given: object) -> str:
    name = re.sub(r"[^A-Za-z0-9_-]+", "_", given if isinstance(given, str) else "").strip("_")
    return name[:64] or "response"


def _unfenced(text: str) -> str:
    """Where no server guarantees a shape, models like to put their JSON into a block of code."""
    fenced = _FENCED.fullmatch(text)
    return fenced[1] if fenced else text


def _is_pydantic(given: object) -> bool:
    return isinstance(given, type) and hasattr(given, "model_json_schema") and hasattr(given, "model_validate")


def _described(kind: type) -> Schema:
    if _is_pydantic(kind):
        schema: Schema = kind.model_json_schema()  # type: ignore[attr-defined]
        return schema
    raise TypeError(f"no JSON schema is known for {kind!r}")


def _decoded(kind: type, value: Any) -> Any:
    if _is_pydantic(kind):
        return kind.model_validate(value)  # type: ignore[attr-defined]
    raise TypeError(f"nobody knows how to read {kind!r}")


def _plain_schema(kind: Any) -> Schema:
    """msgspec's, with what it refers to first in its place, and all definitions at the root."""
    schema = msgspec.json.schema(kind, schema_hook=_described)
    definitions: Schema = {}
    schema = _without_definitions(schema, definitions)
    reference = schema.get("$ref", "")
    if reference.startswith("#/$defs/") and reference not in str(definitions):
        schema = definitions.pop(reference.removeprefix("#/$defs/"))
    return {**schema, "$defs": definitions} if definitions else schema


def _without_definitions(node: Any, definitions: Schema) -> Any:
    if isinstance(node, list):
        return [_without_definitions(child, definitions) for child in node]
    if not isinstance(node, dict):
        return node
    for name, child in node.get("$defs", {}).items():
        definitions[name] = _without_definitions(child, definitions)
    return {name: _without_definitions(child, definitions) for name, child in node.items() if name != "$defs"}


def _closed(node: Any) -> Any:
    """The same schema, whose objects have no other fields than those that are named."""
    if isinstance(node, list):
        return [_closed(child) for child in node]
    if not isinstance(node, dict):
        return node
    closed = {name: _closed(child) for name, child in node.items()}
    if closed.get("type") == "object" and isinstance(closed.get("properties"), dict):
        closed.setdefault("additionalProperties", False)
    return closed


def _is_strict(node: Any) -> bool:
    if isinstance(node, list):
        return all(map(_is_strict, node))
    if not isinstance(node, Mapping):
        return True
    if node.get("type") == "object":
        named = set(node.get("properties") or ()) == set(node.get("required") or ())
        if not named or node.get("additionalProperties") is not False:
            return False
    return "default" not in node and all(map(_is_strict, node.values()))


class PythonTool(msgspec.Struct, frozen=True):
    """A function that a model may call."""

    tool: Tool
    function: Callable[..., Any]
    arguments: type[msgspec.Struct]

    def run(self, call: ToolCall) -> ToolResult:
        """Calls the function. What goes wrong is told to the model, which can do better next time."""
        try:
            made = self.function(**self._read(call.arguments))
            if inspect.isawaitable(made):
                made = asyncio.run(_awaited(made))
            return ToolResult(call.id, _content(made))
        except Exception as error:  # noqa: BLE001 (told to the model)
            return _failed(call, error)

    async def run_async(self, call: ToolCall) -> ToolResult:
        """The same; a function that is not async runs in a thread."""
        if not inspect.iscoroutinefunction(self.function):
            return await asyncio.to_thread(self.run, call)
        try:
            return ToolResult(call.id, _content(await self.function(**self._read(call.arguments))))
        except Exception as error:  # noqa: BLE001 (told to the model)
            return _failed(call, error)

    def _read(self, arguments: str) -> dict[str, Any]:
        read = msgspec.convert(msgspec.json.decode(arguments or "{}"), self.arguments, strict=False, dec_hook=_decoded)
        return {name: getattr(read, name) for name in self.arguments.__struct_fields__}


async def _awaited(made: Any) -> Any:
    return await made


def _failed(call: ToolCall, error: Exception) -> ToolResult:
    return ToolResult(call.id, (Text(f"error: {type(error).__name__}: {error}"[:4000]),), is_error=True)


def _content(made: Any) -> tuple[Text | Image, ...]:
    if isinstance(made, Text | Image):
        return (made,)
    if isinstance(made, tuple) and made and all(isinstance(part, Text | Image) for part in made):
        return made
    return (Text(made if isinstance(made, str) else _json(made)),)


def _json(value: Any) -> str:
    return msgspec.json.encode(value, enc_hook=_encoded).decode()


def _encoded(value: Any) -> Any:
    if _is_pydantic(type(value)):
        return value.model_dump(mode="json")
    return str(value)


def tool_of(function: Callable[..., Any]) -> PythonTool:
    name = getattr(function, "__name__", "")
    if not name.isidentifier():
        raise TypeError(f"{function!r} has no name that a model could call it by")
    words, described = _documentation(inspect.getdoc(function) or "")
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise TypeError(f"{name}: its type hints cannot be read: {error}") from error
    fields = [_field(name, found, hints, described) for found in inspect.signature(function).parameters.values()]
    arguments = msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)
    schema = {key: value for key, value in _plain_schema(arguments).items() if key != "title"}
    return PythonTool(Tool(name, words, schema), function, arguments)


def _field(
    function: str, parameter: inspect.Parameter, hints: Mapping[str, Any], described: Mapping[str, str]
) -> tuple[str, Any] | tuple[str, Any, Any]:
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        raise TypeError(f"{function}: the parameter {parameter.name} cannot be given by its name")
    hint = hints.get(parameter.name, Any)
    words = described.get(parameter.name) or next((word for word in _notes(hint) if isinstance(word, str)), None)
    kind = hint if words is None else Annotated[hint, msgspec.Meta(description=words)]
    if parameter.default is parameter.empty:
        return parameter.name, kind
    default = parameter.default
    if default is None or isinstance(default, str | int | float | bool):
        return parameter.name, kind, default
    return parameter.name, kind, msgspec.field(default_factory=lambda: default)


def _notes(hint: Any) -> tuple[Any, ...]:
    return getattr(hint, "__metadata__", ())


_SECTION = re.compile(r"^(args|arguments|parameters|returns?|raises|yields|examples?|notes?):?\s*$", re.IGNORECASE)
_PARAMETER = re.compile(r"^\s+\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.+)$")
_REST = re.compile(r"^:(?:param|parameter|arg)\s+(?:[^:]*\s)?(\w+):\s*(.+)$")


def _documentation(text: str) -> tuple[str, dict[str, str]]:
    """What a docstring says of the function, and of each of its parameters."""
    words: list[str] = []
    described: dict[str, str] = {}
    section = ""
    latest: str | None = None
    for line in text.splitlines():
        heading, rest = _SECTION.match(line), _REST.match(line)
        found = _PARAMETER.match(line) if section in ("args", "arguments", "parameters") else None
        if heading:
            section, latest = heading[1].lower(), None
        elif rest or found:
            match = rest or found
            assert match is not None
            latest = match[1]
            described[latest] = match[2].strip()
            section = section or "args"
        elif latest and line.startswith(" "):
            described[latest] += f" {line.strip()}"
        elif not section and not line.startswith(":"):
            words.append(line)
    return "\n".join(words).strip(), described
