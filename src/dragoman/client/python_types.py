"""Builds JSON schemas from Python types and functions, and converts model output back to Python objects.

    output := type | {name?, schema: type, strict?}, also as OpenAI's {type: "json_schema", json_schema: {…}}
    type   := JSON schema | dataclass | msgspec.Struct | any other type that msgspec supports | pydantic model
    tool   := function with type hints; its docstring describes the function and its parameters:
              "Args:" and "  name: text", or ":param name: text", or Annotated[type, "text"]

pydantic is not imported: its models are recognised by their methods.
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
_CODE_BLOCK = re.compile(r"\s*```(?:json)?\s*\n(.*?)\n?```\s*", re.DOTALL)


class OutputType(msgspec.Struct, frozen=True):
    """The requested type of a reply. `decode` converts its text or raises `ValueError`."""

    name: str
    schema: Mapping[str, Any]
    decode: Callable[[str], Any]
    strict: bool | None = None
    """None: if the schema allows it."""

    def read(self, text: str) -> Any:
        """Convert a reply. Models without guided decoding often wrap their JSON in a code block."""
        block = _CODE_BLOCK.fullmatch(text)
        return self.decode(block[1] if block else text)

    @property
    def is_strict(self) -> bool:
        """As requested, or else whether the schema meets OpenAI's conditions for strict mode."""
        return _is_strict(self.schema) if self.strict is None else self.strict


WRAPPER_FIELDS = frozenset({"name", "description", "schema", "strict"})


def output_type_of(value: Any) -> OutputType:
    if isinstance(value, Mapping) and isinstance(value.get("json_schema"), Mapping):
        return output_type_of(value["json_schema"])
    if isinstance(value, Mapping) and "schema" in value and value.keys() <= WRAPPER_FIELDS:
        inner = output_type_of(value["schema"])
        name, strict = value.get("name"), value.get("strict")
        return msgspec.structs.replace(inner, name=inner.name if name is None else _name(name), strict=strict)
    if isinstance(value, Mapping):
        return OutputType(_name(value.get("title")), value, msgspec.json.decode)
    if _is_pydantic(value):
        schema = _close_objects(value.model_json_schema())
        return OutputType(_name(value.__name__), schema, value.model_validate_json)
    schema = _close_objects(_plain_schema(value))
    decode = msgspec.json.Decoder(value, dec_hook=_dec_hook).decode
    return OutputType(_name(getattr(value, "__name__", None)), schema, decode)


def _name(value: object) -> str:
    name = re.sub(r"[^A-Za-z0-9_-]+", "_", value if isinstance(value, str) else "").strip("_")
    return name[:64] or "response"


def _is_pydantic(value: object) -> bool:
    return isinstance(value, type) and hasattr(value, "model_json_schema") and hasattr(value, "model_validate")


def _schema_hook(kind: type) -> Schema:
    if _is_pydantic(kind):
        schema: Schema = kind.model_json_schema()  # type: ignore[attr-defined]
        return schema
    raise TypeError(f"no JSON schema for the type {kind!r}")


def _dec_hook(kind: type, value: Any) -> Any:
    if _is_pydantic(kind):
        return kind.model_validate(value)  # type: ignore[attr-defined]
    raise TypeError(f"cannot convert a JSON value to the type {kind!r}")


def _plain_schema(kind: Any) -> Schema:
    """Return msgspec's schema with all definitions at the root and a root that is not a reference."""
    schema = msgspec.json.schema(kind, schema_hook=_schema_hook)
    definitions: Schema = {}
    schema = _hoist_definitions(schema, definitions)
    reference = schema.get("$ref", "")
    if reference.startswith("#/$defs/") and reference not in str(definitions):
        schema = definitions.pop(reference.removeprefix("#/$defs/"))
    return {**schema, "$defs": definitions} if definitions else schema


def _hoist_definitions(node: Any, definitions: Schema) -> Any:
    if isinstance(node, list):
        return [_hoist_definitions(child, definitions) for child in node]
    if not isinstance(node, dict):
        return node
    for name, child in node.get("$defs", {}).items():
        definitions[name] = _hoist_definitions(child, definitions)
    return {name: _hoist_definitions(child, definitions) for name, child in node.items() if name != "$defs"}


def _close_objects(node: Any) -> Any:
    """Return the schema with `additionalProperties: false` in its objects."""
    if isinstance(node, list):
        return [_close_objects(child) for child in node]
    if not isinstance(node, dict):
        return node
    closed = {name: _close_objects(child) for name, child in node.items()}
    if closed.get("type") == "object" and isinstance(closed.get("properties"), dict):
        closed.setdefault("additionalProperties", False)
    return closed


def _is_strict(node: Any) -> bool:
    if isinstance(node, list):
        return all(map(_is_strict, node))
    if not isinstance(node, Mapping):
        return True
    if node.get("type") == "object":
        all_required = set(node.get("properties") or ()) == set(node.get("required") or ())
        if not all_required or node.get("additionalProperties") is not False:
            return False
    return "default" not in node and all(map(_is_strict, node.values()))


class PythonTool(msgspec.Struct, frozen=True):
    """A Python function that a model may call."""

    tool: Tool
    function: Callable[..., Any]
    arguments: type[msgspec.Struct]

    def run(self, call: ToolCall) -> ToolResult:
        """Call the function. An exception becomes an error result for the model."""
        try:
            result = self.function(**self._read(call.arguments))
            if inspect.isawaitable(result):
                result = asyncio.run(_wait_for(result))
            return ToolResult(call.id, _content(result))
        except Exception as error:  # noqa: BLE001 (reported to the model)
            return error_result(call, f"{type(error).__name__}: {error}")

    async def run_async(self, call: ToolCall) -> ToolResult:
        """Like `run`; a function that is not async runs in a thread."""
        if not inspect.iscoroutinefunction(self.function):
            return await asyncio.to_thread(self.run, call)
        try:
            return ToolResult(call.id, _content(await self.function(**self._read(call.arguments))))
        except Exception as error:  # noqa: BLE001 (reported to the model)
            return error_result(call, f"{type(error).__name__}: {error}")

    def _read(self, arguments: str) -> dict[str, Any]:
        read = msgspec.convert(msgspec.json.decode(arguments or "{}"), self.arguments, strict=False, dec_hook=_dec_hook)
        return {name: getattr(read, name) for name in self.arguments.__struct_fields__}


async def _wait_for(awaitable: Any) -> Any:
    return await awaitable


def error_result(call: ToolCall, message: str) -> ToolResult:
    return ToolResult(call.id, (Text(f"error: {message}"[:4000]),), is_error=True)


def _content(result: Any) -> tuple[Text | Image, ...]:
    if isinstance(result, Text | Image):
        return (result,)
    if isinstance(result, tuple) and result and all(isinstance(part, Text | Image) for part in result):
        return result
    return (Text(result if isinstance(result, str) else msgspec.json.encode(result, enc_hook=_enc_hook).decode()),)


def _enc_hook(value: Any) -> Any:
    if _is_pydantic(type(value)):
        return value.model_dump(mode="json")
    return str(value)


def tool_from_function(function: Callable[..., Any]) -> PythonTool:
    name = getattr(function, "__name__", "")
    if not name.isidentifier():
        raise TypeError(f"{function!r} has no name; a tool needs a function with a valid identifier as its name")
    description, descriptions = _parse_docstring(inspect.getdoc(function) or "")
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise TypeError(f"{name}: cannot resolve the type hints: {error}") from error
    parameters = inspect.signature(function).parameters.values()
    fields = [_field(name, parameter, hints, descriptions) for parameter in parameters]
    arguments = msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)
    schema = {key: value for key, value in _plain_schema(arguments).items() if key != "title"}
    return PythonTool(Tool(name, description, schema), function, arguments)


def _field(
    function: str, parameter: inspect.Parameter, hints: Mapping[str, Any], descriptions: Mapping[str, str]
) -> tuple[str, Any] | tuple[str, Any, Any]:
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        raise TypeError(f"{function}: the parameter {parameter.name} cannot be passed by name")
    hint = hints.get(parameter.name, Any)
    notes = (note for note in getattr(hint, "__metadata__", ()) if isinstance(note, str))
    description = descriptions.get(parameter.name) or next(notes, None)
    kind = hint if description is None else Annotated[hint, msgspec.Meta(description=description)]
    if parameter.default is parameter.empty:
        return parameter.name, kind
    default = parameter.default
    if default is None or isinstance(default, str | int | float | bool):
        return parameter.name, kind, default
    return parameter.name, kind, msgspec.field(default_factory=lambda: default)


_SECTION = re.compile(r"^(args|arguments|parameters|returns?|raises|yields|examples?|notes?):?\s*$", re.IGNORECASE)
_PARAMETER = re.compile(r"^\s+\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.+)$")
_REST_PARAMETER = re.compile(r"^:(?:param|parameter|arg)\s+(?:[^:]*\s)?(\w+):\s*(.+)$")


def _parse_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the description of the function and those of its parameters."""
    description: list[str] = []
    parameters: dict[str, str] = {}
    section = ""
    latest: str | None = None
    for line in text.splitlines():
        heading, match = _SECTION.match(line), _REST_PARAMETER.match(line)
        if match is None and section in ("args", "arguments", "parameters"):
            match = _PARAMETER.match(line)
        if heading:
            section, latest = heading[1].lower(), None
        elif match:
            latest = match[1]
            parameters[latest] = match[2].strip()
            section = section or "args"
        elif latest and line.startswith(" "):
            parameters[latest] += f" {line.strip()}"
        elif not section and not line.startswith(":"):
            description.append(line)
    return "\n".join(description).strip(), parameters
