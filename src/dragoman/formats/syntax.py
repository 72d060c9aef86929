"""Declarations of model syntax: reasoning, tool calls, and the markers around them.

`pipeline.split` and its call readers parse replies with a `ModelFormat`; `grammar` builds grammars from it.

    reply   := (text | thought | section)*
    thought := Tags, or a hidden channel
    section := open call* close
    call    := JsonCall | NamedJson | Tagged | Pythonic | Braced

`NamedJson.begins`, `Tagged.function` and `Tagged.parameter` are text templates; all other texts are literal. In a
template, `{name}` is the tool's name and `{key}` a parameter's name. `{id}`, `{index}` and `{string}` are other fields
of some families. Whitespace in a template matches any or no whitespace when it is read.

Where a format lists several texts, keys or sections, the first is used in prompts and for required calls. All are
recognized in replies.
"""

import re
from collections.abc import Iterator
from typing import Literal

import msgspec

_NAMED = r"(\{(?:name|key|id|index|string)\})"
FIELD = re.compile(_NAMED + r"|\s+")
"""Matches the parts of a text template that are not literal."""
MARKER = re.compile(r"(?=(<[^<>\s{}]+>|\[/?[A-Z_]+\]|◁[^▷]+▷|｜[A-Z]+｜))")
"""Finds the texts of a format that may be control tokens: `<…>` without spaces and braces, `[WORD]` and `[/WORD]` in
capitals, `◁…▷`, `｜WORD｜` in capitals. An engine hides control tokens of any other form from the readers."""


def split_fields(template: str) -> list[str]:
    """Split a template into literals and fields, in turn."""
    return re.split(_NAMED, template)


class Tags(msgspec.Struct, frozen=True):
    open: str
    close: str


THINK = Tags("<think>", "</think>")


class JsonCall(msgspec.Struct, frozen=True):
    """`{"name": NAME, "arguments": {…}}`, alone or in an array. The first of several keys is used in prompts and for
    required calls; all are recognized in replies."""

    name: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")
    array: bool = False
    """Whether the calls of a section are written as one array. Both forms are read."""


class NamedJson(msgspec.Struct, frozen=True):
    """The name in a text template, then the arguments as JSON. The first of `begins` is used in prompts and for
    required calls; all are recognized in replies."""

    begins: tuple[str, ...]
    end: str = ""


class Tagged(msgspec.Struct, frozen=True):
    """Each parameter between tags: a string as it is, anything else as JSON, according to the tool's schema."""

    function: str
    parameter: str
    value_end: str
    function_end: str = ""


class Pythonic(msgspec.Struct, frozen=True):
    """`[f(a=1, b="x"), g()]`"""


class Braced(msgspec.Struct, frozen=True):
    """`call:NAME{key:value,…}`: keys without quotes, strings between two `quote`s, the rest as in JSON."""

    quote: str
    prefix: str = "call:"


CallSyntax = JsonCall | NamedJson | Tagged | Pythonic | Braced


class CallSection(msgspec.Struct, frozen=True):
    """A section of calls. Without `close` it ends with its calls.

    Without `open`, the section has no marker: it is read only at the beginning of the answer, and only if its calls
    name offered tools. Such a section is possible for `JsonCall` and `Pythonic`.

    `multiple`: one section contains all calls of a turn. Otherwise each call has its own section.
    `separator` is the text between the calls of one section.
    """

    call: CallSyntax
    open: str = ""
    close: str = ""
    multiple: bool = False
    separator: str = ""

    @property
    def is_list(self) -> bool:
        """Whether the calls are always written as one list."""
        return isinstance(self.call, Pythonic) or (isinstance(self.call, JsonCall) and self.call.array)


class Channels(msgspec.Struct, frozen=True):
    """`open` and a name switch to a channel, which lasts until the next `open` or one of `ends`.

    `message` separates the header (the name and other words) from the text. Without it, the header is the name.
    `start` begins a header before its channel. `recipient` in the header names a tool; the text is then the arguments
    and ends with `call_end`, which is one of `ends`. The header of the channel `answer` ends reasoning too.
    """

    open: str
    hidden: tuple[str, ...] = ("thought", "analysis", "thinking", "reasoning")
    message: str = ""
    ends: tuple[str, ...] = ()
    start: str = ""
    recipient: str = ""
    call_end: str = ""
    answer: str = ""


class ModelFormat(msgspec.Struct, frozen=True):
    """The syntax of a model family. The first of `calls` is used in prompts and for required calls; all are recognized
    in replies. `frame_markers` frame an answer and are not part of it. A chat template has this format if it contains
    all texts of one group of `template_markers`."""

    name: str
    thoughts: tuple[Tags, ...] = ()
    channels: Channels | None = None
    calls: tuple[CallSection, ...] = ()
    frame_markers: tuple[str, ...] = ()
    answer: Tags | None = None
    """Tags around the answer that are not part of it. They count only at its beginning and end."""
    template_markers: tuple[tuple[str, ...], ...] = ()
    families: tuple[str, ...] = ()
    """Names of models whose template does not show the format."""
    call_ids: Literal["any", "kimi", "mistral"] = "any"
    """The form of call ids that the chat template requires."""

    @property
    def texts(self) -> Iterator[str]:
        """All texts of the declaration that a reply may contain."""
        return _texts((self.thoughts, self.channels, self.calls, self.frame_markers, self.answer))

    @property
    def markers(self) -> frozenset[str]:
        """All texts that may be control tokens of the model and must stay visible in its output."""
        return frozenset(found for text in self.texts for found in MARKER.findall(text))


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple):
        for inner in value:
            yield from _texts(inner)
    elif isinstance(value, msgspec.Struct):
        yield from _texts(msgspec.structs.astuple(value))


PLAIN = ModelFormat("plain")
"""Text only: no reasoning and no calls."""


def reasoning_tags(syntax: ModelFormat) -> tuple[Tags, ...]:
    """The texts that open and close reasoning. For channels: the headers that switch to and from a hidden channel."""
    channels = syntax.channels
    if channels is None:
        return syntax.thoughts
    if channels.message:
        return (Tags(f"{channels.open}{channels.hidden[1]}{channels.message}", channels.ends[0]),)
    closers = (f"{channels.open}{channels.answer}",) if channels.answer else ()
    return tuple(Tags(f"{channels.open}{channels.hidden[0]}", close) for close in (*closers, *channels.ends))


def reasoning_end(syntax: ModelFormat, tags: Tags) -> str:
    """The text that ends reasoning early, so that the model continues with the answer."""
    channels = syntax.channels
    if channels is not None and channels.message:
        return f"{tags.close}{channels.start}assistant"
    return f"\n{tags.close}\n\n"
