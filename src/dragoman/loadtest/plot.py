"""Draws the figures as a self-contained SVG: tokens per second on the left, time to first token on the right.

The concurrency axis is logarithmic, the other axes begin at zero.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from xml.sax.saxutils import escape

from dragoman.loadtest.figures import Level

TOP, BOTTOM, WIDTH, MARGIN = 112, 338, 356, 24
"""The area of a panel, and the space beside its curves."""
FRAME = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 880 400" width="880" height="400">
<style>
text {{ font: 12px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #5b6472 }}
.title {{ font-size: 17px; font-weight: 600; fill: #1c2330 }}
.panel {{ font-size: 13px; font-weight: 600; fill: #1c2330 }}
.value {{ font-size: 11px; fill: #1c2330; paint-order: stroke; stroke: #fff; stroke-width: 3px }}
.grid {{ stroke: #e6e9ee }}
.line {{ fill: none; stroke-width: 2.25; stroke-linejoin: round; stroke-linecap: round }}
circle {{ stroke: #fff; stroke-width: 1.5 }}
</style>
<rect width="880" height="400" rx="10" fill="#fff"/>
<text class="title" x="24" y="36">{title}</text>
<text x="24" y="57">{subtitle}</text>
{panels}
</svg>
"""
COLORS = {"tok/s": "#2563eb", "p50": "#f59e0b", "p95": "#dc2626"}
Curve = Sequence[tuple[int, float | None]]
"""Values by concurrency; None means no data."""


def draw_svg(title: str, subtitle: str, levels: Sequence[Level]) -> str:
    levels = sorted(levels, key=lambda level: level.concurrency)
    unit, scale = ("s", 1) if max((level.ttft_p95 or 0 for level in levels), default=0) >= 1 else ("ms", 1000)
    speed = [(level.concurrency, level.output_tokens_per_second) for level in levels]
    p50 = [(level.concurrency, level.ttft_p50 and level.ttft_p50 * scale) for level in levels]
    p95 = [(level.concurrency, level.ttft_p95 and level.ttft_p95 * scale) for level in levels]
    lines = [
        *_draw_panel(64, "Output tokens per second", {"tok/s": speed}),
        *_draw_panel(500, f"Time to first token, {unit}", {"p50": p50, "p95": p95}),
    ]
    return FRAME.format(
        title=escape(_truncate(title, 80)), subtitle=escape(_truncate(subtitle, 130)), panels="\n".join(lines)
    )


def _truncate(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"


def _format_number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def ticks(highest: float) -> list[float]:
    """Return round numbers from zero to at least `highest`."""
    if highest <= 0:
        return [0.0, 1.0]
    rough = highest / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    return [step * count for count in range(math.ceil(highest / step - 1e-9) + 1)]


def _draw_panel(left: int, title: str, curves: Mapping[str, Curve]) -> Iterator[str]:
    right = left + WIDTH
    levels = [level for level, _ in next(iter(curves.values()))]
    low, high = math.log2(levels[0]), math.log2(levels[-1])
    marks = ticks(max((value or 0 for curve in curves.values() for _, value in curve), default=0))

    def across(level: int) -> float:
        share = (math.log2(level) - low) / (high - low) if high > low else 0.5
        return left + MARGIN + share * (WIDTH - 2 * MARGIN)

    def height(value: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * value / marks[-1]

    yield f'<text class="panel" x="{left}" y="90">{title}</text>'
    for mark in marks:
        yield f'<path class="grid" d="M{left} {height(mark):.1f}H{right}"/>'
        yield f'<text x="{left - 8}" y="{height(mark) + 4:.1f}" text-anchor="end">{_format_number(mark)}</text>'
    for level in levels:
        yield f'<text x="{across(level):.1f}" y="{BOTTOM + 20}" text-anchor="middle">{level}</text>'
    yield f'<text x="{left + WIDTH / 2}" y="{BOTTOM + 42}" text-anchor="middle">requests at once</text>'
    for at, (name, curve) in enumerate(curves.items()):
        points = [(across(level), height(value), value) for level, value in curve if value is not None]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
        yield f'<polyline class="line" stroke="{COLORS[name]}" points="{joined}"/>'
        for x, y, value in points:
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{COLORS[name]}"/>'
            if len(curves) == 1:
                shown = _format_number(value)
                yield f'<text class="value" x="{x:.1f}" y="{y - 11:.1f}" text-anchor="middle">{shown}</text>'
        if len(curves) > 1:
            yield f'<text x="{right - 100 + 54 * at}" y="90" style="fill: {COLORS[name]}">{name}</text>'
