"""Responses on their way out: the object, its items, the whole reply.

output := (reasoning | message | call)*        in the order in which the model made them
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from dragoman.core.events import FinishReason, TokenLogprob, Usage
from dragoman.core.reply import Choice, Reply
from dragoman.core.request import GenerationRequest, Part, Reasoning, Text, ToolCall
from dragoman.protocols.responses.calls import Called
from dragoman.protocols.responses.decode import Shown
from dragoman.protocols.responses.item_drafts import Draft, MessageDraft, ThoughtDraft, call_draft

PREFIX = "resp_"
Status = Literal["in_progress", "completed", "incomplete", "failed"]
REASONS: dict[FinishReason, str] = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""Ways to end that leave a response incomplete."""


class Drawing:
    """What all that is told of one response has in common."""

    def __init__(self, shown: Shown, request: GenerationRequest, created: int) -> None:
        self.shown = shown
        self._end = request.id.removeprefix(PREFIX)
        self._always: dict[str, Any] = {
            "id": request.id,
            "object": "response",
            "created_at": created,
            "model": request.model,
            **shown.echoed,
        }

    def response(
        self,
        status: Status,
        output: Sequence[Mapping[str, Any]] = (),
        usage: Usage | None = None,
        *,
        completed: int | None = None,
        reason: str | None = None,
        error: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        return {
            **self._always,
            "status": status,
            "completed_at": completed,
            "error": error,
            "incomplete_details": None if reason is None else {"reason": reason},
            "output": output,
            "usage": None if usage is None else encode_usage(usage),
        }

    def final(
        self, reason: FinishReason, output: Sequence[Mapping[str, Any]], usage: Usage, completed: int
    ) -> dict[str, Any]:
        if reason in REASONS:
            return self.response("incomplete", output, usage, reason=REASONS[reason])
        return self.response("completed", output, usage, completed=completed)

    def message(self, index: int) -> MessageDraft:
        return MessageDraft(self._item(index), index)

    def thought(self, index: int) -> ThoughtDraft:
        return ThoughtDraft(self._item(index), index, self.shown.sealed)

    def call(self, index: int, call_id: str, name: str) -> Draft:
        called = self.shown.called.get(name) or Called("function", name)
        return call_draft(self._item(index), index, call_id, called)

    def _item(self, index: int) -> str:
        return f"{self._end}_{index}"


def encode_usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": usage.kept},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }


def needs_message(reason: FinishReason, drafts: Sequence[Draft]) -> bool:
    """Whether the model ended without a word or a call: then its answer is the empty text."""
    return reason not in REASONS and all(isinstance(draft, ThoughtDraft) for draft in drafts)


def encode_reply(drawing: Drawing, completed: int, reply: Reply) -> dict[str, Any]:
    choice = reply.choices[0]
    drafts = list(_drafts(drawing, choice))
    statuses = ["completed"] * len(drafts)
    if choice.reason in REASONS and drafts:
        statuses[-1] = "incomplete"
    output = [draft.item(status) for draft, status in zip(drafts, statuses, strict=True)]
    return drawing.final(choice.reason, output, reply.usage, completed)


def _drafts(drawing: Drawing, choice: Choice) -> Iterator[Draft]:
    drafts: list[Draft] = []
    logprobs = _shares(choice)
    for index, part in enumerate(choice.parts):
        draft = _drawn(drawing, index, part)
        drafts.append(draft)
        yield _filled(draft, part, next(logprobs) if isinstance(part, Text) else ())
    if needs_message(choice.reason, drafts):
        yield _filled(drawing.message(len(drafts)), Text(""), choice.logprobs)


def _drawn(drawing: Drawing, index: int, part: Part) -> Draft:
    if isinstance(part, ToolCall):
        return drawing.call(index, part.id, part.name)
    return drawing.thought(index) if isinstance(part, Reasoning) else drawing.message(index)


def _filled(draft: Draft, part: Part, logprobs: Sequence[TokenLogprob]) -> Draft:
    """The draft after all its events, which nobody hears."""
    text = part.arguments if isinstance(part, ToolCall) else part.text if isinstance(part, Text | Reasoning) else ""
    for _ in draft.begin():
        pass
    for _ in draft.add(text, logprobs):
        pass
    for _ in draft.finish("completed"):
        pass
    return draft


def _shares(choice: Choice) -> Iterator[Sequence[TokenLogprob]]:
    """The tokens of each text. The last has all that are left, whatever was cut from its end."""
    texts = [part.text for part in choice.parts if isinstance(part, Text)]
    begin = 0
    for text in texts[:-1]:
        end, left = begin, len(text.encode())
        while left > 0 and end < len(choice.logprobs):
            left -= len(choice.logprobs[end].text)
            end += 1
        yield choice.logprobs[begin:end]
        begin = end
    yield choice.logprobs[begin:]
