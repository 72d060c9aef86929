"""Trials of constraints: a hostile constraint fails only its own request."""

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from dragoman.core.errors import InvalidSchema
from dragoman.core.features import Feature
from dragoman.core.request import (
    Asked,
    Constraint,
    GenerationRequest,
    Grammar,
    JsonSchema,
    OneOf,
    Regex,
    Tool,
    ToolChoice,
)
from dragoman.formats import FORMATS
from dragoman.grammar.constraints import MAX_CONCURRENT, MAX_PER_CALLER, CompiledConstraint, ConstraintCompiler
from dragoman.grammar.trial_server import NICENESS
from tests.grammar.matching import END, PIECES, grammar_model

LEAST = -(2**63)
DEADLINE_SECONDS = 60.0


@asynccontextmanager
async def compiler() -> AsyncIterator[ConstraintCompiler]:
    model = grammar_model(FORMATS["hermes"])
    constraints = ConstraintCompiler(model, PIECES, frozenset({END}), lambda text: list(text.encode()))
    try:
        yield constraints
    finally:
        await constraints.close()


async def constrain(
    constraints: ConstraintCompiler, constraint: Constraint | None, **fields: Any
) -> CompiledConstraint:
    asked = (Asked(Feature.CONSTRAINT, "response_format"),)
    request = GenerationRequest(**{"constraint": constraint, "asked": asked, **fields})
    found = await constraints.constrain(request, thinks=False, begins="reply")
    assert found is not None
    return found


def patterns(count: int) -> JsonSchema:
    """Every pattern doubles the number of states of the automaton that matches all of them."""
    return JsonSchema({"type": "string", "allOf": [{"pattern": f"a.*b{i}"} for i in range(count)]})


def server_pid(constraints: ConstraintCompiler) -> int:
    server = constraints.trials._server
    assert server is not None
    return server.process.pid


def running_trials(constraints: ConstraintCompiler) -> list[str]:
    """Return the process ids of running trials."""
    command = ["pgrep", "-P", str(server_pid(constraints))]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not condition():  # noqa: ASYNC110 (it becomes so in another process)
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"const": LEAST}, "const"),
        ({"const": LEAST + 512}, "const"),
        ({"const": -9.3e18, "type": "integer"}, "const"),
        ({"const": 1e308}, "const"),
        ({"const": 2**53 + 1}, "const"),
        ({"enum": [LEAST, 3]}, "enum"),
        ({"const": {"a": [1, LEAST]}}, "const"),
        ({"type": "integer", "minimum": LEAST, "maximum": LEAST}, "maximum"),
        ({"type": "integer", "exclusiveMinimum": -1e308, "exclusiveMaximum": -1e307}, "exclusiveMaximum"),
        ({"type": "integer", "multipleOf": LEAST}, "multipleOf"),
        ({"type": "integer", "allOf": [{"minimum": LEAST}, {"maximum": LEAST}]}, "allOf[1].maximum"),
        ({"type": "object", "properties": {"n": {"const": LEAST}}}, "properties.n.const"),
        ({"$defs": {"n": {"const": LEAST}}, "$ref": "#/$defs/n"}, "$defs.n.const"),
    ],
)
async def test_numbers_beyond_exact_doubles_are_relaxed_and_reported(schema: dict[str, Any], path: str) -> None:
    async with compiler() as constraints:
        found = await constrain(constraints, JsonSchema(schema))
        assert f"response_format.{path}" in found.shape.relaxed
        assert found.shape.checks[0].schema == schema
        parameters = {"type": "object", "properties": {"n": schema}, "$defs": schema.get("$defs", {})}
        tool = Tool("count", parameters=parameters, path="tools[0].parameters")
        required_call = await constrain(constraints, None, tools=(tool,), tool_choice=ToolChoice("required"))
        assert required_call.shape.relaxed


@pytest.mark.parametrize("value", [2**53, -(2**53), 0, -5, 2.5, 1e-300])
async def test_exact_numbers_are_enforced(value: float) -> None:
    async with compiler() as constraints:
        assert (await constrain(constraints, JsonSchema({"const": value}))).shape.relaxed == ()


def members(count: int, schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": schema for i in range(count)}}


def references(keyword: str) -> JsonSchema:
    """2**30 schemas, if every reference were expanded."""
    definitions: dict[str, Any] = {
        f"d{i}": {keyword: [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]} for i in range(30)
    }
    return JsonSchema({"$defs": {**definitions, "d30": {"type": "string"}}, "$ref": "#/$defs/d0"})


TOO_COMPLEX: dict[str, Constraint] = {
    "22 patterns": patterns(22),
    "60 patterns": patterns(60),
    "intersections in Lark": Grammar("start: A\nA: " + " & ".join(f"/.*a.*b{i}.*/" for i in range(30))),
    "an integer that crashes, in Lark": Grammar(f'start: %json {{"const": {LEAST}}}'),
}


@pytest.mark.parametrize("name", TOO_COMPLEX)
async def test_constraint_beyond_the_limits_of_a_trial_is_refused(name: str) -> None:
    async with compiler() as constraints:
        with pytest.raises(InvalidSchema, match="too complex") as raised:
            await constrain(constraints, TOO_COMPLEX[name])
        assert raised.value.param == "response_format"
        await until(lambda: not running_trials(constraints))
        await constrain(constraints, JsonSchema({"type": "string"}))


HOSTILE: dict[str, Constraint] = {
    "many properties": JsonSchema({"type": "object", "properties": {f"o{i}": members(900, {}) for i in range(4)}}),
    "10,000 properties": JsonSchema(members(10_000, {})),
    "long enum": JsonSchema({"enum": ["x" * 20 + str(i) for i in range(8000)]}),
    "100,000 values": JsonSchema({"enum": list(range(100_000))}),
    "long text": JsonSchema({"const": "x" * 200_000}),
    "huge": JsonSchema({"const": "x" * 1_000_000}),
    "huge together": JsonSchema({"anyOf": [{"const": "x" * 250_000}] * 20}),
    "repeats": JsonSchema({"type": "string", "pattern": "^(a{1000}){1000}$"}),
    "backtracking": JsonSchema({"type": "string", "pattern": "(a+)+b"}),
    "looking ahead": JsonSchema({"type": "string", "pattern": "(?=.*a)(?=.*b)(?=.*c).*"}),
    "heavy patterns": JsonSchema(
        members(60, {"type": "string", "pattern": "(.*a.{1,400}b|[a-z]{9}c.*d{5,500})*x{1,900}"})
    ),
    "patterns of properties": JsonSchema(
        {"type": "object", "patternProperties": {f"a.*b{i}": {"pattern": f"c.*d{i}"} for i in range(30)}}
    ),
    "dependent schemas": JsonSchema(
        {"type": "object", "dependentSchemas": {f"p{i}": members(9, {}) for i in range(90)}}
    ),
    "divisors": JsonSchema({"allOf": [{"type": "integer", "multipleOf": 9967 - i} for i in range(30)]}),
    "tiny divisor": JsonSchema({"type": "number", "multipleOf": 1e-300}),
    "products": JsonSchema(
        {"allOf": [{"anyOf": [members(1, {"const": [i, other]}) for other in range(8)]} for i in range(7)]}
    ),
    "exclusive products": JsonSchema(
        {"allOf": [{"oneOf": [members(1, {"const": [i, other]}) for other in range(6)]} for i in range(8)]}
    ),
    "references": JsonSchema(
        {
            "$defs": {
                f"d{i}": members(0, {})
                | {"properties": {f"r{other}": {"$ref": f"#/$defs/d{i * other % 60}"} for other in range(60)}}
                for i in range(60)
            },
            "$ref": "#/$defs/d0",
        }
    ),
    "doubling references in allOf": references("allOf"),
    "doubling references in anyOf": references("anyOf"),
    "doubling references in oneOf": references("oneOf"),
    "a chain of references": JsonSchema(
        {"$defs": {f"d{i}": {"$ref": f"#/$defs/d{(i + 1) % 900}"} for i in range(900)}, "$ref": "#/$defs/d0"}
    ),
    "nested counts": JsonSchema({"type": "array", "minItems": 10**6, "items": {"type": "array", "minItems": 10**6}}),
    "long strings": JsonSchema({"type": "string", "minLength": 10**9}),
    "strings without end": JsonSchema({"type": "string", "minLength": 1e308}),
    "expression": Regex("(.*a.{500})*(b.{900}c)*d"),
    "deep expression": Regex("(" * 2000 + "a" + ")" * 2000),
    "letters of all alphabets": Regex("".join(f"[\\p{{L}}\\p{{N}}]{{0,{i}}}\\p{{Lu}}?" for i in range(2, 140))),
    "deep grammar": Grammar("start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
    "nested grammar": Grammar(
        "start: x0\n" + "\n".join(f"x{i}: (x{i + 1} | x{i + 1} x{i + 1})+" for i in range(200)) + '\nx200: "a"'
    ),
    "ambiguous grammar": Grammar('start: s\ns: s s | s s s | "a" | ""'),
    "repeating grammar": Grammar('start: A\nA: B{9999}\nB: C{9999}\nC: "x"{9999}'),
    "endless grammar": Grammar('start: a\na: a "x"'),
    "many choices": OneOf(tuple("x" * 100 + str(i) for i in range(10_000))),
    "too many choices": OneOf(tuple(map(str, range(10_001)))),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_constraint_is_refused_or_enforced(name: str) -> None:
    async with compiler() as constraints:
        try:
            guide = (await constrain(constraints, HOSTILE[name])).guide
            for _ in range(20):
                if guide.is_complete:
                    break
                allowed = guide.allowed_tokens(END + 1)
                guide.advance(next(token for token in (*b'"{[ax:1', *range(END + 1)) if allowed[token]))
        except InvalidSchema as error:
            assert error.param is not None  # noqa: PT017
            assert error.param.startswith("response_format")  # noqa: PT017
            assert len(str(error)) < 1000  # noqa: PT017


async def test_cancelled_request_ends_its_trial() -> None:
    async with compiler() as constraints:
        await constrain(constraints, Regex("a"))
        hostile = asyncio.create_task(constrain(constraints, patterns(60)))
        await until(lambda: running_trials(constraints))
        hostile.cancel()
        await asyncio.wait((hostile,))
        assert hostile.cancelled()
        await until(lambda: not running_trials(constraints))


async def test_schemas_of_one_caller_do_not_delay_another_caller() -> None:
    async with compiler() as constraints:
        await constrain(constraints, Regex("a"))
        hostile = [asyncio.create_task(constrain(constraints, patterns(40 + i), principal="mallory")) for i in range(8)]
        await until(lambda: running_trials(constraints))
        await constrain(constraints, Regex("b+"), principal="alice")
        # Alice's own trial may not have been reaped yet.
        assert len(running_trials(constraints)) <= MAX_PER_CALLER + 1 <= MAX_CONCURRENT
        assert not all(task.done() for task in hostile)
        for task in hostile:
            task.cancel()
        await asyncio.wait(hostile)
        await until(lambda: not running_trials(constraints))


async def test_callers_who_used_much_time_for_trials_get_a_low_priority() -> None:
    async with compiler() as constraints:
        await constrain(constraints, Regex("a"))

        async def niceness(principal: str) -> int:
            """Of a trial of this caller, which is cancelled then."""
            task = asyncio.create_task(constrain(constraints, patterns(60), principal=principal))
            await until(lambda: running_trials(constraints))
            found = os.getpriority(os.PRIO_PROCESS, int(running_trials(constraints)[0]))
            task.cancel()
            await asyncio.wait((task,))
            await until(lambda: not running_trials(constraints))
            return found

        normal = os.getpriority(os.PRIO_PROCESS, server_pid(constraints))
        for _ in range(3):
            await niceness("mallory")
        assert constraints.trials.has_low_priority("mallory")
        assert not constraints.trials.has_low_priority("alice")
        assert await niceness("alice") == normal


async def test_trial_of_low_priority_runs_at_a_higher_niceness() -> None:
    async with compiler() as constraints:
        await constrain(constraints, Regex("a"))
        normal = os.getpriority(os.PRIO_PROCESS, server_pid(constraints))
        constraints.trials._recent.add([("mallory", 100.0)])
        task = asyncio.create_task(constrain(constraints, patterns(60), principal="mallory"))

        def nicenesses() -> list[int]:
            return [os.getpriority(os.PRIO_PROCESS, int(pid)) for pid in running_trials(constraints)]

        await until(lambda: nicenesses() == [normal + NICENESS])
        task.cancel()
        await asyncio.wait((task,))


async def test_known_constraint_needs_no_trial() -> None:
    async with compiler() as constraints:
        schema = JsonSchema({"type": "object"})
        first = await constrain(constraints, schema)
        os.kill(server_pid(constraints), signal.SIGSTOP)
        try:
            async with asyncio.timeout(DEADLINE_SECONDS):
                again = await constrain(constraints, schema)
        finally:
            os.kill(server_pid(constraints), signal.SIGKILL)
        assert again.shape == first.shape


async def test_dead_trial_server_is_replaced() -> None:
    async with compiler() as constraints:
        await constrain(constraints, Regex("a"))
        before = server_pid(constraints)
        os.kill(before, signal.SIGKILL)
        await constrain(constraints, Regex("b"))
        assert server_pid(constraints) != before


async def test_trial_server_ends_with_its_engine() -> None:
    async with compiler() as constraints:
        await constrain(constraints, Regex("a"))
        pid = server_pid(constraints)
        await constraints.close()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
