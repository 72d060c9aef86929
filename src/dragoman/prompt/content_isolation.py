"""Content is told apart from the template's own text by marks, so that it never becomes control tokens.

    mark := one Tangut character, which stands for a text while the template runs
    Segment(special=True)   text of the template, with the content that stands between its control tokens
    Segment(special=False)  content that looks like a control token, to be tokenised as plain text

Rules
1. A control text (`<|im_end|>`) in any string of a request never becomes a control token. Before rendering it is
   replaced by a mark; what stands for the mark afterwards is plain. (Tangut: no filter changes its letters, neither
   JSON nor Python escapes them, and nobody has written them for five hundred years.)
2. The control texts in the template's own literals get marks too. So one that is found between the marks after
   rendering was put together from pieces: by two strings meeting, by a filter, by content meeting the template.
3. Where rule 2 finds one, the template runs again with every character marked that some control text has. Then only
   pieces of the template's own can still make a control text.
4. Tangut characters in a request are marked like control texts, so nobody can send a mark.
5. Otherwise template and content are tokenised together: these are the tokens the model was trained on.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property

import msgspec

from dragoman.core.errors import BadRequest

FIRST_MARK = 0x17000
LAST_MARK = 0x187F7
UNMARKED = r'\s"\\\x00-\x1f'
"""Characters that stay themselves in rule 3: templates trim white space, and JSON writes the others differently."""


class Segment(msgspec.Struct, frozen=True):
    text: str
    special: bool


class Marking:
    """The marks of one template. `own` is for its literals, all of which come before the first content."""

    def __init__(self, control: Sequence[str]) -> None:
        texts = sorted({text for text in control if text})
        longest = _longest_of(texts) if texts else "(?!)"
        self.marked = re.compile(f"[{chr(FIRST_MARK)}-{chr(LAST_MARK)}]|{longest}")
        self._control = re.compile(f"(?=({longest}))")
        self.letters = frozenset("".join(texts))
        self.own_marks = _Marks(FIRST_MARK)

    def own(self, text: str) -> str:
        return self.marked.sub(lambda found: self.own_marks.of(found[0]), text)

    def segments(self, run: Callable[["Content"], str]) -> tuple[Segment, ...]:
        """`run` renders the template with every string of content passed through what it is given."""
        content = Content(self, letters=False)
        cut = self._content.split(run(content))
        if not all(self._only_own(part) for part in cut[::2]):
            content = Content(self, letters=True)
            cut = self._content.split(run(content))
        return tuple(self._segments(cut, content))

    @cached_property
    def _content(self) -> re.Pattern[str]:
        """Marks of content, with what stands between two of them as long as no control text could begin there."""
        mark = f"[{chr(self.own_marks.next)}-{chr(LAST_MARK)}]"
        letters = re.escape("".join(sorted(char for char in self.letters if not _UNMARKED.match(char))))
        return re.compile(f"({mark}(?:[^{letters}{chr(FIRST_MARK)}-{chr(LAST_MARK)}]*+{mark})*)")

    def _only_own(self, part: str) -> bool:
        """Whether each control text in it, overlapping ones too, lies inside one literal of the template (rule 2)."""
        found = self._control.findall(self._own_text(part))
        return bool(found == [text for mark in _MARK.findall(part) for text in self._inside(ord(mark))])

    def _inside(self, code: int) -> list[str]:
        text = self.own_marks.texts.get(code)
        return self._control.findall(text) if text is not None else []

    def _segments(self, cut: Iterable[str], content: "Content") -> Iterator[Segment]:
        for index, part in enumerate(cut):
            if part:
                special = index % 2 == 0
                yield Segment(self._own_text(part) if special else part.translate(content.marks.texts), special)

    def _own_text(self, part: str) -> str:
        # A prompt is long and has few of them: they are found faster than every character is asked for.
        texts = self.own_marks.texts
        return _MARK.sub(lambda mark: texts.get(ord(mark[0]), mark[0]), part)


class Content:
    """Marks the content of one rendering: control texts, or with `letters` every character of them (rule 3)."""

    def __init__(self, marking: Marking, letters: bool) -> None:
        self._marking = marking
        self._letters = letters
        self.marks = _Marks(marking.own_marks.next)

    def __call__(self, text: str) -> str:
        if self._letters:
            return text.translate({ord(char): self.marks.of(char) for char in set(text) if self._is_letter(char)})
        return self._marking.marked.sub(lambda found: self.marks.of(found[0]), text)

    def _is_letter(self, char: str) -> bool:
        """Whether it stands in a control text, or would after a filter has changed its case."""
        if _UNMARKED.match(char):
            return False
        variants = char + char.lower() + char.upper() + char.casefold()
        return FIRST_MARK <= ord(char) <= LAST_MARK or not self._marking.letters.isdisjoint(variants)

    def unmarked(self, text: str) -> str:
        return text.translate(self._marking.own_marks.texts | self.marks.texts)


class _Marks:
    """Single characters that stand for texts; the same text always gets the same one."""

    def __init__(self, first: int) -> None:
        self.next = first
        self.texts: dict[int, str] = {}
        self.marks: dict[str, str] = {}

    def of(self, text: str) -> str:
        mark = self.marks.get(text)
        if mark is None:
            if self.next > LAST_MARK:
                raise BadRequest("the conversation uses too many different Tangut characters", param="messages")
            mark = self.marks[text] = chr(self.next)
            self.texts[self.next] = text
            self.next += 1
        return mark


_UNMARKED = re.compile(f"[{UNMARKED}]")
_MARK = re.compile(f"[{chr(FIRST_MARK)}-{chr(LAST_MARK)}]")


def _longest_of(texts: Sequence[str]) -> str:
    """A pattern for the longest of the sorted texts, as a tree: vocabularies have thousands of control tokens."""
    branches = []
    for first in dict.fromkeys(text[0] for text in texts):
        group = [text for text in texts if text[0] == first]
        start = _common_start(group[0], group[-1])
        rests = [text[len(start) :] for text in group if len(text) > len(start)]
        tail = f"(?:{_longest_of(rests)})" if rests else ""
        branches.append(re.escape(start) + tail + ("?" if rests and start in group else ""))
    return "|".join(branches)


def _common_start(one: str, other: str) -> str:
    length = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:length]
