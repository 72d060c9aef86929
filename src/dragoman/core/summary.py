"""The conversation after a compaction.

    compacted := (system | developer)* summary user*

Rules
1. The summary is a user message with the part `Summary`: it is the text of a user or a model, never an instruction of
   the operator.
2. The user messages after it are the most recent ones of the conversation before. The summary covers them too, so a
   conversation that loses them loses nothing.
"""

from collections.abc import Iterable, Sequence

from dragoman.core.request import Message, Summary

INTRODUCTION = (
    "The earlier part of this conversation was replaced by the summary below, to save space. Continue from where it "
    "ends. User messages right after it may be covered by it already."
)


def summary_message(summary: str) -> Message:
    return Message("user", (Summary(f"{INTRODUCTION}\n\n<summary>\n{summary}\n</summary>"),))


def is_user_message(message: Message) -> bool:
    """Whether it is a message of the user, and not a summary."""
    return message.role == "user" and not any(isinstance(part, Summary) for part in message.parts)


def is_system_message(message: Message) -> bool:
    return message.role in ("system", "developer")


def compact_messages(messages: Sequence[Message], summary: str, kept: int) -> tuple[Message, ...]:
    """The messages with the summary in place of all but the `kept` most recent user messages."""
    heads = filter(is_system_message, messages)
    return (*heads, summary_message(summary), *last_user_messages(messages, kept))


def last_user_messages(messages: Iterable[Message], count: int) -> tuple[Message, ...]:
    users = list(filter(is_user_message, messages))
    return tuple(users[len(users) - min(count, len(users)) :])
