"""Target `schemas`: JSON schemas, regular expressions, grammars and tools, from the body of a chat to masks.

A reply is then written by chance, one byte after the other, within the masks. It must never get stuck, and a reply that
is complete must satisfy the schema where nothing of it was relaxed.
"""

import asyncio
import functools
import json
import re
from collections.abc import Mapping
from random import Random
from typing import Any

import jsonschema

from dragoman.core.errors import BadRequest, DragomanError, EngineFailed, InvalidSchema
from dragoman.core.request import JsonSchema
from dragoman.formats import FORMATS
from dragoman.grammar.constraints import ConstraintCompiler
from dragoman.grammar.masks import Guide
from dragoman.grammar.reply_grammar import GrammarModel
from dragoman.protocols.registry import PROTOCOLS
from tools.fuzz import bodies, values
from tools.fuzz.cases import OK, HttpCase, Request, random_for
from tools.fuzz.requests import BEARER, JSON
from tools.fuzz.shapes import Wrong

NAMES = ("plain", "plain", "hermes", "harmony", "json")
END = 256
STEPS = 120
MOST_MESSAGE = 2000
FAVOURED = b'"}],: 0159aetr{['
"""Bytes that are written more often, so that replies come to an end."""
TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
PATTERNS = (
    "^a+$",
    "[a-z]{2,5}",
    "(a|b)*c",
    "\\d+",
    "^\\w+@\\w+$",
    "(a+)+b",
    ".*",
    "",
    "^$",
    "[^\\x00-\\x1f]",
    "\\p{L}+",
    "(?i)x",
    "(?=a)b",
    "\\bx\\b",
    "(a)\\1",
    "[",
    "a{3,1}",
    "a{0,9999}",
    "((a{99}){99}){99}",
    "a{10001}",
    "[\\d-z]",
    "\\",
    "(?P<x>a)",
    "^(?:a|b|c|d){1,200}$",
    "[\\s\\S]*",
    "é+",
    "😀",
    "\\u0041",
    "$^",
    "a*?",
    "^a|b$",
    "x{,3}",
    "(?<!a)b",
    "a++",
    "[[:alpha:]]",
)
GRAMMARS = (
    'start: "a"',
    "start: /a+/",
    "start: start",
    'start: "a" start |',
    "start: x\nx: /b/",
    "start: %json {}",
    "start: /[/",
    'start: "a"~3..2',
    'start: ("a" | "b")+ "c"',
    "start: missing",
    "",
    "start:",
    'start: "\\u0000"',
    "%ignore /x/",
    "x",
    "start: TEXT\nTEXT: /.*/",
    'start: %json {"type": "x"}',
    'start: a b c\na: "1"\nb: "2"\nc: "3"',
    "start: <[1]>",
    "%%",
    "start: @answer",
    'start: "a"{1,5}',
    "start: /" + "a" * 3000 + "/",
    'start: ("a"?)~1..1000',
    "?start: x",
    "//",
)
NUMBERS: tuple[Any, ...] = (
    *values.INTEGERS,
    *values.FLOATS,
    *(-(2**63) - 1, 2**63, 2**64, 10**20, -(10**20), 10**400 // 10**100, 1e308, -1e308, 1.7e308, 9007199254740993),
)


def schema(random: Random, depth: int = 0) -> Any:
    """Mostly one that means something."""
    kind = random.random()
    if depth > 4 or kind < 0.1:
        return random.choice(
            (True, {}, {"type": random.choice(TYPES)}, {"const": values.scalar(random) if kind < 0.01 else 1})
        )
    if kind < 0.2:
        return {
            random.choice(("anyOf", "oneOf", "allOf")): [schema(random, depth + 1) for _ in range(random.randint(1, 3))]
        }
    if kind < 0.25:
        return {"$ref": random.choice(("#", "#/$defs/a", "#/$defs/missing", "http://a/b", "#/properties/a", "#a", ""))}
    if kind < 0.3:
        return {
            "enum": [
                random.choice((1, "a", None, True, 1.5, [], {}, "é", 2**63, -(2**63)))
                for _ in range(random.randint(1, 4))
            ]
        }
    return _typed(random, depth)


def _typed(random: Random, depth: int) -> dict[str, Any]:
    name = random.choice(TYPES)
    made: dict[str, Any] = {"type": name}

    def count() -> Any:
        return random.choice((0, 1, 2, 5, 5, 30, -1, 10**6, 2**31, 2**63, 1.0, 1.5, "1"))

    def number() -> Any:
        return random.choice(NUMBERS) if random.random() < 0.5 else random.randint(-20, 20)

    if name == "object":
        names = random.sample(("a", "b", "c", "é", "", "$ref", "a b", '"'), k=random.randint(0, 3))
        made["properties"] = {one: schema(random, depth + 1) for one in names}
        bodies.maybe(
            random,
            made,
            0.3,
            required=lambda: random.sample([*names, "z"], k=random.randint(0, len(names))),
            additionalProperties=lambda: random.choice((True, False, {"type": "integer"})),
            minProperties=count,
            maxProperties=count,
            patternProperties=lambda: {random.choice(PATTERNS): schema(random, depth + 1)},
            propertyNames=lambda: {"pattern": random.choice(PATTERNS)},
            dependentRequired=lambda: {"a": ["b"]},
        )
    elif name == "array":
        bodies.maybe(
            random,
            made,
            0.5,
            items=lambda: schema(random, depth + 1),
            prefixItems=lambda: [schema(random, depth + 1)],
            minItems=count,
            maxItems=count,
            uniqueItems=lambda: True,
        )
    elif name == "string":
        made |= random.choice(
            ({}, {"pattern": random.choice(PATTERNS)}, {"format": random.choice(("date", "uuid", "x"))})
        )
        bodies.maybe(random, made, 0.3, minLength=count, maxLength=count)
    elif name in ("integer", "number"):
        bodies.maybe(
            random,
            made,
            0.4,
            minimum=number,
            maximum=number,
            exclusiveMinimum=number,
            exclusiveMaximum=number,
            multipleOf=number,
        )
    return made


def constraint(random: Random) -> dict[str, Any]:
    """Fields of a chat that ask for a shape."""
    kind = random.random()
    if kind < 0.6:
        made = schema(random)
        if isinstance(made, dict) and random.random() < 0.3:
            made["$defs"] = {"a": schema(random, 2)}
        if random.random() < 0.25:
            values.mutate(random, made, random.randint(1, 3))
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": made}}}
    if kind < 0.7:
        return {"guided_regex": _text(random, PATTERNS)}
    if kind < 0.8:
        return {"guided_grammar": _text(random, GRAMMARS)}
    if kind < 0.85:
        many = random.choice((1, 3, 50, 3000))
        return {"guided_choice": [f"{values.text(random)[:50]}{at}" for at in range(many)]}
    tool = {"name": "t", "parameters": schema(random), "strict": random.random() < 0.5}
    tools = [{"type": "function", "function": tool}, {"type": "function", "function": {"name": "u"}}]
    return {"tools": tools[: random.randint(1, 2)], "tool_choice": random.choice(("auto", "required", "none"))}


def _text(random: Random, known: tuple[str, ...]) -> str:
    if random.random() < 0.5:
        return random.choice(known)
    made = "".join(random.choices(known, k=random.randint(1, 3)))
    if random.random() < 0.5:
        at = random.randint(0, len(made))
        made = made[:at] + random.choice("()[]{}|*+?\\^$.,/\"'\n:~%@é") + made[at + random.randint(0, 2) :]
    return made


def http_case(engine: str, seed: str, number: int) -> HttpCase:
    """The same for a model behind the HTTP API."""
    random = random_for("schemas over http", seed, number)
    body: dict[str, Any] = {"model": engine, "messages": [{"role": "user", "content": "x"}], "max_tokens": 8}
    if random.random() < 0.5:
        body["stream"] = True
    data = values.encoded({**body, **constraint(random)})
    # A constraint may turn out to be too complex in the middle of a reply.
    request = Request("POST", "/v1/chat/completions", data, (JSON, BEARER), OK | {400}, fault=True)
    return HttpCase((request,))


def case(seed: str, number: int) -> Any:
    random = random_for("schemas", seed, number)
    body = {"messages": [{"role": "user", "content": "x"}], **constraint(random)}
    return {
        "body": values.encoded(body).decode("utf-8", "replace"),
        "format": random.choice(NAMES),
        "begins": random.choices(("reply", "thought", "answer"), (8, 2, 1))[0],
        "walk": random.randrange(2**32),
    }


@functools.cache
def _runner() -> asyncio.Runner:
    return asyncio.Runner()


@functools.cache
def _constraints(name: str) -> ConstraintCompiler:
    """Those of a model whose tokens are bytes."""
    pieces = [bytes([byte]) for byte in range(256)] + [b"<end>"]
    ends = frozenset({END})
    return ConstraintCompiler(GrammarModel(FORMATS[name], ends=ends), pieces, ends, lambda text: list(text.encode()))


def check(value: Any) -> str:
    try:
        request = PROTOCOLS["chat"].decode(value["body"].encode())
        work = _constraints(value["format"]).constrain(request, thinks=False, begins=value["begins"])
        made = _runner().run(work)
    except BadRequest as error:
        _check_message(error)
        return "refused"
    if made is None:
        return "free"
    written, outcome = _walk(made.guide, Random(value["walk"]))
    constraint = request.constraint
    # Other formats frame the answer.
    is_plain = value["format"] == "plain" and value["begins"] == "reply"
    is_whole = outcome == "written" and not (request.tools or made.shape.relaxed)
    if is_plain and is_whole and isinstance(constraint, JsonSchema):
        _check_document(written, constraint.schema)
    return outcome


def _check_message(error: DragomanError) -> None:
    if not error.message.strip() or len(error.message) > MOST_MESSAGE:
        raise Wrong(f"a message of {len(error.message)} characters: {error.message[:100]!r}")
    if "panicked" in error.message or "Traceback" in error.message:
        raise Wrong(f"a message that shows internals: {error.message[:300]!r}")


def _walk(guide: Guide, random: Random) -> tuple[bytes, str]:
    """A reply by chance, and what became of it."""
    written = bytearray()
    try:
        for _ in range(STEPS):
            if guide.is_complete:
                return bytes(written), "written"
            allowed = guide.allowed_tokens(END + 1).nonzero()[0].tolist()
            if not allowed:
                raise Wrong(f"stuck after {bytes(written)[-100:]!r}")
            if END in allowed:
                return bytes(written), "written"
            likely = [byte for byte in allowed if byte in FAVOURED]
            token = random.choice(likely if likely and random.random() < 0.8 else allowed)
            guide.advance(token)
            written.append(token)
    except EngineFailed as error:
        raise Wrong(f"failed after {bytes(written)[-100:]!r}: {error.message}") from error
    except InvalidSchema as error:
        _check_message(error)
        return bytes(written), "too complex"
    return bytes(written), "written in part"


DRAFT4_BOUND = re.compile(r'"exclusive(Minimum|Maximum)": (true|false)')
"""Draft 4 has booleans here. The validator below would compare them as numbers."""


def _check_document(written: bytes, wanted: Mapping[str, Any]) -> None:
    text = written.decode()
    try:
        document = json.loads(text)
    except ValueError as error:
        raise Wrong(f"not JSON: {text[:200]!r}") from error
    if '"pattern' in json.dumps(wanted) or '"$ref"' in json.dumps(wanted):
        # Python's own expressions may take for ever.
        return
    if DRAFT4_BOUND.search(json.dumps(wanted)):
        return
    problem = next(iter(jsonschema.Draft202012Validator(wanted).iter_errors(document)), None)
    if problem is not None:
        raise Wrong(f"{text[:200]} does not satisfy {json.dumps(wanted)[:300]}: {problem.message[:200]}")
