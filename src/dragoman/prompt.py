"""A conversation as the model's own chat template writes it, cut into what may hold control tokens and what may not.

    render := escape request strings -> template -> cut at the marks -> Segment*
    Segment(special=True)   text of the template, with the content that stands between its control tokens
    Segment(special=False)  content that looks like a control token, to be tokenised as plain text

Rules
1. A control text (`<|im_end|>`) in any string of a request never becomes a control token. Before rendering it is
   replaced by a mark, one Tangut character; what stands for the mark afterwards is plain. (Tangut: no filter changes
   its letters, neither JSON nor Python escapes them, and nobody has written them for five hundred years.)
2. The control texts in the template's own literals get marks too. So one that is found between the marks after
   rendering was put together from pieces: by two strings meeting, by a filter, by content meeting the template.
3. Where rule 2 finds one, the template runs again with every character marked that some control text has. Then only
   pieces of the template's own can still make a control text.
4. Tangut characters in a request are marked like control texts, so nobody can send a mark.
5. Otherwise template and content are tokenised together: these are the tokens the model was trained on.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any, NoReturn

import msgspec
from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dragoman.conversation import GenerationRequest, Message, Reasoning, Text, Tool, ToolCall, ToolResult
from dragoman.errors import BadRequest, ConfigError, EngineFailed

FALLBACK = """\
{%- if tools %}
{{- '<|im_start|>system\n' }}
{%- if messages and messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}
{{- 'You may call these functions:\n<tools>\n' }}
{%- for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}
{{- '</tools>\nA call is <tool_call>{"name": ..., "arguments": {...}}</tool_call><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if not (tools and loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\n<tool_call>' + call.function | tojson + '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
"""For a model that brings no template: ChatML, the most widely trained layout, with tools as Hermes writes them."""

FIRST_MARK = 0x17000
LAST_MARK = 0x187F7
UNMARKED = r'\s"\\\x00-\x1f'
"""Characters that stay themselves in rule 3: templates trim white space, and JSON writes the others differently."""

SCHEMA_WORDS = {
    *("type", "properties", "required", "items", "enum", "const", "default", "description", "title", "format", "name"),
    *("parameters", "additionalProperties", "anyOf", "oneOf", "allOf", "$ref", "$defs"),
    *("object", "array", "string", "integer", "number", "boolean", "null"),
}
"""Templates read these in a tool's schema, so they too stay themselves; none of them is a piece to be afraid of."""

Change = Callable[[str], str]


class Segment(msgspec.Struct, frozen=True):
    text: str
    special: bool


class ChatTemplate:
    """`control` are the texts of the model's control tokens; no source means the fallback."""

    def __init__(self, source: str | None, *, bos: str, eos: str, control: Sequence[str]) -> None:
        texts = sorted({text for text in control if text})
        longest = _longest_of(texts) if texts else "(?!)"
        self._marked = re.compile(f"[{chr(FIRST_MARK)}-{chr(LAST_MARK)}]|{longest}")
        self._control = re.compile(f"(?=({longest}))")
        self._own = _Marks(FIRST_MARK)
        self._environment = _environment()
        self._template = self._compile(FALLBACK if source is None else source)
        self._tokens = {"bos_token": self._escape(bos, self._own), "eos_token": self._escape(eos, self._own)}
        self._letters = frozenset("".join(texts))
        self._content = self._content_pattern()

    def render(self, request: GenerationRequest) -> tuple[Segment, ...]:
        marks = _Marks(self._own.next)
        cut = self._content.split(self._run(request, lambda text: self._escape(text, marks), marks))
        if not all(self._only_own(part) for part in cut[::2]):
            marks = _Marks(self._own.next)
            cut = self._content.split(self._run(request, lambda text: self._mark_letters(text, marks), marks))
        return tuple(self._segments(cut, marks))

    def _content_pattern(self) -> re.Pattern[str]:
        """Marks of content, with what stands between two of them as long as no control text could begin there."""
        mark = f"[{chr(self._own.next)}-{chr(LAST_MARK)}]"
        letters = re.escape("".join(sorted(char for char in self._letters if not _UNMARKED.match(char))))
        return re.compile(f"({mark}(?:[^{letters}{chr(FIRST_MARK)}-{chr(LAST_MARK)}]*+{mark})*)")

    def _compile(self, source: str) -> Any:
        try:
            tree = self._environment.parse(source)
            for data in tree.find_all(nodes.TemplateData):
                data.data = self._escape(data.data, self._own)
            for constant in tree.find_all(nodes.Const):
                if isinstance(constant.value, str):
                    constant.value = self._escape(constant.value, self._own)
            return self._environment.from_string(tree)
        except TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template does not parse: {error.message} (line {error.lineno} of it)"
            ) from error
        except RecursionError as error:
            raise ConfigError("the chat template is nested too deeply") from error

    def _escape(self, text: str, marks: "_Marks") -> str:
        return self._marked.sub(lambda found: marks.of(found[0]), text)

    def _mark_letters(self, text: str, marks: "_Marks") -> str:
        return text.translate({ord(char): marks.of(char) for char in set(text) if self._is_letter(char)})

    def _is_letter(self, char: str) -> bool:
        """Whether it stands in a control text, or would after a filter has changed its case."""
        if _UNMARKED.match(char):
            return False
        variants = char + char.lower() + char.upper() + char.casefold()
        return FIRST_MARK <= ord(char) <= LAST_MARK or not self._letters.isdisjoint(variants)

    def _run(self, request: GenerationRequest, data: Change, marks: "_Marks") -> str:
        try:
            rendered: str = self._template.render(
                messages=[entry for message in request.messages for entry in _entries(message, data)],
                tools=[_function(tool, data) for tool in request.tools] or None,
                add_generation_prompt=True,
                **self._tokens,
            )
        except _RefusedError as refusal:
            raise BadRequest(self._unmarked(str(refusal), marks), param="messages") from refusal
        except RecursionError as error:
            raise BadRequest("the conversation is nested too deeply", param="messages") from error
        except (BadRequest, MemoryError):
            raise
        except Exception as error:
            words = self._unmarked(f"{type(error).__name__}: {error}", marks)
            raise EngineFailed(f"the model's chat template failed: {words}") from error
        return rendered

    def _only_own(self, part: str) -> bool:
        """Whether each control text in it, overlapping ones too, lies inside one literal of the template (rule 2)."""
        found = self._control.findall(part.translate(self._own.texts))
        return bool(found == [text for code in map(ord, part) for text in self._inside(code)])

    def _inside(self, code: int) -> list[str]:
        text = self._own.texts.get(code)
        return self._control.findall(text) if text is not None else []

    def _segments(self, cut: Iterable[str], marks: "_Marks") -> Iterator[Segment]:
        for index, part in enumerate(cut):
            if part:
                special = index % 2 == 0
                yield Segment(part.translate((self._own if special else marks).texts), special)

    def _unmarked(self, text: str, marks: "_Marks") -> str:
        return text.translate(self._own.texts | marks.texts)


class _Marks:
    """Single characters that stand for texts; the same text always gets the same one."""

    def __init__(self, first: int) -> None:
        self.next = first
        self.texts: dict[int, str] = {}
        self.marks: dict[str, str] = {}

    def of(self, text: str) -> str:
        mark = self.marks.get(text)
        if mark is None:
            if self.next > LAST_MARK:
                raise BadRequest("the conversation uses too many different Tangut characters", param="messages")
            mark = self.marks[text] = chr(self.next)
            self.texts[self.next] = text
            self.next += 1
        return mark


_UNMARKED = re.compile(f"[{UNMARKED}]")


def _longest_of(texts: Sequence[str]) -> str:
    """A pattern for the longest of the sorted texts, as a tree: vocabularies have thousands of control tokens."""
    branches = []
    for first in dict.fromkeys(text[0] for text in texts):
        group = [text for text in texts if text[0] == first]
        start = _common_start(group[0], group[-1])
        rests = [text[len(start) :] for text in group if len(text) > len(start)]
        tail = f"(?:{_longest_of(rests)})" if rests else ""
        branches.append(re.escape(start) + tail + ("?" if rests and start in group else ""))
    return "|".join(branches)


def _common_start(one: str, other: str) -> str:
    length = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:length]


def _entries(message: Message, data: Change) -> Iterator[dict[str, Any]]:
    """The message as templates know it. Each tool result becomes a message of its own."""
    results = [part for part in message.parts if isinstance(part, ToolResult)]
    for result in results:
        text = "".join(part.text for part in result.content if isinstance(part, Text))
        yield {"role": "tool", "content": data(text), "tool_call_id": data(result.call_id)} | _name(message, data)
    if not results or len(results) < len(message.parts):
        yield _entry(message, data)


def _entry(message: Message, data: Change) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    # Parts are joined before they are escaped: two of them may be the halves of a control text.
    text = "".join(part.text for part in message.parts if isinstance(part, Text))
    entry: dict[str, Any] = {"role": role, "content": data(text)} | _name(message, data)
    calls = [_call(part, data) for part in message.parts if isinstance(part, ToolCall)]
    if calls:
        entry["tool_calls"] = calls
    thoughts = "".join(part.text for part in message.parts if isinstance(part, Reasoning))
    if thoughts:
        entry["reasoning_content"] = data(thoughts)
    return entry


def _name(message: Message, data: Change) -> dict[str, Any]:
    return {} if message.name is None else {"name": data(message.name)}


def _call(call: ToolCall, data: Change) -> dict[str, Any]:
    function = {"name": data(call.name), "arguments": _changed(_arguments(call.arguments), data)}
    return {"id": data(call.id), "type": "function", "function": function}


def _arguments(text: str) -> Any:
    """The object they are; the text itself if a model wrote something else."""
    if not text.strip():
        return {}
    try:
        parsed = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text
    return parsed if isinstance(parsed, dict) else text


def _function(tool: Tool, data: Change) -> dict[str, Any]:
    schema = {"type": "object", "properties": {}} if tool.parameters is None else _changed(dict(tool.parameters), data)
    function = {"name": data(tool.name), "description": data(tool.description), "parameters": schema}
    return {"type": "function", "function": function}


def _changed(value: Any, data: Change) -> Any:
    if isinstance(value, str):
        return value if value in SCHEMA_WORDS else data(value)
    if isinstance(value, dict):
        return {_changed(key, data): _changed(inner, data) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_changed(inner, data) for inner in value]
    return value


class _RefusedError(TemplateError):
    """The template's own words about a conversation it does not take."""


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise _RefusedError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as the templates of Hugging Face expect it: nothing is escaped for HTML."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return _ASCII_ESCAPED.sub(lambda found: json.dumps(found[0])[1:-1], text) if ensure_ascii else text


# Marks stay: they stand for texts that are put back after rendering.
_ASCII_ESCAPED = re.compile(f"[^\x00-\x7f{chr(FIRST_MARK)}-{chr(LAST_MARK)}]+")
