"""The stop-string stage: the text ends before the first stop string that completes.

Rules
1. The stop string that completes first wins. If several complete at the same character, the longest wins.
2. Text that may still become a stop string is held back. All other text passes at once.
3. Each character is processed once, by an Aho-Corasick automaton. Its depth is the length of the held text.
4. Tokens of removed text still count: an empty delta carries their number and their ids. Tokens that the engine
   generated later do not count, unless only the engine's usage reports any number.
5. Only visible text is searched. Any other event (reasoning, a tool call) ends a partial match.
"""

import re
from collections import deque
from collections.abc import Sequence

from dragoman.core.events import Event, Finished, TextDelta


class StopMatcher:
    """Finds the first of several strings in text that arrives in pieces. `docs/library.md` has an example."""

    def __init__(self, stops: Sequence[str]) -> None:
        if not stops or "" in stops:
            raise ValueError("a StopMatcher needs one or more strings that are not empty")
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [0]
        self._depth = [0]
        self._match: list[str | None] = [None]
        for stop in stops:
            self._insert(stop)
        self._link()
        self._first = re.compile("[" + "".join(re.escape(char) for char in self._next[0]) + "]")
        self._state = 0

    def _insert(self, stop: str) -> None:
        node = 0
        for char in stop:
            if char not in self._next[node]:
                self._next[node][char] = len(self._next)
                self._next.append({})
                self._fallback.append(0)
                self._depth.append(self._depth[node] + 1)
                self._match.append(None)
            node = self._next[node][char]
        self._match[node] = stop

    def _link(self) -> None:
        """Point each node at the node of its longest proper suffix, breadth first."""
        queue = deque(self._next[0].values())
        while queue:
            node = queue.popleft()
            for char, child in self._next[node].items():
                self._fallback[child] = self._step(self._fallback[node], char)
                self._match[child] = self._match[child] or self._match[self._fallback[child]]
                queue.append(child)

    def _step(self, state: int, char: str) -> int:
        while state and char not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(char, 0)

    @property
    def pending(self) -> int:
        """How many of the last characters may be the beginning of a stop string."""
        return self._depth[self._state]

    def reset(self) -> None:
        self._state = 0

    def feed(self, text: str) -> tuple[int, str] | None:
        """Return the end of the first match in `text` and the matched string, or None."""
        state, position = self._state, 0
        while position < len(text):
            if not state:
                found = self._first.search(text, position)
                if found is None:
                    break
                position = found.start()
            state = self._step(state, text[position])
            position += 1
            if stop := self._match[state]:
                self._state = 0
                return position, stop
        self._state = state
        return None


class StopStage:
    def __init__(self, stops: Sequence[str]) -> None:
        self._matcher = StopMatcher(stops)
        self._held: deque[TextDelta] = deque()
        self._held_length = 0
        self._counted = False
        """Whether the engine reports token counts with its deltas."""

    def __call__(self, events: Sequence[Event]) -> Sequence[Event]:
        out: list[Event] = []
        for event in events:
            if type(event) is not TextDelta:
                self._release(self._held_length, out)
                self._matcher.reset()
                out.append(event)
                continue
            before = self._held_length
            self._counted = self._counted or event.count > 0
            self._held.append(event)
            self._held_length += len(event.text)
            found = self._matcher.feed(event.text)
            if found is not None:
                end, stop = found
                self._release(before + end - len(stop), out, last=True)
                if cut := sum(delta.count for delta in self._held):
                    out.append(TextDelta("", cut, tuple([token for delta in self._held for token in delta.tokens])))
                out.append(self._finish(stop, events[-1]))
                return out
            self._release(self._held_length - self._matcher.pending, out)
        return out

    def _release(self, length: int, out: list[Event], last: bool = False) -> None:
        """Pass on the first `length` held characters, with the tokens that begin in them."""
        held = self._held
        while held and len(held[0].text) <= length and (length or not last):
            delta = held.popleft()
            length -= len(delta.text)
            self._held_length -= len(delta.text)
            out.append(delta)
        if length:
            delta = held.popleft()
            self._held_length -= length
            out.append(TextDelta(delta.text[:length], delta.count, delta.tokens, delta.logprobs))
            held.appendleft(TextDelta(delta.text[length:], 0))

    def _finish(self, stop: str, last: Event) -> Finished:
        """If the engine has already finished, keep the usage that only its last event reports."""
        if type(last) is not Finished:
            return Finished("stop", stop=stop)
        return Finished("stop", stop=stop, usage=None if self._counted else last.usage, warnings=last.warnings)
