"""Parses and formats sizes, durations and costs.

size := bytes | number unit         unit := B | KB MB GB TB (thousands) | KiB MiB GiB TiB (1024s)      "12GiB"
time := seconds | number unit       unit := s | m | h | d                                              "10m"
      | "forever" | a negative number
cost := a decimal number, in the operator's currency; inside, whole nano-units
"""

import math
import re
from decimal import ROUND_HALF_UP, Decimal

from dragoman.core.errors import ConfigError
from dragoman.core.types import MAX_SECONDS

_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")
_THOUSANDS = {unit: 1000**power for power, unit in enumerate(("b", "kb", "mb", "gb", "tb"))}
SIZES = _THOUSANDS | {unit: 1024**power for power, unit in enumerate(("b", "kib", "mib", "gib", "tib"))}
NANO = 10**9
"""Nano-units of one unit of the currency."""
TIMES = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_size(value: object) -> int:
    """Parse a size; the result is in bytes."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    parsed = _NUMBER.fullmatch(value) if isinstance(value, str) else None
    unit = parsed[2].lower() if parsed else ""
    if parsed is None or unit not in SIZES or float(parsed[1]) <= 0:
        raise ConfigError("expected a size such as 12GiB or 500MB")
    return int(float(parsed[1]) * SIZES[unit])


def parse_duration(value: object) -> float:
    """Parse a duration; the result is in seconds, infinite for "forever"."""
    if isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value):
        return math.inf if value < 0 else float(value)
    text = value.strip().lower() if isinstance(value, str) else ""
    if text in ("forever", "-1"):
        return math.inf
    parsed = _NUMBER.fullmatch(text)
    if parsed is None or (parsed[2] or "s") not in TIMES:
        raise ConfigError("expected a time such as 300, 10m, 2h or forever")
    return float(parsed[1]) * TIMES[parsed[2] or "s"]


def parse_finite_duration(value: object) -> float:
    """Parse a duration of at most 366 days."""
    try:
        seconds = parse_duration(value)
    except ConfigError:
        seconds = math.inf
    if seconds > MAX_SECONDS:
        raise ConfigError(f"expected a time such as 300, 10m, 2h or 30d, of at most {MAX_SECONDS / TIMES['d']:.0f}d")
    return seconds


def format_size(size: float) -> str:
    """Format a size in bytes as `1.4 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def to_nano_units(cost: float) -> int:
    """Return a cost in nano-units, exactly as its decimal digits say."""
    return int((Decimal(repr(cost)) * NANO).to_integral_value(ROUND_HALF_UP))


def format_cost(nano_units: int) -> str:
    """Format a cost as a decimal number with at least two decimals."""
    text = f"{Decimal(nano_units) / NANO:.9f}".rstrip("0")
    return text + "0" * max(0, 2 - len(text.partition(".")[2]))
