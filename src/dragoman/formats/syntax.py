"""How a model writes what is not plain text, as values: thoughts, tool calls, and the markers around them.

A `ModelFormat` only declares. Reading is the split stage's business (with one reader per kind of call), writing a
grammar that keeps a model to a shape is `constrain`'s; both follow the same declaration.

    reply   := (text | thought | section)*
    thought := Tags, or a channel of that name
    section := open call* close
    call    := JsonCall | NamedJson | Tagged | Pythonic | Braced

In templates of text `{name}` stands for the tool's name, `{key}` for a parameter's, `{id}`, `{index}` and `{string}`
for what else a family writes there; white space in a template stands for any or none when it is read.
"""

import re
from typing import Literal

import msgspec

_NAMED = r"(\{(?:name|key|id|index|string)\})"
FIELD = re.compile(_NAMED + r"|\s+")
"""Where a template of text is not literal."""
MARKER = re.compile(r"(?=(<[^<>\s{}]+>|\[/?[A-Z_]+\]|◁[^▷]+▷|｜[A-Z]+｜))")


def cut_at_fields(template: str) -> list[str]:
    """Literal text and fields in turn: whoever fills them in fills nothing into what was filled in."""
    return re.split(_NAMED, template)


class Tags(msgspec.Struct, frozen=True):
    open: str
    close: str


class JsonCall(msgspec.Struct, frozen=True):
    """`{"name": NAME, "arguments": {…}}`, alone or in an array. Of several keys the first is written, all are read."""

    name: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")
    array: bool = False
    """Whether the calls of a section are written as one array; both are read."""


class NamedJson(msgspec.Struct, frozen=True):
    """The name in a text of its own, then the arguments as JSON. The first of `begins` is the one that is written."""

    begins: tuple[str, ...]
    end: str = ""


class Tagged(msgspec.Struct, frozen=True):
    """Each parameter between tags of its own: a string as it is, anything else as JSON, as the tool's schema says."""

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


class Calls(msgspec.Struct, frozen=True):
    """A section of calls. No `open`: it stands bare at the beginning of the reply. No `close`: it ends with its calls.

    `several`: one section holds all calls of a turn; otherwise each call has a section of its own.
    `between` separates the calls of one section.
    """

    call: CallSyntax
    open: str = ""
    close: str = ""
    several: bool = False
    between: str = ""


class Channels(msgspec.Struct, frozen=True):
    """`open` and a name switch to a channel, which lasts until the next `open` or one of `ends`.

    `message` stands between the name, with what else its header says, and the text; without it the name ends itself.
    `start` begins a header before its channel. A `recipient` in the header names the tool that the text is the
    arguments of; such a message ends with `call_end`, which is one of `ends`.
    """

    open: str
    hidden: tuple[str, ...] = ("thought", "analysis", "thinking", "reasoning")
    message: str = ""
    ends: tuple[str, ...] = ()
    start: str = ""
    recipient: str = ""
    call_end: str = ""


class ModelFormat(msgspec.Struct, frozen=True):
    """`calls`: the first is the one that is written, all are read. `silent`: markers that frame an answer and are not
    part of it. `signs`: the chat template of such a model contains all texts of one of these groups."""

    name: str
    thoughts: tuple[Tags, ...] = ()
    channels: Channels | None = None
    calls: tuple[Calls, ...] = ()
    silent: tuple[str, ...] = ()
    answer: Tags | None = None
    """What may stand around the answer and is not part of it; the same text further on is text."""
    signs: tuple[tuple[str, ...], ...] = ()
    families: tuple[str, ...] = ()
    """Names of models whose template does not show the format they were trained on."""
    call_ids: Literal["any", "kimi", "mistral"] = "any"
    """What ids of calls in the history must look like for the chat template."""

    @property
    def markers(self) -> frozenset[str]:
        """Every text that may be a control token of the model and must be seen by whoever reads its output."""
        return frozenset(found for text in self._texts() for found in MARKER.findall(text))

    def _texts(self) -> list[str]:
        texts = [*self.silent]
        for tags in (*self.thoughts, *([self.answer] if self.answer else ())):
            texts += [tags.open, tags.close]
        for section in self.calls:
            texts += [section.open, section.close, *_texts(section.call)]
        if self.channels is not None:
            channels = self.channels
            texts += [channels.open, channels.message, channels.start, *channels.ends]
        return texts


def _texts(call: CallSyntax) -> list[str]:
    if isinstance(call, NamedJson):
        return [*call.begins, call.end]
    if isinstance(call, Tagged):
        return [call.function, call.parameter, call.value_end, call.function_end]
    return [call.quote] if isinstance(call, Braced) else []
