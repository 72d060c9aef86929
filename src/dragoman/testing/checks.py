"""Checks that a scripted reply fits its request: the tools, the tool choice and the schema.

A real model writes no other replies, because they are enforced while it writes.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from dragoman.core.errors import DECODE_ERRORS, truncate
from dragoman.core.request import Constraint, GenerationRequest, JsonObject, JsonSchema, OneOf, Regex, Tool
from dragoman.engines.scripted_replies import ScriptedCall, ScriptedReply
from dragoman.grammar.schema_check import SchemaCheck, find_violations

SHOWN = 200
"""Characters of a text in a message."""


def find_mismatches(reply: ScriptedReply, request: GenerationRequest) -> Iterator[str]:
    choice = request.tool_choice
    offered = {} if choice.mode == "none" else {tool.name: tool for tool in request.tools}
    for call in reply.calls:
        yield from _check_call(call, offered)
    if choice.mode in ("required", "named") and not reply.calls:
        yield f"the request requires a call of {choice.name or 'a tool'}, but the reply has none"
    if choice.mode == "named" and any(call.name != choice.name for call in reply.calls):
        yield f"the request allows calls of {choice.name} only"
    if not choice.parallel and len(reply.calls) > 1:
        yield f"the request allows one call, but the reply has {len(reply.calls)}"
    if request.constraint is not None and not reply.calls:
        yield from _check_text(reply.output or "", request.constraint)


def _check_call(call: ScriptedCall, offered: Mapping[str, Tool]) -> Iterator[str]:
    tool = offered.get(call.name)
    if tool is None:
        yield f"it calls {call.name}, but the request offers {', '.join(offered) or 'no tools'}"
        return
    text = call.arguments_text
    if not isinstance(_parse(text), dict):
        yield f"the arguments of {call.name} are not a JSON object: {truncate(text, SHOWN)}"
    elif tool.parameters is not None:
        yield from _violations(text, tool.parameters, f"the parameters of {call.name}")


def _check_text(text: str, constraint: Constraint) -> Iterator[str]:
    shown = truncate(text, SHOWN)
    if isinstance(constraint, JsonObject) and not isinstance(_parse(text), dict):
        yield f"the request asks for a JSON object, but the text is {shown!r}"
    elif isinstance(constraint, JsonSchema) and isinstance(_parse(text), msgspec.UnsetType):
        yield f"the request has a schema, but the text is not JSON: {shown!r}"
    elif isinstance(constraint, JsonSchema):
        yield from _violations(text, constraint.schema, constraint.path)
    elif isinstance(constraint, Regex) and re.fullmatch(constraint.pattern, text) is None:
        yield f"the text does not match {constraint.pattern!r}: {shown!r}"
    elif isinstance(constraint, OneOf) and text not in constraint.choices:
        yield f"the text is not one of {', '.join(map(repr, constraint.choices))}: {shown!r}"


def _parse(text: str) -> Any:
    """The value of a JSON text; UNSET for any other text."""
    try:
        return msgspec.json.decode(text)
    except DECODE_ERRORS:
        return msgspec.UNSET


def _violations(text: str, schema: Mapping[str, Any], path: str) -> tuple[str, ...]:
    return find_violations([SchemaCheck("reply", schema, path)], [("reply", text.encode())])
