"""How much a model may think: the thought is closed when its tokens are used up.

The text is followed for the texts that begin and end a thought, whatever tokens they are cut into. A thought may end
with the text of another pair than it began with, as for whoever reads the reply. When the budget is used up inside a
thought, the tokens that close it are to be decoded instead of what the model would pick.
"""

from collections.abc import Callable, Sequence

from dragoman.formats.syntax import Tags


class Budget:
    def __init__(
        self, tokens: int, tags: Sequence[Tags], close: Callable[[Tags], Sequence[int]], opened: Tags | None = None
    ) -> None:
        """`close` gives the tokens that end a thought; `opened` are the tags of one that the prompt has begun."""
        self.left = tokens
        self.tags = tags
        self.close = close
        self.inside = opened
        self.tail = ""
        self.longest = max(len(text) for pair in tags for text in (pair.open, pair.close))

    @property
    def closing(self) -> Sequence[int]:
        """What has to come next; nothing where the model may go on as it likes."""
        return self.close(self.inside) if self.inside is not None and self.left <= 0 else ()

    def read(self, text: str) -> None:
        """One more token of the reply, with its text."""
        self.tail += text
        if self.inside is not None:
            self.left -= 1
            self._look_for([(pair.close, None) for pair in self.tags])
        if self.inside is None:
            self._look_for([(pair.open, pair) for pair in self.tags])
        self.tail = self.tail[-self.longest :]

    def closed(self) -> None:
        """The tokens that close it are on their way."""
        self.inside, self.tail = None, ""

    def _look_for(self, marks: Sequence[tuple[str, Tags | None]]) -> None:
        """The first of the marks says what thought the text is in from there on."""
        found = [(self.tail.find(text), text, inside) for text, inside in marks if text in self.tail]
        if found:
            at, text, self.inside = min(found, key=lambda hit: hit[0])
            self.tail = self.tail[at + len(text) :]
