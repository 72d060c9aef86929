"""Marks request content so that it never becomes control tokens.

    mark := one Tangut character, which replaces a text while the template runs
    Segment(special=True)   text of the template and the content between its control tokens
    Segment(special=False)  content that looks like a control token, tokenized as plain text

Rules
1. A control text (`<|im_end|>`) in any string of a request never becomes a control token. It is replaced by a mark
   before rendering; afterwards the mark is replaced by plain text. (Tangut characters pass unchanged through filters,
   JSON and Python escapes, and are practically unused.)
2. Control texts in the template's own literals get marks too. A control text that appears between the marks after
   rendering was therefore assembled from pieces: two strings, a filter, or content next to template text.
3. If rule 2 finds one, the template runs again with every character marked that occurs in a control text. Then only
   pieces of the template itself can form a control text.
4. Tangut characters in a request are marked like control texts, so a request cannot contain marks.
5. Otherwise template and content are tokenized together, as in the model's training.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property

import msgspec

from dragoman.core.errors import BadRequest

FIRST_MARK = 0x17000
LAST_MARK = 0x187F7
NEVER_MARKED = r'\s"\\\x00-\x1f'
"""Characters that rule 3 does not mark: templates trim whitespace, and JSON escapes the others."""


class Segment(msgspec.Struct, frozen=True):
    text: str
    special: bool


class TemplateMarks:
    """The marks of one template. All literals must be marked before the first content."""

    def __init__(self, control: Sequence[str]) -> None:
        texts = sorted({text for text in control if text})
        longest = _longest_match_pattern(texts) if texts else "(?!)"
        self.markable = re.compile(f"[{chr(FIRST_MARK)}-{chr(LAST_MARK)}]|{longest}")
        self._control = re.compile(f"(?=({longest}))")
        self.characters = frozenset("".join(texts))
        self._first_characters = sorted({text[0] for text in texts})
        self.literal_marks = _MarkTable(FIRST_MARK)

    def mark_literal(self, text: str) -> str:
        return self.markable.sub(lambda found: self.literal_marks.get(found[0]), text)

    def segments(self, run: Callable[["ContentMarker"], str]) -> tuple[Segment, ...]:
        """Split the output of `run`, which renders the template and passes every string of content to its argument."""
        content = ContentMarker(self, characters=False)
        parts = self._content_pattern.split(run(content))
        if not all(self._has_only_literal_controls(part) for part in parts[::2]):
            content = ContentMarker(self, characters=True)
            parts = self._content_pattern.split(run(content))
        return tuple(self._segments(parts, content))

    @cached_property
    def _content_pattern(self) -> re.Pattern[str]:
        """Matches content marks, and text between two of them that cannot start a control text."""
        mark = f"[{chr(self.literal_marks.next)}-{chr(LAST_MARK)}]"
        characters = re.escape("".join(sorted(char for char in self.characters if not _NEVER_MARKED.match(char))))
        return re.compile(f"({mark}(?:[^{characters}{chr(FIRST_MARK)}-{chr(LAST_MARK)}]*+{mark})*)")

    def _has_only_literal_controls(self, part: str) -> bool:
        """Whether each control text, including overlapping ones, lies inside one literal of the template (rule 2)."""
        literals = [self.literal_marks.texts.get(ord(mark), "") for mark in _MARK.findall(part)]
        expected = [text for literal in literals for text in self._find_controls(literal)]
        return self._find_controls(self._restore_literals(part)) == expected

    def _find_controls(self, text: str) -> list[str]:
        # Looking for characters first is much faster: most long texts have none of them.
        return self._control.findall(text) if any(char in text for char in self._first_characters) else []

    def _segments(self, parts: Iterable[str], content: "ContentMarker") -> Iterator[Segment]:
        for index, part in enumerate(parts):
            if part:
                special = index % 2 == 0
                yield Segment(self._restore_literals(part) if special else part.translate(content.marks.texts), special)

    def _restore_literals(self, part: str) -> str:
        # Prompts are long and have few marks: this is faster than str.translate.
        texts = self.literal_marks.texts
        return _MARK.sub(lambda mark: texts.get(ord(mark[0]), mark[0]), part)


class ContentMarker:
    """Marks the content of one rendering: control texts, or every character of control texts (rule 3)."""

    def __init__(self, marking: TemplateMarks, characters: bool) -> None:
        self._marking = marking
        self._mark_characters = characters
        self.marks = _MarkTable(marking.literal_marks.next)

    def __call__(self, text: str) -> str:
        if self._mark_characters:
            return text.translate(
                {ord(char): self.marks.get(char) for char in set(text) if self._is_control_character(char)}
            )
        return self._marking.markable.sub(lambda found: self.marks.get(found[0]), text)

    def _is_control_character(self, char: str) -> bool:
        """Whether the character occurs in a control text, possibly after a filter has changed its case."""
        if _NEVER_MARKED.match(char):
            return False
        variants = char + char.lower() + char.upper() + char.casefold()
        return FIRST_MARK <= ord(char) <= LAST_MARK or not self._marking.characters.isdisjoint(variants)

    def unmark(self, text: str) -> str:
        return text.translate(self._marking.literal_marks.texts | self.marks.texts)


class _MarkTable:
    """Maps texts to single characters. The same text always gets the same character."""

    def __init__(self, first: int) -> None:
        self.next = first
        self.texts: dict[int, str] = {}
        self.marks: dict[str, str] = {}

    def get(self, text: str) -> str:
        mark = self.marks.get(text)
        if mark is None:
            if self.next > LAST_MARK:
                raise BadRequest("the conversation uses too many different Tangut characters", param="messages")
            mark = self.marks[text] = chr(self.next)
            self.texts[self.next] = text
            self.next += 1
        return mark


_NEVER_MARKED = re.compile(f"[{NEVER_MARKED}]")
_MARK = re.compile(f"[{chr(FIRST_MARK)}-{chr(LAST_MARK)}]")


def _longest_match_pattern(texts: Sequence[str]) -> str:
    """Return a pattern for the longest of the sorted texts, as a tree: vocabularies have thousands of control
    tokens."""
    branches = []
    for first in dict.fromkeys(text[0] for text in texts):
        group = [text for text in texts if text[0] == first]
        start = os.path.commonprefix((group[0], group[-1]))  # noqa: RUF071 (of characters)
        rests = [text[len(start) :] for text in group if len(text) > len(start)]
        tail = f"(?:{_longest_match_pattern(rests)})" if rests else ""
        branches.append(re.escape(start) + tail + ("?" if rests and start in group else ""))
    return "|".join(branches)
