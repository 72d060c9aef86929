"""Renders requests with a model's chat template.

Rules
1. A conversation is rendered once, in the form that the template supports. If the template still rejects it, simpler
   forms are tried. If all fail, the caller gets the first error.
2. A variable is passed to the template only if the template uses its name. Requested options that the template does
   not support are listed in `Prompt.ignored`.
3. If the reply continues the last message, the prompt ends with its text (see `prefill`).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from jinja2 import TemplateError

from dragoman.core.errors import BadRequest, ConfigError, DragomanError, EngineFailed
from dragoman.core.request import GenerationRequest, Message, Reasoning, Tool
from dragoman.formats.syntax import PLAIN, ModelFormat
from dragoman.prompt.content_isolation import ContentMarker, Segment, TemplateMarks
from dragoman.prompt.message_folding import fold_messages, split_tool_results, template_call_id
from dragoman.prompt.plain_text_tools import write_tools_as_text
from dragoman.prompt.prefill import cut_after, mark_end, not_continued
from dragoman.prompt.sandbox import Sandbox, TemplateRaisedError
from dragoman.prompt.template_capabilities import JsonDict, probe_template
from dragoman.prompt.template_limits import TemplateLimitError, limit_rendering
from dragoman.prompt.template_messages import (
    Capabilities,
    TextTransform,
    to_template_messages,
    to_template_tool,
    transform_strings,
)
from dragoman.prompt.variables import THINKING_VARIABLES, build_variables

FALLBACK_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
"""ChatML, for models without a template."""

RENDER_SECONDS = 2.0
EXAMPLES_FACTOR = 5
"""All examples together (a few dozen) may take this many times the limit of one rendering."""
EXAMPLE_BUDGET = 16 * 2**20
"""Characters and items that a template may produce for all examples together."""


class Prompt(msgspec.Struct, frozen=True):
    """`opener` is the reasoning tag that the prompt leaves open (before the text that the reply continues). `ignored`
    are requested parameters that the template does not support."""

    segments: tuple[Segment, ...]
    opener: str | None = None
    ignored: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments)


class ChatTemplate:
    """A compiled chat template; without a source, the fallback. `control` are the texts of the model's control tokens,
    `allowed` the variables that a request may set, `seconds` the time limit of one rendering."""

    def __init__(
        self,
        source: str | None,
        *,
        bos: str,
        eos: str,
        control: Sequence[str],
        format: ModelFormat = PLAIN,  # noqa: A002
        allowed: Sequence[str] = (),
        seconds: float = RENDER_SECONDS,
    ) -> None:
        self._format = format
        self._allowed = frozenset(allowed)
        self._seconds = seconds
        self._marking = TemplateMarks(control)
        source = FALLBACK_TEMPLATE if source is None else source
        self._compiled = Sandbox().compile_template(source, self._marking.mark_literal)
        # Models with and without reasoning share a format, so the template decides.
        channels = format.channels
        marks = [text.strip() for tags in format.thoughts for text in (tags.open, tags.close)]
        marks += [] if channels is None else [channels.open]
        self._openers = [tags.open for tags in format.thoughts]
        if channels is not None:
            self._openers += [f"{channels.open}{name}{channels.message}" for name in channels.hidden]
        self._thinks = any(mark in source for mark in marks) or not THINKING_VARIABLES.isdisjoint(
            self._compiled.variables
        )
        self._tokens = {"bos_token": self._marking.mark_literal(bos), "eos_token": self._marking.mark_literal(eos)}
        with limit_rendering(EXAMPLES_FACTOR * seconds, EXAMPLE_BUDGET):
            self._capabilities = probe_template(
                self._compiled, self._render_example, lambda call, at: template_call_id(call, at, format.call_ids)
            )
        self._fallbacks = tuple(_fallbacks(self._capabilities))

    def render(self, request: GenerationRequest) -> Prompt:
        return self._render_open(request) if request.continues_last else self._render_closed(request)

    def _render_open(self, request: GenerationRequest) -> Prompt:
        """Render a conversation whose last message is continued."""
        marked, mark = mark_end(request)
        prefill = request.prefill
        assert prefill is not None
        rendered = self._render_closed(marked)
        cut = cut_after(rendered.segments, mark, prefill.text)
        if cut is not None:
            segments, head = cut
            ignored = tuple(param for param in rendered.ignored if param != "add_generation_prompt")
            return Prompt(segments, self._find_opener(head), ignored)
        if isinstance(prefill, Reasoning):
            before = msgspec.structs.replace(request, messages=request.messages[:-1], continues_last=False)
            rendered = self._render_closed(before)
            if rendered.opener is not None:
                content = Segment(prefill.text, special=False)
                return msgspec.structs.replace(rendered, segments=(*rendered.segments, content))
        raise not_continued(request)

    def _render_closed(self, request: GenerationRequest) -> Prompt:
        values, ignored = build_variables(request, self._compiled, self._capabilities, self._thinks, self._allowed)
        try:
            with limit_rendering(self._seconds):
                return self._render_first_accepted(request, values, ignored)
        except RecursionError as error:
            raise BadRequest("the conversation is nested too deeply", param="messages") from error

    def _render_first_accepted(
        self, request: GenerationRequest, values: Mapping[str, Any], ignored: tuple[str, ...]
    ) -> Prompt:
        split_messages = list(split_tool_results(request.messages, self._format.call_ids))
        tried: list[tuple[Message, ...]] = []
        first_error: DragomanError | None = None
        for capabilities in self._fallbacks:
            as_text = write_tools_as_text(split_messages, request.tools, capabilities, self._format)
            messages = fold_messages(as_text, capabilities)
            if messages in tried:
                continue
            tried.append(messages)
            try:
                tools = request.tools if capabilities.tools else ()
                segments = self._segments(messages, tools, capabilities, values)
            except _TemplateRejectedError as error:
                first_error = first_error or error.error
            else:
                shows_names = capabilities.names and _count_names(messages) == _count_names(split_messages)
                lost = () if shows_names or not _count_names(request.messages) else ("messages.name",)
                end = segments[-1].text if segments and segments[-1].special else ""
                return Prompt(segments, self._find_opener(end), (*ignored, *lost))
        assert first_error is not None
        raise first_error

    def _segments(
        self, messages: Sequence[Message], tools: Sequence[Tool], capabilities: Capabilities, values: Mapping[str, Any]
    ) -> tuple[Segment, ...]:
        def run(mark: ContentMarker) -> str:
            return self._render_or_raise(
                list(to_template_messages(messages, capabilities, mark)),
                [to_template_tool(tool, mark) for tool in tools] or None,
                {name: self._mark_variable(value, mark) for name, value in values.items()},
                mark,
            )

        return self._marking.segments(run)

    def _mark_variable(self, value: Any, mark: TextTransform) -> Any:
        """A word that the template itself contains is compared with it, so it is not marked."""
        is_literal = isinstance(value, str) and value.replace("_", "").isalnum() and value in self._compiled.strings
        return value if is_literal else transform_strings(value, mark)

    def _render_or_raise(
        self,
        messages: Sequence[JsonDict],
        tools: Sequence[JsonDict] | None,
        values: Mapping[str, Any],
        mark: ContentMarker,
    ) -> str:
        try:
            return self._render(messages, tools, values)
        except TemplateRaisedError as error:
            raise _TemplateRejectedError(BadRequest(mark.unmark(str(error)), param="messages")) from error
        except TemplateLimitError as error:
            raise EngineFailed(f"the model's chat template failed: limit exceeded: {error}") from error
        except (DragomanError, RecursionError, MemoryError):
            raise
        except Exception as error:
            message = mark.unmark(f"{type(error).__name__}: {error}")
            raise _TemplateRejectedError(EngineFailed(f"the model's chat template failed: {message}")) from error

    def _render(self, messages: Sequence[JsonDict], tools: Sequence[JsonDict] | None, values: Mapping[str, Any]) -> str:
        fixed = {"messages": messages, "tools": tools}
        return self._compiled.template.render({"add_generation_prompt": True, **values, **fixed, **self._tokens})

    def _render_example(
        self, messages: Sequence[JsonDict], tools: Sequence[JsonDict] | None, values: Mapping[str, Any]
    ) -> str | None:
        """Raises ConfigError if a short example exceeds the limits, because every conversation would."""
        try:
            return self._render(messages, tools, values)
        except TemplateLimitError as error:
            raise ConfigError(f"the chat template exceeds a limit for a short example: {error}") from error
        except (RecursionError, MemoryError) as error:
            raise ConfigError(
                "the chat template recurses without end, or exhausts the memory, for a short example"
            ) from error
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError):
            return None

    def _find_opener(self, text: str) -> str | None:
        """Return the reasoning tag at the end of a text."""
        openers = (opener for opener in self._openers if text.rstrip().endswith(opener.strip()))
        return max(openers, key=len, default=None)


class _TemplateRejectedError(Exception):
    """The template rejected one form of the conversation."""

    def __init__(self, error: DragomanError) -> None:
        super().__init__(error.message)
        self.error = error


def _fallbacks(capabilities: Capabilities) -> Iterator[Capabilities]:
    """Yield the template's capabilities, then more and more restricted ones."""
    replace = msgspec.structs.replace
    yield capabilities
    strict = replace(
        capabilities,
        multiple_systems=False,
        late_system=False,
        repeated_roles=False,
        assistant_first=False,
        parallel_calls=False,
        text_with_thought=False,
    )
    yield strict
    yield replace(strict, system=False)
    yield replace(strict, calls=False, results=False)
    yield replace(strict, calls=False, results=False, system=False)


def _count_names(messages: Sequence[Message]) -> int:
    return sum(message.name is not None for message in messages if message.role != "tool")
