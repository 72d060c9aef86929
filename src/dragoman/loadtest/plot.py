"""Draws the figures as a self-contained SVG: tokens per second on the left, time to first token on the right.

The concurrency axis is logarithmic, the other axes begin at zero.
"""

import math
from collections.abc import Callable, Sequence
from xml.sax.saxutils import escape

import msgspec

from dragoman.loadtest.figures import Level

WIDTH, HEIGHT = 880, 400
TOP, BOTTOM = 112, 338
STYLE = """\
text { font: 12px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #5b6472 }
.title { font-size: 17px; font-weight: 600; fill: #1c2330 }
.panel { font-size: 13px; font-weight: 600; fill: #1c2330 }
.value { font-size: 11px; fill: #1c2330; paint-order: stroke; stroke: #fff; stroke-width: 3px }
.grid { stroke: #e6e9ee }
.axis { stroke: #b6bdc8 }
.line { fill: none; stroke-width: 2.25; stroke-linejoin: round; stroke-linecap: round }
circle { stroke: #fff; stroke-width: 1.5 }"""
BLUE, ORANGE, RED = "#2563eb", "#f59e0b", "#dc2626"


class Series(msgspec.Struct, frozen=True):
    name: str
    color: str
    values: tuple[float | None, ...]
    """One per level; None means no data."""
    labelled: bool = False


class Panel(msgspec.Struct, frozen=True):
    left: float
    right: float
    title: str
    levels: tuple[int, ...]
    series: tuple[Series, ...]


def draw_svg(title: str, subtitle: str, levels: Sequence[Level]) -> str:
    numbers = tuple(level.concurrency for level in levels)
    seconds = max((level.ttft_p95 or 0 for level in levels), default=0) >= 1
    unit, scale = ("s", 1) if seconds else ("ms", 1000)
    speed = Series("tok/s", BLUE, tuple(level.output_tokens_per_second for level in levels), labelled=True)
    half = Series("p50", ORANGE, _scaled([level.ttft_p50 for level in levels], scale))
    most = Series("p95", RED, _scaled([level.ttft_p95 for level in levels], scale))
    panels = (
        Panel(64, 420, "Output tokens per second", numbers, (speed,)),
        Panel(500, 856, f"Time to first token, {unit}", numbers, (half, most)),
    )
    drawn = "\n".join(line for panel in panels for line in _draw_panel(panel))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">\n'
        f"<style>\n{STYLE}\n</style>\n"
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="#fff"/>\n'
        f'<text class="title" x="24" y="36">{escape(_truncate(title, 80))}</text>\n'
        f'<text x="24" y="57">{escape(_truncate(subtitle, 130))}</text>\n'
        f"{drawn}\n</svg>\n"
    )


def _truncate(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"


def _scaled(values: Sequence[float | None], scale: float) -> tuple[float | None, ...]:
    return tuple(None if value is None else value * scale for value in values)


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


def _draw_panel(panel: Panel) -> list[str]:
    marks = ticks(max((value for series in panel.series for value in series.values if value is not None), default=0))
    across = _x_scale(panel)

    def height(value: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * value / marks[-1]

    return [
        f'<text class="panel" x="{panel.left:.0f}" y="90">{panel.title}</text>',
        *_draw_legend(panel),
        *_draw_grid(panel, marks, across, height),
        *(line for series in panel.series for line in _draw_curve(panel, series, across, height)),
    ]


def _x_scale(panel: Panel) -> Callable[[int], float]:
    low, high = math.log2(min(panel.levels)), math.log2(max(panel.levels))
    margin = 24

    def x_of(concurrency: int) -> float:
        share = (math.log2(concurrency) - low) / (high - low) if high > low else 0.5
        return panel.left + margin + share * (panel.right - panel.left - 2 * margin)

    return x_of


def _draw_legend(panel: Panel) -> list[str]:
    if len(panel.series) < 2:
        return []
    lines = []
    for at, series in enumerate(reversed(panel.series)):
        x = panel.right - 28 - 54 * at
        lines.append(f'<path class="line" stroke="{series.color}" d="M{x - 18:.1f} 86H{x - 4:.1f}"/>')
        lines.append(f'<text x="{x:.1f}" y="90">{series.name}</text>')
    return lines


def _draw_grid(
    panel: Panel, marks: Sequence[float], across: Callable[[int], float], height: Callable[[float], float]
) -> list[str]:
    lines = []
    for mark in marks:
        y, kind = height(mark), "grid" if mark else "axis"
        lines.append(f'<path class="{kind}" d="M{panel.left:.1f} {y:.1f}H{panel.right:.1f}"/>')
        lines.append(f'<text x="{panel.left - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{_format_number(mark)}</text>')
    lines += [f'<text x="{across(n):.1f}" y="{BOTTOM + 20}" text-anchor="middle">{n}</text>' for n in panel.levels]
    middle = (panel.left + panel.right) / 2
    lines.append(f'<text x="{middle:.1f}" y="{BOTTOM + 42}" text-anchor="middle">requests at once</text>')
    return lines


def _draw_curve(
    panel: Panel, series: Series, across: Callable[[int], float], height: Callable[[float], float]
) -> list[str]:
    pairs = zip(panel.levels, series.values, strict=True)
    values = sorted((level, value) for level, value in pairs if value is not None)
    points = [(across(level), height(value)) for level, value in values]
    joined = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    lines = [f'<path class="line" stroke="{series.color}" d="M{joined}"/>'] if len(points) > 1 else []
    lines += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{series.color}"/>' for x, y in points]
    if series.labelled:
        lines += [
            f'<text class="value" x="{x:.1f}" y="{y - 11:.1f}" text-anchor="middle">{_format_number(value)}</text>'
            for (x, y), (_, value) in zip(points, values, strict=True)
        ]
    return lines
