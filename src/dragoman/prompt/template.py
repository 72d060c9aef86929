"""A model's chat template, and the prompt it makes of a request.

Rules
1. A conversation is rendered once, as the template is known to take it. Only if it is refused all the same, it is put
   more and more plainly, and the first refusal is what the caller hears in the end.
2. A variable is given to the template only if it expects one of that name. What a request asks for and the template
   cannot do is named in `Prompt.ignored`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from jinja2 import TemplateError

from dragoman.core.errors import BadRequest, ConfigError, DragomanError, EngineFailed
from dragoman.core.request import GenerationRequest, Message, Tool
from dragoman.formats.syntax import ModelFormat
from dragoman.prompt.content_isolation import Content, Marking, Segment
from dragoman.prompt.message_folding import call_id, fitted, singly
from dragoman.prompt.plain_text_tools import told
from dragoman.prompt.sandbox import RefusedError, Sandbox
from dragoman.prompt.template_capabilities import Entry, Habits, learn
from dragoman.prompt.template_limits import TooMuchError, limit_output
from dragoman.prompt.template_messages import Change, changed, entries, function
from dragoman.prompt.variables import ABOUT_THINKING, Variables, variables

FALLBACK = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
"""For a model that brings no template: ChatML, the most widely trained layout."""

SECONDS = 2.0
EXAMPLES_FACTOR = 5
"""All examples together, a few dozen, may take this many times the seconds of one rendering."""
EXAMPLE_BUDGET = 16 * 2**20
"""Characters and items that a template may make for all examples together."""
PLAIN = ModelFormat("plain")


class Prompt(msgspec.Struct, frozen=True):
    """`opener`: the text that begins the thought inside which it ends. `ignored`: what the request asks for and the
    template cannot do."""

    segments: tuple[Segment, ...]
    opener: str | None = None
    ignored: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments)

    @property
    def thinking(self) -> bool:
        return self.opener is not None


class ChatTemplate:
    """`control` are the texts of the model's control tokens; no source means the fallback. `allowed` are the variables
    that a request may set, `seconds` is the time that one rendering has."""

    def __init__(
        self,
        source: str | None,
        *,
        bos: str,
        eos: str,
        control: Sequence[str],
        format: ModelFormat = PLAIN,  # noqa: A002
        allowed: Sequence[str] = (),
        seconds: float = SECONDS,
    ) -> None:
        self._format = format
        self._allowed = frozenset(allowed)
        self._seconds = seconds
        self._marking = Marking(control)
        self._sandbox = Sandbox()
        source = FALLBACK if source is None else source
        self._compiled = self._sandbox.compiled(source, self._marking.own)
        # A format is shared by models that think and models that do not.
        mentioned = any(mark in source for mark in _marks_of_thoughts(format))
        self._thinks = mentioned or not ABOUT_THINKING.isdisjoint(self._compiled.variables)
        self._tokens = {"bos_token": self._marking.own(bos), "eos_token": self._marking.own(eos)}
        with self._sandbox.limited(EXAMPLES_FACTOR * seconds), limit_output(EXAMPLE_BUDGET):
            self._habits = learn(self._compiled, self._show, lambda call, at: call_id(call, at, format.call_ids))
        self._manners = tuple(_manners(self._habits))

    def render(self, request: GenerationRequest) -> Prompt:
        known = variables(request, self._compiled, self._habits, self._thinks, self._allowed)
        try:
            with self._sandbox.limited(self._seconds):
                return self._first_taken(request, known)
        except RecursionError as error:
            raise BadRequest("the conversation is nested too deeply", param="messages") from error

    def _first_taken(self, request: GenerationRequest, known: Variables) -> Prompt:
        singles = list(singly(request.messages, self._format.call_ids))
        tried: list[tuple[Message, ...]] = []
        refusal: DragomanError | None = None
        for habits in self._manners:
            messages = fitted(told(singles, request.tools, habits, self._format), habits)
            if messages in tried:
                continue
            tried.append(messages)
            try:
                segments = self._segments(messages, request.tools if habits.tools else (), habits, known.given)
            except _NotTakenError as error:
                refusal = refusal or error.shown
            else:
                lost = () if habits.names and _names(messages) == _names(singles) else _named(request.messages)
                return Prompt(segments, self._opener(segments), (*known.ignored, *lost))
        assert refusal is not None
        raise refusal

    def _segments(
        self, messages: Sequence[Message], tools: Sequence[Tool], habits: Habits, given: Mapping[str, Any]
    ) -> tuple[Segment, ...]:
        def run(data: Content) -> str:
            return self._run(
                list(entries(messages, habits, data)),
                [function(tool, data) for tool in tools] or None,
                {name: self._variable(value, data) for name, value in given.items()},
                data,
            )

        return self._marking.segments(run)

    def _variable(self, value: Any, data: Change) -> Any:
        """A word that the template itself mentions is compared with it, and stays what it is."""
        own = isinstance(value, str) and value.replace("_", "").isalnum() and value in self._compiled.words
        return value if own else changed(value, data)

    def _run(
        self, messages: Sequence[Entry], tools: Sequence[Entry] | None, given: Mapping[str, Any], data: Content
    ) -> str:
        try:
            return self._rendered(messages, tools, given)
        except RefusedError as refusal:
            raise _NotTakenError(BadRequest(data.unmarked(str(refusal)), param="messages")) from refusal
        except TooMuchError as error:
            raise EngineFailed(f"the model's chat template failed: it takes {error}") from error
        except (DragomanError, RecursionError, MemoryError):
            raise
        except Exception as error:
            words = data.unmarked(f"{type(error).__name__}: {error}")
            raise _NotTakenError(EngineFailed(f"the model's chat template failed: {words}")) from error

    def _rendered(self, messages: Sequence[Entry], tools: Sequence[Entry] | None, given: Mapping[str, Any]) -> str:
        fixed = {"messages": messages, "tools": tools, "add_generation_prompt": True}
        return self._compiled.template.render({**given, **fixed, **self._tokens})

    def _show(self, messages: Sequence[Entry], tools: Sequence[Entry] | None, given: Mapping[str, Any]) -> str | None:
        """Raises ConfigError if a short example exceeds the limits: every conversation would exceed them."""
        try:
            return self._rendered(messages, tools, given)
        except TooMuchError as error:
            raise ConfigError(f"the chat template takes {error} for a short example") from error
        except (RecursionError, MemoryError) as error:
            raise ConfigError(
                "the chat template recurses without end, or takes all memory, for a short example"
            ) from error
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError):
            return None

    def _opener(self, segments: Sequence[Segment]) -> str | None:
        if not segments or not segments[-1].special:
            return None
        text = segments[-1].text.rstrip()
        return max((found for found in _openers(self._format) if text.endswith(found.strip())), key=len, default=None)


class _NotTakenError(Exception):
    """The template did not take the conversation; perhaps it does if that is put otherwise."""

    def __init__(self, shown: DragomanError) -> None:
        super().__init__(shown.message)
        self.shown = shown


def _manners(habits: Habits) -> Iterator[Habits]:
    """Ways to put a conversation, from the one the template is known to take to the plainest there is."""
    replace = msgspec.structs.replace
    yield habits
    strict = replace(
        habits,
        systems=False,
        late_system=False,
        repeats=False,
        assistant_first=False,
        parallel_calls=False,
        text_with_thought=False,
    )
    yield strict
    yield replace(strict, system=False)
    yield replace(strict, calls=False, results=False)
    yield replace(strict, calls=False, results=False, system=False)


def _openers(form: ModelFormat) -> Iterator[str]:
    for tags in form.thoughts:
        yield tags.open
    if form.channels is not None:
        for name in form.channels.hidden:
            yield f"{form.channels.open}{name}{form.channels.message}"


def _marks_of_thoughts(form: ModelFormat) -> Iterator[str]:
    for tags in form.thoughts:
        yield tags.open.strip()
        yield tags.close.strip()
    if form.channels is not None:
        yield form.channels.open


def _names(messages: Sequence[Message]) -> int:
    return sum(message.name is not None for message in messages if message.role != "tool")


def _named(messages: Sequence[Message]) -> tuple[str, ...]:
    return ("messages.name",) if _names(messages) else ()
