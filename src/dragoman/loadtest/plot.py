"""The figures as one SVG picture: tokens per second on the left, the time to the first token on the right.

Concurrency is drawn in powers of two, as it is mostly asked for; the other axes begin at zero. The picture has its own
background and needs nothing from outside.
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
    """One per level; None where nothing was seen."""
    labelled: bool = False


class Panel(msgspec.Struct, frozen=True):
    left: float
    right: float
    title: str
    levels: tuple[int, ...]
    series: tuple[Series, ...]


def svg(title: str, subtitle: str, levels: Sequence[Level]) -> str:
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
    drawn = "\n".join(line for panel in panels for line in _drawn(panel))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">\n'
        f"<style>\n{STYLE}\n</style>\n"
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="#fff"/>\n'
        f'<text class="title" x="24" y="36">{escape(_fitting(title, 80))}</text>\n'
        f'<text x="24" y="57">{escape(_fitting(subtitle, 130))}</text>\n'
        f"{drawn}\n</svg>\n"
    )


def _fitting(words: str, length: int) -> str:
    return words if len(words) <= length else f"{words[: length - 1]}…"


def _scaled(values: Sequence[float | None], scale: float) -> tuple[float | None, ...]:
    return tuple(None if value is None else value * scale for value in values)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def ticks(most: float) -> list[float]:
    """Round numbers from zero to at least `most`, four to seven of them."""
    if most <= 0:
        return [0.0, 1.0]
    rough = most / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    return [step * count for count in range(math.ceil(most / step - 1e-9) + 1)]


def _drawn(panel: Panel) -> list[str]:
    marks = ticks(max((value for series in panel.series for value in series.values if value is not None), default=0))
    across = _across(panel)

    def height(value: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * value / marks[-1]

    return [
        f'<text class="panel" x="{panel.left:.0f}" y="90">{panel.title}</text>',
        *_legend(panel),
        *_grid(panel, marks, across, height),
        *(line for series in panel.series for line in _curve(panel, series, across, height)),
    ]


def _across(panel: Panel) -> Callable[[int], float]:
    low, high = (math.log2(chosen(panel.levels)) for chosen in (min, max))
    inner = 24

    def place(concurrency: int) -> float:
        share = (math.log2(concurrency) - low) / (high - low) if high > low else 0.5
        return panel.left + inner + share * (panel.right - panel.left - 2 * inner)

    return place


def _legend(panel: Panel) -> list[str]:
    if len(panel.series) < 2:
        return []
    lines = []
    for at, series in enumerate(reversed(panel.series)):
        x = panel.right - 28 - 54 * at
        lines.append(f'<path class="line" stroke="{series.color}" d="M{x - 18:.1f} 86H{x - 4:.1f}"/>')
        lines.append(f'<text x="{x:.1f}" y="90">{series.name}</text>')
    return lines


def _grid(
    panel: Panel, marks: Sequence[float], across: Callable[[int], float], height: Callable[[float], float]
) -> list[str]:
    lines = []
    for mark in marks:
        y, kind = height(mark), "grid" if mark else "axis"
        lines.append(f'<path class="{kind}" d="M{panel.left:.1f} {y:.1f}H{panel.right:.1f}"/>')
        lines.append(f'<text x="{panel.left - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{_number(mark)}</text>')
    lines += [f'<text x="{across(n):.1f}" y="{BOTTOM + 20}" text-anchor="middle">{n}</text>' for n in panel.levels]
    middle = (panel.left + panel.right) / 2
    lines.append(f'<text x="{middle:.1f}" y="{BOTTOM + 42}" text-anchor="middle">requests at once</text>')
    return lines


def _curve(panel: Panel, series: Series, across: Callable[[int], float], height: Callable[[float], float]) -> list[str]:
    seen = [(level, value) for level, value in zip(panel.levels, series.values, strict=True) if value is not None]
    points = [(across(level), height(value)) for level, value in sorted(seen)]
    joined = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    lines = [f'<path class="line" stroke="{series.color}" d="M{joined}"/>'] if len(points) > 1 else []
    lines += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{series.color}"/>' for x, y in points]
    if series.labelled:
        for (x, y), (_, value) in zip(points, sorted(seen), strict=True):
            lines.append(
                f'<text class="value" x="{x:.1f}" y="{y - 11:.1f}" text-anchor="middle">{_number(value)}</text>'
            )
    return lines
