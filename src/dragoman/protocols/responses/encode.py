"""Encodes response objects and whole replies.

output := (reasoning | message | call)*        in the order of generation
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from dragoman.core.events import FinishReason, TokenLogprob, Usage
from dragoman.core.reply import Choice, Reply
from dragoman.core.request import GenerationRequest, Part, Reasoning, Text, ToolCall
from dragoman.protocols.responses.calls import ClientTool
from dragoman.protocols.responses.decode import ResponseContext
from dragoman.protocols.responses.item_drafts import ItemDraft, MessageDraft, ReasoningDraft, call_draft

PREFIX = "resp_"
Status = Literal["in_progress", "completed", "incomplete", "failed"]
INCOMPLETE_REASONS: dict[FinishReason, str] = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""Finish reasons of an incomplete response."""


class ResponseBuilder:
    """Builds the object of one response and drafts of its items."""

    def __init__(self, context: ResponseContext, request: GenerationRequest, created: int) -> None:
        self._context = context
        self._id_suffix = request.id.removeprefix(PREFIX)
        self._common: dict[str, Any] = {
            "id": request.id,
            "object": "response",
            "created_at": created,
            "model": request.model,
            **context.echoed,
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
            **self._common,
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
        if reason in INCOMPLETE_REASONS:
            return self.response("incomplete", output, usage, reason=INCOMPLETE_REASONS[reason])
        return self.response("completed", output, usage, completed=completed)

    def message(self, index: int) -> MessageDraft:
        return MessageDraft(self._item_suffix(index), index)

    def reasoning(self, index: int) -> ReasoningDraft:
        return ReasoningDraft(self._item_suffix(index), index, self._context.encrypts_reasoning)

    def call(self, index: int, call_id: str, name: str) -> ItemDraft:
        tool = self._context.client_tools.get(name) or ClientTool("function", name)
        return call_draft(self._item_suffix(index), index, call_id, tool)

    def _item_suffix(self, index: int) -> str:
        return f"{self._id_suffix}_{index}"


def encode_usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": usage.kept},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }


def needs_message(reason: FinishReason, drafts: Sequence[ItemDraft]) -> bool:
    """Whether the model generated neither text nor a call: the response then has an empty message."""
    return reason not in INCOMPLETE_REASONS and all(isinstance(draft, ReasoningDraft) for draft in drafts)


def encode_reply(builder: ResponseBuilder, completed: int, reply: Reply) -> dict[str, Any]:
    choice = reply.choices[0]
    drafts = list(_drafts(builder, choice))
    statuses = ["completed"] * len(drafts)
    if choice.reason in INCOMPLETE_REASONS and drafts:
        statuses[-1] = "incomplete"
    output = [draft.item(status) for draft, status in zip(drafts, statuses, strict=True)]
    return builder.final(choice.reason, output, reply.usage, completed)


def _drafts(builder: ResponseBuilder, choice: Choice) -> Iterator[ItemDraft]:
    drafts: list[ItemDraft] = []
    logprobs = _split_logprobs(choice)
    for index, part in enumerate(choice.parts):
        draft = _new_draft(builder, index, part)
        drafts.append(draft)
        yield _fill(draft, part, next(logprobs) if isinstance(part, Text) else ())
    if needs_message(choice.reason, drafts):
        yield _fill(builder.message(len(drafts)), Text(""), choice.logprobs)


def _new_draft(builder: ResponseBuilder, index: int, part: Part) -> ItemDraft:
    if isinstance(part, ToolCall):
        return builder.call(index, part.id, part.name)
    return builder.reasoning(index) if isinstance(part, Reasoning) else builder.message(index)


def _fill(draft: ItemDraft, part: Part, logprobs: Sequence[TokenLogprob]) -> ItemDraft:
    """Run the draft through all its events and drop them."""
    text = part.arguments if isinstance(part, ToolCall) else part.text if isinstance(part, Text | Reasoning) else ""
    for events in (draft.begin(), draft.add(text, logprobs), draft.finish("completed")):
        for _ in events:
            pass
    return draft


def _split_logprobs(choice: Choice) -> Iterator[Sequence[TokenLogprob]]:
    """Yield the logprobs of each text. The last text gets the remaining tokens, even if its end was cut off."""
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
