"""Compares the outcome of a request with the recorded one.

    same      nothing differs
    similar   a sampled reply differs; it has a similarity from 0 to 1
    differs   a reply that should be the same differs, or the request failed in another way
    failed    the recorded request succeeded, this one did not

Rules
1. Replies are compared exactly if sampling has no choice: with a temperature of 0, a `top_k` of 1, or a seed. The
   caller may ask for it for all replies.
2. Arguments of calls are compared as JSON. Ids, times and token counts are not compared.
3. Replies without generations are compared as JSON: their numbers may differ by rounding.
"""

import base64
import difflib
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec
import numpy as np

from dragoman.recordings.outcome import CallOutcome, ChoiceOutcome, ReplayOutcome

Verdict = Literal["same", "similar", "differs", "failed"]
VOLATILE = frozenset({"id", "created"})
TOLERANCE = 1e-3
MAX_COMPARED = 20_000
"""Characters of which the similarity is computed: its cost is quadratic."""


class Difference(msgspec.Struct, frozen=True):
    field: str
    recorded: str
    now: str


class Comparison(msgspec.Struct, frozen=True):
    verdict: Verdict
    differences: tuple[Difference, ...] = ()
    similarity: float | None = None
    """Set for replies that are similar."""


def is_repeatable(request: Mapping[str, Any]) -> bool:
    """Whether a model should give the same reply again."""
    return request.get("temperature") == 0 or request.get("top_k") == 1 or request.get("seed") is not None


def compare(recorded: ReplayOutcome, now: ReplayOutcome, is_exact: bool) -> Comparison:
    if recorded.is_complete and not now.is_complete:
        return Comparison("failed", tuple(_compare_ends(recorded, now)))
    if not recorded.is_complete:
        differences = tuple(_compare_ends(recorded, now))
        return Comparison("differs" if differences else "same", differences)
    if not recorded.choices:
        same = _is_close(recorded.body, now.body)
        body = Difference("body", _json(recorded.body), _json(now.body))
        return Comparison("same") if same else Comparison("differs", (body,))
    differences = tuple(_compare_choices(recorded, now))
    if not differences or is_exact:
        return Comparison("differs" if differences else "same", differences)
    return Comparison("similar", differences, _similarity(_transcript(recorded), _transcript(now)))


def _compare_ends(recorded: ReplayOutcome, now: ReplayOutcome) -> Iterator[Difference]:
    """Compare the statuses and errors."""
    before, after = (f"{found.status} {found.error or 'ok'}" for found in (recorded, now))
    if before != after:
        yield Difference("status", _with_message(before, recorded), _with_message(after, now))


def _with_message(shown: str, outcome: ReplayOutcome) -> str:
    return f"{shown}: {outcome.message}" if outcome.message else shown


def _compare_choices(recorded: ReplayOutcome, now: ReplayOutcome) -> Iterator[Difference]:
    for at in range(max(len(recorded.choices), len(now.choices))):
        prefix = f"[{at}]." if len(recorded.choices) > 1 else ""
        before, after = (found.choices[at] if at < len(found.choices) else ChoiceOutcome() for found in (recorded, now))
        for field in ("text", "reasoning", "finish", "stop"):
            one, other = getattr(before, field), getattr(after, field)
            if one != other:
                yield Difference(prefix + field, one or "", other or "")
        if before.others != after.others:
            yield Difference(prefix + "others", ", ".join(before.others), ", ".join(after.others))
        if _shapes(before) != _shapes(after):
            yield Difference(prefix + "calls", describe_calls(before.calls), describe_calls(after.calls))


def _shapes(choice: ChoiceOutcome) -> list[tuple[str, Any]]:
    return [(call.name, call.parsed) for call in choice.calls]


def describe_calls(calls: tuple[CallOutcome, ...]) -> str:
    return "\n".join(f"{call.name}({call.arguments})" for call in calls)


def _transcript(outcome: ReplayOutcome) -> str:
    return "\n".join(
        text for choice in outcome.choices for text in (choice.reasoning, choice.text, describe_calls(choice.calls))
    )


def _similarity(one: str, other: str) -> float:
    words, others = one[:MAX_COMPARED].split(), other[:MAX_COMPARED].split()
    return round(difflib.SequenceMatcher(None, words, others, autojunk=False).ratio(), 3)


def _is_close(one: Any, other: Any, name: str = "") -> bool:
    if name == "embedding":
        one, other = _vector(one), _vector(other)
    if isinstance(one, dict) and isinstance(other, dict):
        names = (one.keys() | other.keys()) - VOLATILE
        return all(_is_close(one.get(key), other.get(key), key) for key in names)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_close, one, other))
    if isinstance(one, float) or isinstance(other, float):
        numbers = isinstance(one, int | float) and isinstance(other, int | float)
        return numbers and math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return bool(one == other)


def _vector(value: Any) -> Any:
    """The numbers of an embedding, which may be sent as base64."""
    if not isinstance(value, str):
        return value
    try:
        return [float(number) for number in np.frombuffer(base64.b64decode(value), "<f4")]
    except ValueError:
        return value


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
