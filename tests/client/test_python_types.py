"""Python types and functions as JSON schemas and tools."""

import asyncio
import dataclasses
from typing import Annotated, Any, Literal

import msgspec
import pydantic
import pytest

from dragoman.client.python_types import output_type_of, tool_from_function
from dragoman.core.request import Image, Text, ToolCall


class Play(msgspec.Struct):
    author: str
    year: int


@dataclasses.dataclass
class Place:
    city: str
    country: str = "France"


class Person(pydantic.BaseModel):
    name: str
    home: "Home"


class Home(pydantic.BaseModel):
    street: str


Person.model_rebuild()


def call(function: Any, arguments: str) -> tuple[str, bool]:
    result = tool_from_function(function).run(ToolCall("a", function.__name__, arguments))
    assert result.call_id == "a"
    return "".join(part.text for part in result.content if isinstance(part, Text)), result.is_error


def test_structs_dataclasses_and_pydantic_models() -> None:
    play = output_type_of(Play)
    assert play.name == "Play"
    assert play.schema == {
        "title": "Play",
        "type": "object",
        "properties": {"author": {"type": "string"}, "year": {"type": "integer"}},
        "required": ["author", "year"],
        "additionalProperties": False,
    }
    assert play.is_strict
    assert play.read('{"author": "S", "year": 1600}') == Play("S", 1600)
    assert not output_type_of(Place).is_strict
    assert output_type_of(Place).read('{"city": "Paris"}') == Place("Paris")
    person = output_type_of(Person)
    assert person.is_strict
    assert person.schema["$defs"]["Home"]["additionalProperties"] is False
    assert person.read('{"name": "A", "home": {"street": "B"}}') == Person(name="A", home=Home(street="B"))
    assert output_type_of(list[int]).read("[1, 2]") == [1, 2]


def test_json_schema_is_sent_unchanged() -> None:
    schema = {"title": "A play!", "type": "object"}
    shape = output_type_of(schema)
    assert (shape.name, shape.schema, shape.is_strict) == ("A_play", schema, False)
    assert shape.read('{"a": 1}') == {"a": 1}


def test_json_in_a_code_block() -> None:
    assert output_type_of(Play).read('```json\n{"author": "S", "year": 1}\n```\n') == Play("S", 1)


@pytest.mark.parametrize(
    ("kind", "text"), [(Play, '{"author": 1}'), (Play, "{"), (Person, '{"name": "A"}'), (Place, "[]")]
)
def test_output_that_does_not_match(kind: Any, text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (of whichever library)
        output_type_of(kind).read(text)


def weather(city: str, unit: Literal["C", "F"] = "C", days: Annotated[int, "How many days."] = 1) -> str:
    """The weather of a city.

    From the best sources.

    Args:
        city: Its name,
            in English.
        unit (str): Of the temperature.

    Returns:
        words: about it
    """
    return f"{city} {unit} {days}"


def test_function_as_tool() -> None:
    tool = tool_from_function(weather).tool
    assert (tool.name, tool.description) == ("weather", "The weather of a city.\n\nFrom the best sources.")
    assert tool.parameters == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Its name, in English."},
            "unit": {"enum": ["C", "F"], "default": "C", "description": "Of the temperature."},
            "days": {"type": "integer", "default": 1, "description": "How many days."},
        },
        "required": ["city"],
        "additionalProperties": False,
    }
    assert call(weather, '{"city": "Rome"}') == ("Rome C 1", False)
    assert call(weather, '{"city": "Rome", "days": "3"}') == ("Rome C 3", False)


def test_rest_style_docstring() -> None:
    def add(a: int, b: int = 2) -> int:
        """Adds.

        :param a: the one
        :param int b: the other
        """
        return a + b

    tool = tool_from_function(add).tool
    assert tool.description == "Adds."
    assert tool.parameters is not None
    assert [field["description"] for field in tool.parameters["properties"].values()] == ["the one", "the other"]
    assert call(add, '{"a": 1}') == ("3", False)


def test_argument_types() -> None:
    def visit(place: Place, person: Person, notes: list[str] = ["x"], anything: Any = None) -> dict[str, Any]:  # noqa: B006
        return {"place": place, "person": person, "notes": notes, "anything": anything}

    tool = tool_from_function(visit).tool
    assert tool.parameters is not None
    assert {"Place", "Home"} <= set(tool.parameters["$defs"])
    found, failed = call(
        visit, '{"place": {"city": "P", "country": "France"}, "person": {"name": "A", "home": {"street": "B"}}}'
    )
    assert not failed
    assert msgspec.json.decode(found) == {
        "place": {"city": "P", "country": "France"},
        "person": {"name": "A", "home": {"street": "B"}},
        "notes": ["x"],
        "anything": None,
    }


def test_exception_becomes_an_error_result() -> None:
    def explode() -> None:
        raise RuntimeError("boom")

    assert call(explode, "{}") == ("error: RuntimeError: boom", True)
    text, failed = call(weather, '{"town": "Rome"}')
    assert failed
    assert "unknown field `town`" in text
    assert call(weather, "{")[1]


def test_image_results() -> None:
    def look() -> Image:
        return Image(b"png", "image/png")

    assert tool_from_function(look).run(ToolCall("a", "look", "")).content == (Image(b"png", "image/png"),)


def test_async_functions() -> None:
    async def wait(seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "waited"

    assert call(wait, '{"seconds": 0}') == ("waited", False)
    result = asyncio.run(tool_from_function(wait).run_async(ToolCall("a", "wait", '{"seconds": 0}')))
    assert result.content == (Text("waited"),)
    assert asyncio.run(tool_from_function(wait).run_async(ToolCall("a", "wait", "{}"))).is_error


@pytest.mark.parametrize("function", [lambda: 1, lambda *a: 1])
def test_invalid_tool_functions(function: Any) -> None:
    with pytest.raises(TypeError):
        tool_from_function(function)

    def spread(*things: int) -> None: ...

    with pytest.raises(TypeError, match="things"):
        tool_from_function(spread)
