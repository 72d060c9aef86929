"""Compaction without a server: what the model reads, what stays of a conversation, and when it is compacted."""

import asyncio
import re
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dragoman.core.edits import Compact, Compacting, Compaction, ContextEdited, ContextEvent
from dragoman.core.engine import Engine, ModelInfo
from dragoman.core.errors import BadRequest, CompactionFailed, ContextTooLong
from dragoman.core.events import Finished, Listener, Started, TextDelta, Usage, notify
from dragoman.core.request import (
    GenerationRequest,
    Image,
    Message,
    Reasoning,
    Role,
    Sampling,
    Text,
    Thinking,
    Tool,
    ToolCall,
    ToolResult,
)
from dragoman.core.summary import compact_messages, count_pending, is_user_message, summary_message
from dragoman.pipeline.context_edits import edit_context
from dragoman.pipeline.generate import OnEvents, generate
from dragoman.pipeline.local_generation import EngineSlots
from dragoman.pipeline.local_generation import generate as run_locally
from dragoman.pipeline.summary_writer import PROMPT, SummaryOptions
from dragoman.pipeline.transcript import Transcript

PART = re.compile(r"<conversation>\n(.*)\n</conversation>\n\n[^<>]*\Z", re.DOTALL)
EARLIER = re.compile(r"<summary>\n(.*?)\n</summary>\n\n<conversation>", re.DOTALL)
SHORT = SummaryOptions(prompt="Summarise:", max_tokens=40)
ALWAYS = Compact("input", is_compaction_only=True)


class Summarizer(Engine):
    """Answers each request with its number, at so many characters per token. `real` is what the model really reads of
    a character, in tokens; it refuses what is longer than its context."""

    def __init__(self, context: int | None = None, size: int = 4, real: float = 1.0, says: str = "summary {}") -> None:
        self.context = context
        self.size = size
        self.real = real
        self.says = says
        self.requests: list[GenerationRequest] = []

    def models(self) -> Sequence[ModelInfo]:
        return [ModelInfo("m", context=self.context)]

    def supports(self) -> frozenset[str]:
        return super().supports() | {"usage", "thinking"}

    def count_tokens(self, request: GenerationRequest) -> int:
        return sum(-(-len(message.text) // self.size) for message in request.messages)

    async def deliver(self, request: GenerationRequest, listener: Listener) -> None:
        tokens = int(Summarizer.count_tokens(self, request) * self.real)
        if self.context is not None and tokens + (request.max_tokens or 1) > self.context:
            raise ContextTooLong.of(self.context, tokens, "messages")
        self.requests.append(request)
        text = self.says.format(len(self.requests))
        await notify(listener, [Started(tokens), TextDelta(text), Finished(usage=Usage(tokens, 1))])

    @property
    def prompts(self) -> list[str]:
        return [request.messages[0].text for request in self.requests]


class Uncounting(Summarizer):
    def supports(self) -> frozenset[str]:
        return super().supports() - {"count_tokens"}


def edit(
    engine: Engine, request: GenerationRequest, options: SummaryOptions = SHORT
) -> tuple[GenerationRequest | None, list[ContextEvent]]:
    """Apply the edits of a request, and return what the model gets and the events."""
    events: list[ContextEvent] = []

    async def run(summary: GenerationRequest, on_events: OnEvents) -> None:
        await generate(engine, summary, EngineSlots(None), on_events)

    return asyncio.run(edit_context(engine, request, options, run, events.append)), events


def compaction_of(events: list[ContextEvent]) -> Compaction:
    (edited,) = [event for event in events if isinstance(event, ContextEdited)]
    assert edited.compaction is not None
    return edited.compaction


def said(role: Role, text: str) -> Message:
    return Message(role, (Text(text),))


def asking(*messages: Message, **fields: Any) -> GenerationRequest:
    return GenerationRequest(model="m", messages=messages, **fields)


CHARACTERS = st.characters(exclude_categories=["Cs"])
TEXTS = st.text(CHARACTERS, min_size=1, max_size=30) | st.integers(1, 400).map(lambda size: "word " * size)
PARTS = st.one_of(
    TEXTS.map(Text),
    st.builds(Reasoning, TEXTS),
    st.builds(ToolCall, id=st.just("c"), name=st.just("look"), arguments=TEXTS),
)
RESULTS = st.builds(ToolResult, call_id=st.just("c"), content=st.tuples(TEXTS.map(Text)), is_error=st.booleans())
MESSAGES = st.one_of(
    TEXTS.map(lambda text: said("system", text)),
    TEXTS.map(lambda text: said("user", text)),
    st.lists(PARTS, min_size=1, max_size=3).map(lambda parts: Message("assistant", tuple(parts))),
    RESULTS.map(lambda result: Message("tool", (result,))),
)


def texts_of(message: Message) -> list[str]:
    found = [part.text for part in message.parts if isinstance(part, Text | Reasoning)]
    results = [inner for part in message.parts if isinstance(part, ToolResult) for inner in part.content]
    found += [inner.text for inner in results if isinstance(inner, Text)]
    return found + [call.arguments for call in message.tool_calls]


@pytest.mark.parametrize("kept", [1, 100])
def test_message_that_the_reply_continues_stays_at_the_end(kept: int) -> None:
    begun = said("assistant", "The answer is")
    history = [said("user", "word " * 200 * kept), said("assistant", "word " * 900), said("user", "So?"), begun]
    request = asking(*history, continues_last=True, edits=(Compact("input", threshold=100),))
    engine = Summarizer(4000)
    compacted, events = edit(engine, request)
    assert compacted is not None
    assert compacted.messages[-2:] == (said("user", "So?"), begun)
    assert compacted.prefill == Text("The answer is")
    assert compaction_of(events).summary
    assert not any(asked.continues_last for asked in engine.requests)
    assert "The answer is" not in engine.prompts[0]


@given(
    messages=st.lists(MESSAGES, min_size=1, max_size=12),
    characters=st.integers(500, 3000),
    size=st.integers(1, 9),
    real=st.sampled_from([1.0, 1.5]),
    counts=st.booleans(),
)
def test_every_text_is_read_once_or_stays(
    messages: list[Message], characters: int, size: int, real: float, counts: bool
) -> None:
    """However the transcript must be cut, and whether the engine counts too few tokens or none at all."""
    history = [message for message in messages if message.role != "system"]
    assume(history)
    context = SHORT.max_tokens + characters // size
    engine = (Summarizer if counts else Uncounting)(context, size, real)
    request = asking(*messages, edits=(msgspec.structs.replace(ALWAYS, is_compaction_only=False),))
    compacted, events = edit(engine, request)
    assert compacted is not None
    compaction = compaction_of(events)

    transcript = Transcript(history).text
    parts = [PART.search(prompt) for prompt in engine.prompts]
    assert "".join(part[1] for part in parts if part) == transcript
    assert all(text in transcript for message in history for text in texts_of(message))
    for number, prompt in enumerate(engine.prompts):
        earlier = EARLIER.search(prompt)
        assert (earlier and earlier[1]) == (f"summary {number}" if number else None)

    assert compaction.summary == f"summary {len(engine.requests)}"
    assert compaction.usage.completion == len(engine.requests)
    users = [message for message in messages if message.role == "user"]
    kept = users[len(users) - compaction.kept :]
    pending = kept[len(kept) - compaction.pending :]
    assert pending == messages[len(messages) - len(pending) :]
    assert len(pending) in (len(kept), count_pending(messages))
    heads = [message for message in messages if message.role == "system"]
    answered = kept[: len(kept) - len(pending)]
    assert list(compacted.messages) == [*heads, *answered, summary_message(compaction.summary), *pending]
    if counts:
        limit = (context - SHORT.limit(context)) // 3
        assert sum(-(-len(message.text) // size) for message in kept) <= limit
    assert compacted.edits == ()


def test_the_parts_leave_room_for_the_summary() -> None:
    engine = Summarizer(context=400)
    words = [f"[{number:04}]" for number in range(1000)]
    edit(engine, asking(said("user", " ".join(words)), said("assistant", "ok"), edits=(ALWAYS,)))
    assert len(engine.prompts) > 4
    assert all(engine.count_tokens(request) <= 360 for request in engine.requests)
    # All but the last part are nearly full.
    assert all(engine.count_tokens(request) > 250 for request in engine.requests[:-1])


def test_entries_are_not_cut_if_they_need_not_be() -> None:
    engine = Summarizer(context=400)
    edit(engine, asking(*(said("user", f"<{number}>" + "x" * 300) for number in range(20)), edits=(ALWAYS,)))
    for prompt in engine.prompts:
        found = PART.search(prompt)
        assert found is not None
        assert found[1].startswith("[user]\n<")


def test_the_summary_is_written_without_tools_and_thinking_and_options_of_the_request() -> None:
    engine = Summarizer()
    request = asking(
        *(said("system", "Be brief."), said("user", "hello"), said("assistant", "hi")),
        edits=(ALWAYS,),
        tools=(Tool("look"),),
        sampling=Sampling(temperature=2.0),
        thinking=Thinking(effort="high"),
        stop=("s",),
        max_tokens=1,
        labels={"user": "ann"},
        principal="ann",
        id="r",
    )
    edit(engine, request, SummaryOptions(max_tokens=40, sampling=Sampling(temperature=0.2)))
    (summary,) = engine.requests
    assert summary == GenerationRequest(
        id="r",
        model="m",
        principal="ann",
        labels={"user": "ann"},
        messages=summary.messages,
        thinking=Thinking(enabled=False),
        sampling=Sampling(temperature=0.2),
        max_tokens=40,
    )
    assert summary.messages[0].text.startswith(PROMPT)
    assert "Be brief" not in summary.messages[0].text


def test_instructions_replace_the_prompt() -> None:
    engine = Summarizer()
    edit(
        engine,
        asking(said("user", "hello"), edits=(Compact("x", is_compaction_only=True, instructions="Only the names."),)),
    )
    assert engine.prompts[0].startswith("Only the names.\n\n<conversation>\n[user]\nhello\n</conversation>")


def test_a_second_compaction_reads_the_first() -> None:
    engine = Summarizer()
    before = compact_messages([said("user", "one"), said("assistant", "two")], "They met.", 1, 0)
    compacted, events = edit(engine, asking(*before, said("user", "three"), edits=(Compact("x", 1),)))
    assert compacted is not None
    assert "They met." in engine.prompts[0]
    assert (compaction_of(events).kept, compaction_of(events).pending) == (1, 1)
    assert [message for message in compacted.messages if is_user_message(message)] == [said("user", "three")]


CHAT = (said("user", "a" * 400), said("assistant", "b" * 400), said("user", "c" * 40))


@pytest.mark.parametrize(
    ("threshold", "context", "is_compacted"),
    [(210, None, False), (209, None, True), (10_000, 250, False), (10_000, 249, True), (10_000, 100, True)],
)
def test_threshold(threshold: int, context: int | None, is_compacted: bool) -> None:
    """The prompt has 210 tokens. A summary needs 40, or a quarter of the context."""
    engine = Summarizer(context)
    edited, events = edit(engine, asking(*CHAT, edits=(Compact("x", threshold),)))
    assert edited is not None
    assert bool(engine.requests) == bool(events) == is_compacted
    assert (edited.messages == CHAT) == (not is_compacted)


@pytest.mark.parametrize(("limit", "kept"), [(330, 2), (329, 1), (30, 1), (29, 0)])
def test_the_most_recent_user_messages_stay(limit: int, kept: int) -> None:
    """The two have 100 and 10 tokens. A third of the limit is for them."""
    _, events = edit(Summarizer(), asking(*CHAT, said("assistant", "d" * 2000), edits=(Compact("x", limit),)))
    assert compaction_of(events).kept == kept


@pytest.mark.parametrize(
    ("size", "kept"),
    [(1200, 1), (3200, 1), (3700, 0)],
    ids=["longer than a third", "just fits", "longer than the context holds"],
)
def test_a_question_without_an_answer_stays_if_it_fits(size: int, kept: int) -> None:
    """The context has 1,000 tokens, a summary and a reply need 40 each."""
    question = said("user", "q" * size)
    edited, events = edit(
        Summarizer(1000), asking(*CHAT, said("assistant", "ok"), question, edits=(Compact("x", 200),))
    )
    assert edited is not None
    assert (edited.messages[-1] == question) == bool(kept)
    assert (compaction_of(events).kept, compaction_of(events).pending) == (kept, kept)


def test_a_single_long_question_is_not_compacted() -> None:
    engine = Summarizer(1000)
    edited, events = edit(engine, asking(said("user", "q" * 1600), edits=(Compact("x", 200),)))
    assert edited is not None
    assert (edited.messages[0].text, engine.requests, events) == ("q" * 1600, [], [])


def test_nothing_is_compacted_if_nothing_would_be_left_out() -> None:
    engine = Summarizer()
    request = asking(said("system", "s" * 1000), said("user", "hello"), edits=(Compact("x", 20),))
    assert edit(engine, request)[1] == []
    assert edit(engine, msgspec.structs.replace(request, messages=request.messages[:1]))[1] == []


def test_nothing_to_compact_is_an_error() -> None:
    with pytest.raises(BadRequest, match="input: there is no conversation to compact"):
        edit(Summarizer(), asking(said("system", "Be brief."), edits=(ALWAYS,)))


@pytest.mark.parametrize("says", ["", " \n"])
def test_an_empty_summary_is_an_error(says: str) -> None:
    with pytest.raises(CompactionFailed, match="model 'm' wrote no summary"):
        edit(Summarizer(says=says), asking(*CHAT, edits=(ALWAYS,)))


def test_a_context_that_is_too_short_for_the_prompt_is_an_error() -> None:
    with pytest.raises(ContextTooLong, match="too short to compact"):
        edit(Summarizer(context=100), asking(*CHAT, edits=(ALWAYS,)), SummaryOptions(prompt="Summarise. " * 50))
    with pytest.raises(ContextTooLong, match="maximum context length"):
        edit(Uncounting(context=100), asking(*CHAT, edits=(ALWAYS,)), SummaryOptions(prompt="Summarise. " * 50))


def test_an_engine_that_cannot_count_ignores_thresholds() -> None:
    engine = Uncounting()
    edited, events = edit(engine, asking(*CHAT, edits=(Compact("context_management[0]", 1),)))
    assert edited is not None
    assert (edited.messages, engine.requests) == (CHAT, [])
    assert events == [ContextEdited(ignored=("context_management[0]",))]


def test_progress_is_reported_while_a_summary_is_written() -> None:
    _, events = edit(Summarizer(), asking(*CHAT, edits=(ALWAYS,)))
    assert [type(event) for event in events] == [Compacting, ContextEdited]


def test_images_are_named() -> None:
    message = Message("user", (Text("see"), Image(url="https://example.org/a.png")))
    result = Message("tool", (ToolResult("c", (Text("it: "), Image(data=b"png"))),))
    assert Transcript([message, result]).text == (
        "[user]\nsee\n\n[user]\n(an image)\n\n[result of the call]\nit: (an image)"
    )


def test_local_generation_compacts() -> None:
    engine = Summarizer()

    async def script() -> None:
        reply = await run_locally(engine, asking(*CHAT, edits=(Compact("x", 100),)))
        assert reply.text == "summary 2"
        assert "summary 1" in engine.requests[1].messages[0].text
        stopped = await run_locally(engine, asking(*CHAT, edits=(ALWAYS,)))
        assert (stopped.reason, stopped.text) == ("compaction", "")

    asyncio.run(script())
