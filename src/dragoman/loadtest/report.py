"""A result as text: what was asked, a table with a line per level, and what one has to know to read it."""

from collections.abc import Iterator, Sequence

from dragoman.loadtest.figures import Level, Result

COLUMNS = ("CONCURRENCY", "REQUESTS", "ERRORS", "TTFT P50", "P95", "GAP P50", "P99", "TOK/S", "REQ/S", "CACHED")
SHORT_BY = 0.02
"""The share of the wanted length that a reply may lack without a word."""
SINGLE = 1.1
"""Tokens in a piece up to which the pieces are taken for tokens."""
LATE = 0.25
"""The share of a gap by which this program may be late itself without a word."""
LATE_SECONDS = 0.005


def text(result: Result) -> str:
    errors = (
        f"error at {level.concurrency}, {times} times: {words}"
        for level in result.figures
        for words, times in level.errors.items()
    )
    heading = f"{title(result)}: {load(result)}, seed {result.plan.seed}"
    return "\n".join([heading, table(result.figures), *(f"note: {words}" for words in remarks(result)), *errors])


def title(result: Result) -> str:
    return f"{result.model} at {result.url}"


def load(result: Result) -> str:
    """What was asked, with the length that the prompts really had."""
    plan = result.plan
    counted = [level.prompt_tokens for level in result.figures if level.prompt_tokens is not None]
    prompt = plan.prompt_tokens if result.uncounted or not counted else round(sum(counted) / len(counted))
    shared = f", {plan.shared:.0%} of it in common" if plan.shared else ""
    return f"prompt of {prompt} tokens{shared}, reply of {plan.output_tokens}"


def table(levels: Sequence[Level]) -> str:
    """Aligned columns, those that say something."""
    lines = [COLUMNS, *(_cells(level) for level in levels)]
    shown = [column for column in zip(*lines, strict=True) if any(cell != "-" for cell in column[1:])]
    widths = [max(map(len, column)) for column in shown]
    rows = zip(*shown, strict=True)
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def _cells(level: Level) -> tuple[str, ...]:
    cached = "-"
    if level.cached_tokens is not None and level.prompt_tokens:
        cached = f"{level.cached_tokens / level.prompt_tokens:.0%}"
    return (
        str(level.concurrency),
        str(level.requests),
        str(level.failed),
        *map(_time, (level.ttft_p50, level.ttft_p95, level.gap_p50, level.gap_p99)),
        f"{level.output_tokens_per_second:.1f}",
        f"{level.requests_per_second:.2f}",
        cached,
    )


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1000:.0f} ms" if seconds >= 0.1 else f"{seconds * 1000:.1f} ms"


def remarks(result: Result) -> Iterator[str]:
    if result.refused:
        yield f"the server does not take {' and '.join(result.refused)}; sent without"
    if result.uncounted:
        yield "the server does not count prompt tokens: the prompts have that many words"
    wanted = result.plan.output_tokens
    shortest = min((level.output_tokens for level in result.figures if level.output_tokens is not None), default=wanted)
    if shortest < wanted * (1 - SHORT_BY):
        yield f"replies were shorter than asked for: {shortest:.0f} tokens on average"
    for level in result.figures:
        if level.tokens_per_piece is not None and level.tokens_per_piece > SINGLE:
            yield (
                f"at {level.concurrency} a piece has {level.tokens_per_piece:.1f} tokens, and gaps are those between "
                f"pieces; a token takes {_time(level.token_p50)} (P50)"
            )
        if (level.late_p95 or 0) > max(LATE_SECONDS, LATE * (level.gap_p50 or 0)):
            yield (
                f"at {level.concurrency} this program itself was {_time(level.late_p95)} late (P95), and times may be "
                "too long by that: measure from a machine that has less to do"
            )
