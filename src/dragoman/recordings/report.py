"""Shows the results of a replay as text: recorded and new replies side by side, and a summary."""

import shutil
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median

from dragoman.recordings.comparison import Difference
from dragoman.recordings.outcome import ReplayOutcome
from dragoman.recordings.replay import Replayed

LABEL_WIDTH = 12
EXCERPT_LINES = 6
BEFORE = 30
"""Characters that are shown before the first difference of two texts."""


def format_result(replayed: Replayed) -> str:
    head = f"{replayed.number}  {replayed.path}  {replayed.model or '-'}"
    comparison, recorded, now = replayed.comparison, replayed.recorded, replayed.now
    if comparison is None or recorded is None or now is None:
        return f"{head}  skipped: {replayed.skipped}"
    fields = ", ".join(difference.field for difference in comparison.differences)
    shown = {"same": "same", "similar": f"similar ({comparison.similarity}): {fields}"}
    lines = [f"{head}  {shown.get(comparison.verdict, f'{comparison.verdict}: {fields}')}  {_figures(recorded, now)}"]
    if comparison.differences:
        lines += _side_by_side("", ["recorded"], ["now"])
        for difference in comparison.differences:
            lines += _format_difference(difference)
    return "\n".join(lines)


def _figures(recorded: ReplayOutcome, now: ReplayOutcome) -> str:
    parts = [f"{_seconds(recorded.total)} -> {_seconds(now.total)}"]
    if recorded.first_token is not None and now.first_token is not None:
        parts.append(f"first token {_seconds(recorded.first_token)} -> {_seconds(now.first_token)}")
    if recorded.usage is not None and now.usage is not None:
        parts.append(f"{recorded.usage.completion_tokens} -> {now.usage.completion_tokens} tokens")
    return ", ".join(parts)


def _seconds(value: float) -> str:
    return f"{value:.3f} s" if value < 1 else f"{value:.2f} s"


def _format_difference(difference: Difference) -> list[str]:
    """The texts from shortly before their first difference on."""
    one, other = difference.recorded, difference.now
    common = next(
        (at for at, (left, right) in enumerate(zip(one, other, strict=False)) if left != right),
        min(len(one), len(other)),
    )
    start = max(0, common - BEFORE)
    mark = "..." if start else ""
    columns = (_wrap(mark + text[start:]) for text in (one, other))
    return _side_by_side(difference.field, *columns)


def _column_width() -> int:
    return max(20, (shutil.get_terminal_size((100, 24)).columns - LABEL_WIDTH - 6) // 2)


def _wrap(text: str) -> list[str]:
    width = _column_width()
    lines = [line for part in text.splitlines() for line in textwrap.wrap(part, width) or [""]]
    return lines if len(lines) <= EXCERPT_LINES else [*lines[:EXCERPT_LINES], "..."]


def _side_by_side(label: str, left: Sequence[str], right: Sequence[str]) -> list[str]:
    width, rows = _column_width(), max(len(left), len(right), 1)
    lines = []
    for at in range(rows):
        one, other = (column[at] if at < len(column) else "" for column in (left, right))
        lines.append(f"    {(label if at == 0 else ''):<{LABEL_WIDTH}}{one:<{width}}  {other}".rstrip())
    return lines


def format_summary(results: Sequence[Replayed]) -> str:
    verdicts = Counter(found.comparison.verdict for found in results if found.comparison is not None)
    skipped = len(results) - verdicts.total()
    counts = [f"{count} {name}" for name, count in verdicts.most_common()] + ([f"{skipped} skipped"] if skipped else [])
    pairs = [(found.recorded, found.now) for found in results if found.recorded is not None and found.now is not None]
    complete = [(one, other) for one, other in pairs if one.is_complete and other.is_complete]
    rows = [["", "RECORDED", "NOW"]]
    measures: dict[str, Callable[[ReplayOutcome], float | None]] = {
        "first token, median": lambda outcome: outcome.first_token,
        "whole reply, median": lambda outcome: outcome.total,
    }
    for label, measure in measures.items():
        values = [(measure(one), measure(other)) for one, other in complete]
        known = [(one, other) for one, other in values if one is not None and other is not None]
        if known:
            rows.append([label, *(_seconds(median(column)) for column in zip(*known, strict=True))])
    tokens = [
        [0 if outcome.usage is None else outcome.usage.completion_tokens for outcome in pair] for pair in complete
    ]
    if tokens:
        rows.append(["tokens of replies", *(str(sum(column)) for column in zip(*tokens, strict=True))])
    table = [f"{label:<22}{recorded:>12}{now:>12}".rstrip() for label, recorded, now in rows]
    return "\n".join([f"{len(results)} requests: {', '.join(counts)}", *(table if len(rows) > 1 else [])])
