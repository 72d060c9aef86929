"""How much a model may think: the thought is closed when its tokens are used up.

The text is followed for the texts that begin and end a thought, whatever tokens they are cut into. When the budget is
used up inside a thought, the tokens that close it are to be decoded instead of what the model would pick.
"""

from collections.abc import Callable, Sequence

from dragoman.stages.syntax import Tags


class Budget:
    def __init__(self, tokens: int, tags: Sequence[Tags], close: Callable[[Tags], Sequence[int]], opened: bool) -> None:
        """`close` gives the tokens that end a thought; `opened`: the prompt has begun one."""
        self.left = tokens
        self.tags = tags
        self.close = close
        self.inside = tags[0] if opened else None
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
            end = self.tail.find(self.inside.close)
            if end >= 0:
                self.tail = self.tail[end + len(self.inside.close) :]
                self.inside = None
        if self.inside is None:
            self._look_for_opener()
        self.tail = self.tail[-self.longest :]

    def closed(self) -> None:
        """The tokens that close it are on their way."""
        self.inside, self.tail = None, ""

    def _look_for_opener(self) -> None:
        found = [(self.tail.find(pair.open), pair) for pair in self.tags if pair.open in self.tail]
        if found:
            at, pair = min(found, key=lambda hit: hit[0])
            self.tail = self.tail[at + len(pair.open) :]
            self.inside = pair
