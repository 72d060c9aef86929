"""Builds the grammar of a whole reply from a request.

    reply   := thought? (answer | calls)          if a constraint or a call is required
    reply   := (text call)* text                  if calls are optional: the text is free, the calls are not
    answer  := JSON of a schema | a regular expression | the caller's grammar | one of several texts
    thought := reasoning between the format's tags or on its channels

Rules
1. One grammar covers everything that a reply may be. The result is None if the reply is unrestricted.
2. Required calls use the first call section of the format; optional ones any with a marker, or a bare first section. A
   format without calls uses bare JSON if a call is required.
3. With a constraint and tools, the reply is one or the other. With tool_choice "none", it is text without calls.
4. Reasoning comes first if the prompt has opened it or if the model may reason.
5. If the reply continues a text, the grammar is that of the text and the reply together.
"""

import json
from collections.abc import Collection, Mapping
from typing import Any, Literal

import msgspec
from llguidance import regex_to_lark

from dragoman.core.errors import BadRequest, InvalidSchema
from dragoman.core.features import Feature
from dragoman.core.request import Constraint, GenerationRequest, Grammar, JsonObject, JsonSchema, OneOf, Regex, Tool
from dragoman.formats.bare_json import JSON
from dragoman.formats.syntax import Channels, JsonCall, ModelFormat, reasoning_tags
from dragoman.grammar.call_grammar import (
    MAX_CALLS,
    CallGrammar,
    ToolGrammar,
    bare_call_pattern,
    opener_text,
    section_openers,
)
from dragoman.grammar.gbnf import is_gbnf
from dragoman.grammar.gbnf_lark import gbnf_to_lark
from dragoman.grammar.lark import ANY_TEXT, GAP, RuleSet, escape_regex, one_of, quote
from dragoman.grammar.schema import json_directive, prepare_schema
from dragoman.grammar.schema_check import SchemaCheck
from dragoman.grammar.schema_limits import MAX_PATTERN, MAX_REPEATS, count_repeats, max_repeat_count
from dragoman.grammar.schema_walk import rebase_refs

MAX_GRAMMAR = 64 * 1024
MAX_CHOICES = 10_000

OPEN_SCHEMA_KEYWORDS = frozenset({"additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"})
"""With one of these, an object may have properties that it does not list."""

TOOL_CHOICE_FIELDS = ("tool_choice", "function_call")
"""Fields that require a call but do not constrain the answer."""


class ReplyGrammar(msgspec.Struct, frozen=True):
    """The grammar of a reply. `param` is the request field that asked for it. `calls`: the reply consists of calls
    only. `relaxed` are the paths of schema keywords that are not enforced, `checks` what to validate afterwards."""

    grammar: str
    param: str
    calls: bool = False
    relaxed: tuple[str, ...] = ()
    checks: tuple[SchemaCheck, ...] = ()


class GrammarModel(msgspec.Struct, frozen=True):
    """The properties of a model that its grammars depend on. `control` has the token ids of markers that are control
    tokens. `ends` are the tokens that end a generation. `thinks`: the model may start to reason."""

    format: ModelFormat
    control: Mapping[str, int] = {}
    ends: frozenset[int] = frozenset()
    thinks: bool = False


Beginning = Literal["reply", "thought", "answer"]
"""Where the prompt ends: before the reply, inside reasoning, or inside the answer (in the channel of answers)."""


def build_reply_grammar(request: GenerationRequest, model: GrammarModel, *, begins: Beginning) -> ReplyGrammar | None:
    """Return the grammar of the reply, or None if it is unrestricted."""
    if request.constraint is None and not request.tools:
        return None
    return _ReplyGrammarBuilder(request, model, begins).build()


def constraint_param(request: GenerationRequest) -> str:
    """Return the request field that asks for the constraint."""
    feature = Feature.TOOLS if request.constraint is None else Feature.CONSTRAINT
    params = (asked.param for asked in request.asked if asked.feature == feature)
    return next((param for param in params if param not in TOOL_CHOICE_FIELDS), feature)


class _ReplyGrammarBuilder:
    def __init__(self, request: GenerationRequest, model: GrammarModel, begins: Beginning) -> None:
        self.request = request
        self.choice = request.tool_choice
        self.is_forced = self.choice.mode in ("required", "named")
        # A named tool is called exactly once.
        self.parallel = self.choice.parallel and self.choice.mode != "named"
        self.model = model
        self.format = model.format
        self.call_section = (self.format if self.format.calls else JSON).calls[0]
        self.begins = begins
        control = {text: token for text, token in model.control.items() if token not in model.ends}
        self.rules = RuleSet(control, constraint_param(self.request))
        self.relaxed: list[str] = []
        self.checks: list[SchemaCheck] = []
        self.subgrammars: list[dict[str, str]] = []
        self.calls = CallGrammar(self.rules, [] if self.choice.mode == "none" else self._prepare_tools())

    def build(self) -> ReplyGrammar | None:
        start = self._start()
        if start is None:
            return None
        grammar = self.rules.build(start)
        if self.subgrammars:
            grammar = json.dumps({"grammars": [{"lark_grammar": grammar}, *self.subgrammars]}, ensure_ascii=False)
        relaxed = tuple(dict.fromkeys((*self.relaxed, *self.calls.relaxed)))
        return ReplyGrammar(
            grammar, constraint_param(self.request), self.is_forced, relaxed, (*self.checks, *self.calls.checks)
        )

    def _start(self) -> str | None:
        constraint, is_forced = self.request.constraint, self.is_forced
        if constraint is None and not is_forced:
            return self._free_reply()
        if (
            not is_forced
            and self.calls.tools
            and isinstance(constraint, JsonObject | JsonSchema)
            and self.format.channels is None
            and isinstance(self.call_section.call, JsonCall)
            and not self.call_section.open
        ):
            return f"{self._reasoning_prefix()} {self._json_answer_or_call(constraint, self.call_section.call)}"
        answer = None if constraint is None or is_forced else self._answer(constraint)
        if self.format.channels is not None and self.format.channels.message:
            return self._channel_reply(self.format.channels, answer, self.format.channels.hidden[1], "?")
        options = [] if answer is None else [self._with_answer_markers(answer)]
        if self.calls.tools:
            options.append(self.calls.reply_calls(self.call_section, self.parallel))
        return f"{self._reasoning_prefix()} {one_of(options)}"

    def _answer(self, constraint: Constraint) -> str:
        if isinstance(constraint, JsonObject):
            return self.rules.add_rule("answer", json_directive({"type": "object"}))
        if isinstance(constraint, JsonSchema):
            schema = self._prepare_answer(constraint)
            is_checked = self.checks and self.checks[-1].capture == "answer"
            return self.rules.add_rule("answer", json_directive(schema), capture="answer" if is_checked else None)
        param = constraint_param(self.request)
        if isinstance(constraint, OneOf):
            return self._choices(constraint, param)
        self.subgrammars.append({"name": "answer", "lark_grammar": _grammar_text(constraint, param)})
        return "@answer"

    def _choices(self, constraint: OneOf, param: str) -> str:
        """Use one terminal for all choices: thousands of alternatives in a rule exceed the parser's limits."""
        if not 0 < len(constraint.choices) <= MAX_CHOICES:
            raise InvalidSchema(f"{param}: 1 to {MAX_CHOICES} choices are required", param=param)
        texts = [quote(choice) for choice in dict.fromkeys(constraint.choices) if choice]
        if not texts:
            return '""'
        choice = self.rules.add_rule("CHOICE", " | ".join(texts))
        return choice if all(constraint.choices) else f"{choice}?"

    def _prepare_answer(self, constraint: JsonSchema) -> Any:
        prepared = prepare_schema(constraint.schema, constraint.path)
        self.relaxed += prepared.relaxed
        if prepared.relaxed:
            self.checks.append(SchemaCheck("answer", prepared.full_schema, constraint.path))
        return prepared.schema

    def _json_answer_or_call(self, constraint: JsonObject | JsonSchema, call: JsonCall) -> str:
        """Use one schema for the answer and the calls if both are bare JSON, because their beginnings look the same."""
        answer = {"type": "object"} if isinstance(constraint, JsonObject) else self._prepare_answer(constraint)
        definitions = {"answer": answer} | {f"tool_{index}": tool.schema for index, tool in enumerate(self.calls.tools)}
        options = [_call_schema(call, tool.name, f"tool_{index}") for index, tool in enumerate(self.calls.tools)]
        if self.parallel and not self.call_section.separator:
            options.append({"type": "array", "items": {"anyOf": [*options]}, "minItems": 1, "maxItems": MAX_CALLS})
        document = {
            "anyOf": [{"$ref": "#/$defs/answer"}, *options],
            "$defs": {
                name: rebase_refs(schema or {"type": "object"}, f"/$defs/{name}")
                for name, schema in definitions.items()
            },
        }
        # The finished reply does not show which alternative was chosen.
        self.checks.clear()
        return self.rules.add_rule("answer", json_directive(document))

    def _with_answer_markers(self, answer: str) -> str:
        """Allow the markers that the format may write around an answer."""
        marks = self._control_tokens(self.format.frame_markers)
        if marks:
            frame = one_of(marks)
            answer = f"({frame} {GAP})? {answer} ({GAP} {frame})?"
        tags = self.format.answer
        if tags is None:
            return answer
        begin, end = self.rules.literal(tags.open), self.rules.literal(tags.close)
        return f"({begin} {GAP} {answer} {GAP} {end} | {answer})"

    def _reasoning_prefix(self) -> str:
        known = reasoning_tags(self.format)
        if not known:
            return ""
        if self.begins == "thought":
            return f"{one_of([self.rules.until(tags.close) for tags in known])} {GAP}"
        if not self.model.thinks:
            return ""
        whole = [f"{self.rules.literal(tags.open)} {self.rules.until(tags.close)}" for tags in known]
        return f"({one_of(whole)} {GAP})?"

    def _channel_reply(self, channels: Channels, answer: str | None, names: str, times: str) -> str:
        """The answer or a call, after earlier messages on the channels `names`."""
        final = self.rules.literal(f"{channels.open}final{channels.message}")
        options = [] if answer is None else [f"{final} {answer}"]
        last = one_of([*options, *(self.calls.channel_call(channels, tool) for tool in self.calls.tools)])
        if answer is not None and self.begins == "answer":
            return answer
        if self.model.control.get(channels.ends[0]) in self.model.ends:
            return last
        again = self.rules.literal(f"{channels.start}assistant")
        text = self.rules.until(channels.ends[0])
        begin, message = self.rules.literal(channels.open), self.rules.literal(channels.message)
        messages = f"({begin} /{names}/ {message} {text} {again}){times} {last}"
        return messages if self.begins == "reply" else f"{text} {again} {messages}"

    def _free_reply(self) -> str | None:
        if self.format.channels is not None and self.format.channels.message:
            return self._channel_reply(self.format.channels, "TEXT", "analysis|commentary", "*")
        if not self.format.calls:
            return None
        if self.choice.mode == "none":
            return self._text_without_calls()
        items = self._call_items("TEXT")
        beginning = bare_call_pattern(self.format, self.calls.tools)
        if beginning is None:
            return f"({one_of(items)})* TEXT" if self.parallel else f"{one_of([*items, 'TEXT'])}"
        text = self.rules.add_rule("UNCALLED", f"{ANY_TEXT} & ~/{beginning}(?s:.*)/")
        started = self._call_items(text)
        options = [self.calls.bare_calls(self.format.calls[0], self.parallel), text]
        if started:
            options.append(f"{one_of(started)} ({one_of(items)})* TEXT" if self.parallel else one_of(started))
        return f"{self._reasoning_prefix()} {one_of(options)}"

    def _call_items(self, text: str) -> list[str]:
        """Text up to and including a call, and text up to another marker of the format."""
        items = [f"{text} {mark}" for mark in self._framing_tokens()]
        for marker, entries in section_openers(self.format).items():
            begin = opener_text(marker)
            rest = [self.calls.section_body(entry, self.parallel, bracket_open=begin != marker) for entry in entries]
            items.append(f"{self.rules.until(begin, text)} {one_of(rest)}")
        return items

    def _framing_tokens(self) -> list[str]:
        """Control tokens that frame reasoning and answers."""
        framing = [*reasoning_tags(self.format), *([self.format.answer] if self.format.answer else [])]
        tags = [tag for pair in framing for tag in (pair.open, pair.close)]
        return self._control_tokens((*tags, *self.format.frame_markers))

    def _control_tokens(self, markers: Collection[str]) -> list[str]:
        """Those of the markers that are control tokens."""
        return [f"<[{token}]>" for text, token in self.rules.control.items() if text in markers]

    def _text_without_calls(self) -> str:
        tools = [ToolGrammar(tool.name, "") for tool in self.request.tools]
        forbidden = [f"(?s:.*){escape_regex(opener_text(marker))}(?s:.*)" for marker in section_openers(self.format)]
        beginning = bare_call_pattern(self.format, tools)
        first = forbidden if beginning is None else [*forbidden, f"{beginning}(?s:.*)"]
        text = self.rules.add_rule("UNCALLED", " & ".join((ANY_TEXT, *(f"~/{part}/" for part in forbidden))))
        started = self.rules.add_rule("UNCALLED", " & ".join((ANY_TEXT, *(f"~/{part}/" for part in first))))
        marks = self._framing_tokens()
        if not marks:
            return started
        return f"{started} ({one_of(marks)} {text})*"

    def _prepare_tools(self) -> list[ToolGrammar]:
        offered = [
            (index, tool) for index, tool in enumerate(self.request.tools) if self.choice.name in (None, tool.name)
        ]
        if not offered and self.choice.mode == "named":
            raise BadRequest(f"tool_choice: unknown tool '{self.choice.name}'", param="tool_choice")
        return [self._prepare_tool(tool, f"tool_{index}") for index, tool in offered]

    def _prepare_tool(self, tool: Tool, capture: str) -> ToolGrammar:
        name, path = tool.name, tool.path
        if not tool.parameters:
            return ToolGrammar(name, path)
        try:
            prepared = prepare_schema(tool.parameters, path)
        except InvalidSchema as error:
            if self.is_forced or tool.strict:
                raise
            # The tool is optional, so its schema is relaxed as a whole and the other tools keep working.
            self.relaxed.append(error.param or path)
            return ToolGrammar(name, path)
        self.relaxed += prepared.relaxed
        is_object = isinstance(prepared.schema, Mapping)
        enforced = _close_objects({"type": "object", **prepared.schema}) if is_object else {"type": "object"}
        if not prepared.relaxed:
            return ToolGrammar(name, path, prepared.full_schema, enforced)
        self.checks.append(SchemaCheck(capture, prepared.full_schema, path))
        return ToolGrammar(name, path, prepared.full_schema, enforced, capture)


def _call_schema(call: JsonCall, name: str, arguments: str) -> dict[str, Any]:
    keys = [call.name[0], call.arguments[0]]
    members = {keys[0]: {"const": name}, keys[1]: {"$ref": f"#/$defs/{arguments}"}}
    return {"type": "object", "properties": members, "required": keys, "additionalProperties": False}


def _close_objects(schema: Any) -> Any:
    """Disallow properties that an object schema does not list unless it explicitly allows others. Otherwise a weak
    model keeps inventing arguments."""
    if not isinstance(schema, Mapping):
        return schema
    closed = dict(schema)
    if (
        "properties" in schema
        and OPEN_SCHEMA_KEYWORDS.isdisjoint(schema)
        and {*schema.get("required", ())} <= {*schema["properties"]}
    ):
        closed["additionalProperties"] = False
    if isinstance(schema.get("properties"), Mapping):
        closed["properties"] = {name: _close_objects(inner) for name, inner in schema["properties"].items()}
    if isinstance(schema.get("items"), Mapping):
        closed["items"] = _close_objects(schema["items"])
    return closed


def _grammar_text(constraint: Regex | Grammar, param: str) -> str:
    if isinstance(constraint, Regex):
        pattern = constraint.pattern
        if len(pattern) > MAX_PATTERN or count_repeats(pattern) > MAX_REPEATS:
            limits = f"{MAX_PATTERN} characters and {MAX_REPEATS} repetitions"
            raise InvalidSchema(f"{param}: a regular expression may have at most {limits}", param=param)
        return f"start: /{regex_to_lark(pattern, '')}/"
    if len(constraint.text) > MAX_GRAMMAR:
        problem = f"has {len(constraint.text)} characters; at most {MAX_GRAMMAR} are allowed"
        raise InvalidSchema(f"{param}: the grammar {problem}", param=param)
    if max_repeat_count(constraint.text) > MAX_REPEATS:
        raise InvalidSchema(f"{param}: the grammar has more than {MAX_REPEATS} repetitions", param=param)
    return gbnf_to_lark(constraint.text, param) if is_gbnf(constraint.text) else constraint.text
