"""Formats a result as text: the load, a table with one line per level, notes and errors."""

from collections.abc import Iterator, Sequence

from dragoman.loadtest.figures import Level, LoadResult

COLUMNS = ("CONCURRENCY", "REQUESTS", "ERRORS", "TTFT P50", "P95", "GAP P50", "P99", "TOK/S", "REQ/S", "CACHED")
MAX_MISSING_SHARE = 0.02
"""Note replies that are shorter than requested by more than this share."""
MAX_TOKENS_PER_PIECE = 1.1
"""Note pieces with more tokens than this, because their gaps are not those of tokens."""
MAX_DELAY_SHARE, MAX_DELAY_SECONDS = 0.25, 0.005
"""Note a scheduling delay of the load generator above both this share of a gap and this many seconds."""


def format_result(result: LoadResult) -> str:
    errors = (
        f"error at {level.concurrency}, {times} times: {message}"
        for level in result.figures
        for message, times in level.errors.items()
    )
    heading = f"{format_title(result)}: {format_load(result)}, seed {result.plan.seed}"
    return "\n".join([heading, _format_table(result.figures), *(f"note: {note}" for note in _notes(result)), *errors])


def format_title(result: LoadResult) -> str:
    return f"{result.model} at {result.url}"


def format_load(result: LoadResult) -> str:
    """Describe the load, with the measured length of the prompts."""
    plan = result.plan
    counts = [level.prompt_tokens for level in result.figures if level.prompt_tokens is not None]
    prompt = plan.prompt_tokens if result.uncounted or not counts else round(sum(counts) / len(counts))
    shared = f", {plan.shared:.0%} shared" if plan.shared else ""
    return f"prompt of {prompt} tokens{shared}, reply of {plan.output_tokens}"


def _format_table(levels: Sequence[Level]) -> str:
    """Return aligned columns, without those that have no values."""
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
        *map(_format_time, (level.ttft_p50, level.ttft_p95, level.gap_p50, level.gap_p99)),
        f"{level.output_tokens_per_second:.1f}",
        f"{level.requests_per_second:.2f}",
        cached,
    )


def _format_time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1000:.0f} ms" if seconds >= 0.1 else f"{seconds * 1000:.1f} ms"


def _notes(result: LoadResult) -> Iterator[str]:
    if result.refused:
        yield f"the server rejects {' and '.join(result.refused)}; requests were sent without"
    if result.uncounted:
        yield "the server does not report prompt tokens; the prompt length is in words"
    target = result.plan.output_tokens
    shortest = min((level.output_tokens for level in result.figures if level.output_tokens is not None), default=target)
    if shortest < target * (1 - MAX_MISSING_SHARE):
        yield f"replies were shorter than requested: {shortest:.0f} tokens on average"
    for level in result.figures:
        if level.tokens_per_piece is not None and level.tokens_per_piece > MAX_TOKENS_PER_PIECE:
            yield (
                f"at {level.concurrency} a piece has {level.tokens_per_piece:.1f} tokens, so gaps are longer than "
                f"the time per token, which is {_format_time(level.token_p50)} (P50)"
            )
        if (level.late_p95 or 0) > max(MAX_DELAY_SECONDS, MAX_DELAY_SHARE * (level.gap_p50 or 0)):
            yield (
                f"at {level.concurrency} the load generator itself was {_format_time(level.late_p95)} late (P95), and "
                "times may be too long by that; measure from a machine with less load"
            )
