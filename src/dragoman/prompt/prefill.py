"""Cuts a rendered conversation after the text of its last message, so that the model continues it.

    rendering := head prefill rest            only head and prefill are kept

Rules
1. The text gets a mark at its end before the template runs, one character that the request does not contain. So a
   template does not trim its end, and the mark shows where it ends afterwards.
2. The text before the mark must be the prefill, apart from white space at its beginning, which many templates trim.
3. Reasoning is continued like text if the template shows it, or else if a new reply would begin inside reasoning.
"""

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from dragoman.core.errors import BadRequest
from dragoman.core.request import GenerationRequest, Message, Part, Text
from dragoman.prompt.content_isolation import FIRST_MARK, LAST_MARK, Segment


def mark_end(request: GenerationRequest) -> tuple[GenerationRequest, str]:
    """Return the request with a mark at the end of the text that the reply continues, and the mark."""
    last, prefill = request.messages[-1], request.prefill
    is_text = isinstance(prefill, Text)
    if last.role != "assistant" or prefill is None or last.tool_calls or (last.text and not is_text):
        param = request.prefill_path
        message = f"{param}: only an assistant message with text, or with reasoning alone, can be continued"
        raise BadRequest(message, param=param)
    used = set().union(*(text for message in request.messages for text in _texts(message)))
    mark = next(chr(code) for code in range(LAST_MARK, FIRST_MARK, -1) if chr(code) not in used)
    marked = replace(prefill, text=prefill.text + mark)
    parts: list[Part] = [part for part in last.parts if not isinstance(part, type(prefill))]
    messages = (*request.messages[:-1], replace(last, parts=(*parts, marked)))
    return replace(request, messages=messages, add_generation_prompt=False), mark


def _texts(message: Message) -> Iterator[str]:
    yield message.text
    yield message.reasoning
    for call in message.tool_calls:
        yield call.arguments


def cut_after(segments: Sequence[Segment], mark: str, prefill: str) -> tuple[tuple[Segment, ...], str] | None:
    """Return the segments up to the mark, and the text before the prefill. None if the prefill is not there."""
    last = next((at for at in range(len(segments) - 1, -1, -1) if mark in segments[at].text), None)
    if last is None:
        return None
    rest = replace(segments[last], text=segments[last].text.rpartition(mark)[0])
    kept = (*segments[:last], *([rest] if rest.text else []))
    shown, expected = "".join(segment.text for segment in kept), prefill.lstrip()
    return (kept, shown[: len(shown) - len(expected)]) if shown.endswith(expected) else None


def not_continued(request: GenerationRequest) -> BadRequest:
    param = request.prefill_path
    message = f"this model's chat template does not allow to continue an assistant message ({param})"
    return BadRequest(f"{message}: it leaves out or changes the text", param=param)
