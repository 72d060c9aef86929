"""Limits on a reply while it is generated: a thinking budget, and the end of repeated tool calls."""

from collections.abc import Callable, Sequence

from dragoman.formats.syntax import Tags


class ThinkingBudget:
    """Closes the reasoning when its token budget is used up.

    The text is scanned for opening and closing tags, however it is split into tokens. Reasoning may end with the tag of
    another pair than it began with, as in the reply parser. When the budget is used up inside the reasoning, the engine
    must decode the tokens of `closing_tokens` next.
    """

    def __init__(
        self, tokens: int, tags: Sequence[Tags], close: Callable[[Tags], Sequence[int]], opened: Tags | None = None
    ) -> None:
        """`close` returns the tokens that end the reasoning; `opened` are the tags that the prompt already opened."""
        self.tokens_left = tokens
        self.open_tags = opened
        self._tags = tags
        self._close = close
        self._tail = ""
        self._max_tag_length = max(len(text) for pair in tags for text in (pair.open, pair.close))

    @property
    def closing_tokens(self) -> Sequence[int]:
        """The tokens that must come next; empty while the model may choose freely."""
        return self._close(self.open_tags) if self.open_tags is not None and self.tokens_left <= 0 else ()

    def add_token(self, text: str) -> None:
        """Process the text of the next token."""
        self._tail += text
        if self.open_tags is not None:
            self.tokens_left -= 1
            self._find_first([(pair.close, None) for pair in self._tags])
        if self.open_tags is None:
            self._find_first([(pair.open, pair) for pair in self._tags])
        self._tail = self._tail[-self._max_tag_length :]

    def skip(self, text: str) -> None:
        """Process a text that the reply continues. It takes nothing from the budget."""
        left = self.tokens_left
        for character in text:
            self.add_token(character)
        self.tokens_left = left

    def mark_closed(self) -> None:
        """Record that the engine decodes the closing tokens."""
        self.open_tags, self._tail = None, ""

    def _find_first(self, tags: Sequence[tuple[str, Tags | None]]) -> None:
        found = [(self._tail.find(text), text, inside) for text, inside in tags if text in self._tail]
        if found:
            start, text, self.open_tags = min(found, key=lambda match: match[0])
            self._tail = self._tail[start + len(text) :]


class RepeatedCallDetector:
    """Detects a required tool call that repeats the previous one exactly. A weak model would repeat it forever."""

    def __init__(self) -> None:
        self._previous = ""
        self._pieces: list[str] = []

    def is_repeated(self, text: str, may_end: bool) -> bool:
        """Add text and return whether a call is repeated; `may_end` is whether the reply may end after this text."""
        self._pieces.append(text)
        if not may_end:
            return False
        call, self._pieces = "".join(self._pieces).strip(), []
        is_repeated = call != "" and call == self._previous
        self._previous = call or self._previous
        return is_repeated
