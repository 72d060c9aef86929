"""The conversation after a compaction.

    compacted := (system | developer)* kept* summary pending*

Rules
1. The summary is a user message with the part `Summary`: it is the text of a user or a model, never an instruction of
   the operator.
2. The kept and pending messages are the most recent ones of the user. The summary covers them too, so a conversation
   that loses them loses nothing.
3. Pending messages have no reply yet, so they come last: the model answers them. Without one, the summary is last, and
   the model goes on with the work that it describes.
"""

from collections.abc import Iterable, Sequence
from itertools import takewhile

from dragoman.core.request import Message, Summary

INTRODUCTION = (
    "The earlier part of this conversation was replaced by the summary below, to save space. It covers everything that "
    "was said and done so far, including the messages above it. Continue from where it ends."
)


def summary_message(summary: str) -> Message:
    return Message("user", (Summary(f"{INTRODUCTION}\n\n<summary>\n{summary}\n</summary>"),))


def is_user_message(message: Message) -> bool:
    """Whether it is a message of the user, and not a summary."""
    return message.role == "user" and not any(isinstance(part, Summary) for part in message.parts)


def is_system_message(message: Message) -> bool:
    return message.role in ("system", "developer")


def count_pending(messages: Sequence[Message]) -> int:
    """Count the user messages at the end."""
    return sum(1 for _ in takewhile(is_user_message, reversed(messages)))


def compact_messages(messages: Sequence[Message], summary: str, kept: int, pending: int) -> tuple[Message, ...]:
    """The messages with the summary in place of all but the `kept` most recent user messages."""
    heads, users = filter(is_system_message, messages), last_user_messages(messages, kept)
    middle = max(0, len(users) - pending)
    return (*heads, *users[:middle], summary_message(summary), *users[middle:])


def last_user_messages(messages: Iterable[Message], count: int) -> tuple[Message, ...]:
    users = list(filter(is_user_message, messages))
    return tuple(users[len(users) - min(count, len(users)) :])
