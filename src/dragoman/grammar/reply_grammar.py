"""From a request to the grammar of its whole reply.

    reply   := thought? (answer | calls)          where a shape or a call is asked for
    reply   := (text call)* text                  where a call may be made: it is free to start, not free in itself
    answer  := JSON of a schema | a regular expression | the caller's own grammar | one of some texts
    thought := what the format's tags or channels hold; it ends the one that the prompt has begun

Rules
1. One grammar for everything a reply may be; None where it may be anything.
2. Calls are written as the first entry of the format declares. A format without calls writes bare JSON where a call
   must be made.
3. With a shape and tools, the reply is either. With tools that must not be called, it is text that begins no call.
4. A thought comes first where the prompt has begun one, or where the model is one that thinks.
"""

import json
from collections.abc import Mapping
from typing import Any

import msgspec
from llguidance import regex_to_lark

from dragoman.core.errors import BadRequest, InvalidSchema
from dragoman.core.request import Constraint, GenerationRequest, Grammar, JsonObject, JsonSchema, OneOf, Regex, Tool
from dragoman.formats.json import JSON
from dragoman.formats.syntax import Channels, JsonCall, ModelFormat
from dragoman.grammar.lark import ANY, GAP, Rules, either, escaped, quoted
from dragoman.grammar.patterns import LONGEST, MOST_REPEATS, counted, repeats
from dragoman.grammar.schema import inline, prepare
from dragoman.grammar.schema_check import Check
from dragoman.grammar.schema_walk import rebased
from dragoman.grammar.thinking import thoughts
from dragoman.grammar.tool_calls import MOST_CALLS, CallGrammar, ToolShape, bare_beginning, trigger, triggers

MOST_GRAMMAR = 64 * 1024
MOST_CHOICES = 10_000

OPENING = frozenset({"additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"})
"""Beside these, properties that are not named may still be meant."""

CHOOSING = ("tool_choice", "function_call")
"""Fields that ask for a call to be made, not for the shape of an answer."""


class Shape(msgspec.Struct, frozen=True):
    """`param` is the path of the field that asked for it. `calls`: the reply is calls and nothing else."""

    grammar: str
    param: str
    calls: bool = False
    relaxed: tuple[str, ...] = ()
    checks: tuple[Check, ...] = ()


class Speaker(msgspec.Struct, frozen=True):
    """The model as far as a grammar has to know it: `control` are the markers of its format that are control tokens, by
    id; those that end a generation are in `ends`. `thinks`: it may begin a thought of its own accord."""

    format: ModelFormat
    control: Mapping[str, int] = {}
    ends: frozenset[int] = frozenset()
    thinks: bool = False


def shape(request: GenerationRequest, speaker: Speaker, *, opened: bool) -> Shape | None:
    """What the reply is kept to; `opened`: the prompt ends inside a thought."""
    if request.constraint is None and not request.tools:
        return None
    return _Reply(request, speaker, opened).shape()


def blamed_field(request: GenerationRequest) -> str:
    """The path of the field that asks for the reply's shape."""
    feature = "tools" if request.constraint is None else "constraint"
    params = (asked.param for asked in request.asked if asked.feature == feature)
    return next((param for param in params if param not in CHOOSING), feature)


class _Reply:
    def __init__(self, request: GenerationRequest, speaker: Speaker, opened: bool) -> None:
        self.request = request
        self.choice = request.tool_choice
        self.must = self.choice.mode in ("required", "named")
        # Who names a tool wants it called, once.
        self.several = self.choice.parallel and self.choice.mode != "named"
        self.speaker = speaker
        self.format = speaker.format
        self.opened = opened
        control = {text: token for text, token in speaker.control.items() if token not in speaker.ends}
        self.rules = Rules(control, blamed_field(self.request))
        self.relaxed: list[str] = []
        self.checks: list[Check] = []
        self.others: list[dict[str, str]] = []
        self.calls = CallGrammar(self.rules, [] if self.choice.mode == "none" else self._tools())

    def shape(self) -> Shape | None:
        start = self._start()
        if start is None:
            return None
        grammar = self.rules.grammar(start)
        if self.others:
            grammar = json.dumps({"grammars": [{"lark_grammar": grammar}, *self.others]}, ensure_ascii=False)
        relaxed = tuple(dict.fromkeys((*self.relaxed, *self.calls.relaxed)))
        return Shape(grammar, blamed_field(self.request), self.must, relaxed, (*self.checks, *self.calls.checks))

    def _start(self) -> str | None:
        constraint, must = self.request.constraint, self.must
        if constraint is None and not must:
            return self._free()
        if not must and self.calls.tools and isinstance(constraint, JsonObject | JsonSchema) and self._bare_json():
            return f"{self._thought()} {self._one_document(constraint)}"
        answer = None if constraint is None or must else self._answer(constraint)
        if self.format.channels is not None and self.format.channels.message:
            return self._channelled(self.format.channels, answer)
        options = [] if answer is None else [self._framed(answer)]
        if self.calls.tools:
            options.append(self.calls.turn(self._written().calls[0], self.several))
        return f"{self._thought()} {either(options)}"

    def _written(self) -> ModelFormat:
        return self.format if self.format.calls else JSON

    # The answer.

    def _answer(self, constraint: Constraint) -> str:
        if isinstance(constraint, JsonObject):
            return self.rules.rule("answer", inline({"type": "object"}))
        if isinstance(constraint, JsonSchema):
            return self._schema(constraint)
        param = blamed_field(self.request)
        if isinstance(constraint, OneOf):
            return self._choices(constraint, param)
        text = constraint.text if isinstance(constraint, Grammar) else _expression(constraint, param)
        if isinstance(constraint, Grammar):
            _check_grammar(text, param)
        self.others.append({"name": "answer", "lark_grammar": text})
        return "@answer"

    def _choices(self, constraint: OneOf, param: str) -> str:
        """One terminal with all choices: thousands of alternatives in a rule exceed the parser's limits."""
        if not 0 < len(constraint.choices) <= MOST_CHOICES:
            raise InvalidSchema(f"{param}: from 1 to {MOST_CHOICES} choices are needed", param=param)
        texts = [quoted(choice) for choice in dict.fromkeys(constraint.choices) if choice]
        if not texts:
            return '""'
        choice = self.rules.terminal("CHOICE", " | ".join(texts))
        return choice if all(constraint.choices) else f"{choice}?"

    def _schema(self, constraint: JsonSchema) -> str:
        schema = self._prepared(constraint)
        options = '[capture="answer"]' if self.checks and self.checks[-1].capture == "answer" else ""
        return self.rules.rule("answer", inline(schema), options)

    def _prepared(self, constraint: JsonSchema) -> Any:
        prepared = prepare(constraint.schema, constraint.path)
        self.relaxed += prepared.relaxed
        if prepared.relaxed:
            self.checks.append(Check("answer", prepared.told, constraint.path))
        return prepared.schema

    def _bare_json(self) -> bool:
        entry = self._written().calls[0]
        return self.format.channels is None and isinstance(entry.call, JsonCall) and not entry.open

    def _one_document(self, constraint: JsonObject | JsonSchema) -> str:
        """Where calls are JSON without a marker, and so is the answer: which of them it is shows only as it goes on."""
        entry = self._written().calls[0]
        assert isinstance(entry.call, JsonCall)
        answer = {"type": "object"} if isinstance(constraint, JsonObject) else self._prepared(constraint)
        held = {"answer": answer} | {f"tool_{at}": tool.schema for at, tool in enumerate(self.calls.tools)}
        options = [_call_schema(entry.call, tool.name, f"tool_{at}") for at, tool in enumerate(self.calls.tools)]
        if self.several and not entry.between:
            options.append({"type": "array", "items": {"anyOf": [*options]}, "minItems": 1, "maxItems": MOST_CALLS})
        document = {
            "anyOf": [{"$ref": "#/$defs/answer"}, *options],
            "$defs": {name: rebased(schema or {"type": "object"}, f"/$defs/{name}") for name, schema in held.items()},
        }
        # Nothing tells afterwards which of them was written.
        self.checks.clear()
        return self.rules.rule("answer", inline(document))

    def _framed(self, answer: str) -> str:
        """The answer with the markers around it that the family writes there, if the model writes them."""
        marks = [f"<[{token}]>" for text, token in self.rules.control.items() if text in self.format.silent]
        if marks:
            frame = either(marks)
            answer = f"({frame} {GAP})? {answer} ({GAP} {frame})?"
        tags = self.format.answer
        if tags is None:
            return answer
        begin, end = self.rules.text(tags.open), self.rules.text(tags.close)
        return f"({begin} {GAP} {answer} {GAP} {end} | {answer})"

    # Thoughts.

    def _thought(self) -> str:
        known = thoughts(self.format)
        if not known:
            return ""
        if self.opened:
            return f"{either([self.rules.until(tags.close) for tags in known])} {GAP}"
        if not self.speaker.thinks:
            return ""
        whole = [f"{self.rules.text(tags.open)} {self.rules.until(tags.close)}" for tags in known]
        return f"({either(whole)} {GAP})?"

    # Every message on a channel.

    def _channelled(self, channels: Channels, answer: str | None) -> str:
        final = self.rules.text(f"{channels.open}final{channels.message}")
        options = [] if answer is None else [f"{final} {answer}"]
        options += [self.calls.channel(channels, tool) for tool in self.calls.tools]
        return f"{self._messages(channels, channels.hidden[1], '?')} {either(options)}"

    def _messages(self, channels: Channels, names: str, times: str) -> str:
        """Messages before the last one."""
        if self.speaker.control.get(channels.ends[0]) in self.speaker.ends:
            return ""
        again = self.rules.text(f"{channels.start}assistant")
        text = self.rules.until(channels.ends[0])
        begin, message = self.rules.text(channels.open), self.rules.text(channels.message)
        return f"({begin} /{names}/ {message} {text} {again}){times}"

    def _free_channels(self, channels: Channels) -> str:
        final = self.rules.text(f"{channels.open}final{channels.message}")
        calls = [self.calls.channel(channels, tool) for tool in self.calls.tools]
        return f"{self._messages(channels, 'analysis|commentary', '*')} {either([f'{final} TEXT', *calls])}"

    # Free text, in which calls may begin.

    def _free(self) -> str | None:
        if self.format.channels is not None and self.format.channels.message:
            return self._free_channels(self.format.channels)
        if not self.format.calls:
            return None
        if self.choice.mode == "none":
            return self._without_calls()
        items = self._items("TEXT")
        beginning = bare_beginning(self.format, self.calls.tools)
        if beginning is None:
            return f"({either(items)})* TEXT" if self.several else f"{either([*items, 'TEXT'])}"
        text = self.rules.terminal("UNCALLED", f"{ANY} & ~/{beginning}(?s:.*)/")
        begun = self._items(text)
        options = [self.calls.bare(self.format.calls[0], self.several), text]
        if begun:
            options.append(f"{either(begun)} ({either(items)})* TEXT" if self.several else either(begun))
        return f"{self._thought()} {either(options)}"

    def _items(self, text: str) -> list[str]:
        """Text up to where a call begins, with the call, and text up to another marker of the format."""
        items = [f"{text} {mark}" for mark in self._harmless()]
        for marker, entries in triggers(self.format).items():
            begin = trigger(marker)
            rest = [self.calls.rest(entry, self.several, begun=begin != marker) for entry in entries]
            items.append(f"{self.rules.until(begin, text)} {either(rest)}")
        return items

    def _harmless(self) -> list[str]:
        """Control tokens that frame thoughts and answers."""
        framing = {
            tag for tags in (*thoughts(self.format), self.format.answer) if tags for tag in (tags.open, tags.close)
        }
        return [f"<[{token}]>" for text, token in self.rules.control.items() if text in framing | {*self.format.silent}]

    def _without_calls(self) -> str:
        tools = [ToolShape(tool.name, "") for tool in self.request.tools]
        forbidden = [f"(?s:.*){escaped(trigger(marker))}(?s:.*)" for marker in triggers(self.format)]
        beginning = bare_beginning(self.format, tools)
        first = forbidden if beginning is None else [*forbidden, f"{beginning}(?s:.*)"]
        text = self.rules.terminal("UNCALLED", " & ".join((ANY, *(f"~/{part}/" for part in forbidden))))
        begun = self.rules.terminal("UNCALLED", " & ".join((ANY, *(f"~/{part}/" for part in first))))
        marks = self._harmless()
        if not marks:
            return begun
        return f"{begun} ({either(marks)} {text})*"

    # Tools.

    def _tools(self) -> list[ToolShape]:
        offered = [(at, tool) for at, tool in enumerate(self.request.tools) if self.choice.name in (None, tool.name)]
        if not offered and self.choice.mode == "named":
            raise BadRequest(f"tool_choice: there is no tool '{self.choice.name}'", param="tool_choice")
        return [self._tool(tool, f"tool_{at}") for at, tool in offered]

    def _tool(self, tool: Tool, capture: str) -> ToolShape:
        name, path = tool.name, tool.path
        if not tool.parameters:
            return ToolShape(name, path)
        try:
            prepared = prepare(tool.parameters, path)
        except InvalidSchema as mistake:
            if self.must or tool.strict:
                raise
            # One tool of an agent's many, which may never be called: the others are worth more than its mistake.
            self.relaxed.append(mistake.param or path)
            return ToolShape(name, path)
        self.relaxed += prepared.relaxed
        enforced = _as_object(prepared.schema)
        if not prepared.relaxed:
            return ToolShape(name, path, prepared.told, enforced)
        self.checks.append(Check(capture, prepared.told, path))
        return ToolShape(name, path, prepared.told, enforced, capture)


def _call_schema(call: JsonCall, name: str, arguments: str) -> dict[str, Any]:
    keys = [call.name[0], call.arguments[0]]
    members = {keys[0]: {"const": name}, keys[1]: {"$ref": f"#/$defs/{arguments}"}}
    return {"type": "object", "properties": members, "required": keys, "additionalProperties": False}


def _as_object(schema: Any) -> Any:
    """Arguments are an object, whatever a schema leaves open."""
    return _closed({"type": "object", **schema}) if isinstance(schema, Mapping) else {"type": "object"}


def _closed(schema: Any) -> Any:
    """The schema of arguments without members that it does not name, unless it says that there may be others: who
    describes the parameters of a function means these and no others, and a weak model would go on inventing some."""
    if not isinstance(schema, Mapping):
        return schema
    closed = dict(schema)
    if (
        "properties" in schema
        and OPENING.isdisjoint(schema)
        and {*schema.get("required", ())} <= {*schema["properties"]}
    ):
        closed["additionalProperties"] = False
    if isinstance(schema.get("properties"), Mapping):
        closed["properties"] = {name: _closed(inner) for name, inner in schema["properties"].items()}
    if isinstance(schema.get("items"), Mapping):
        closed["items"] = _closed(schema["items"])
    return closed


def _expression(constraint: Regex, param: str) -> str:
    if len(constraint.pattern) > LONGEST or repeats(constraint.pattern) > MOST_REPEATS:
        raise InvalidSchema(
            f"{param}: a regular expression may have {LONGEST} characters and repeat {MOST_REPEATS} times", param=param
        )
    return f"start: /{regex_to_lark(constraint.pattern, '')}/"


def _check_grammar(text: str, param: str) -> None:
    if len(text) > MOST_GRAMMAR:
        raise InvalidSchema(f"{param}: a grammar may have {MOST_GRAMMAR} characters, not {len(text)}", param=param)
    if counted(text) > MOST_REPEATS:
        raise InvalidSchema(f"{param}: a grammar may repeat {MOST_REPEATS} times, not more", param=param)
