"""What texts of a configuration must look like, where a type says too little.

host    := name | address                               hosts := name | address | "[" address of IPv6 "]"
origin  := "*" | scheme "://" host [":" port]
traces  := ("http" | "https") "://" host [":" port] [path]
"""

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from dragoman.config.locations import Mistake
from dragoman.config.settings import Settings

_HOST = re.compile(r"[A-Za-z0-9._:%-]+")
_HOST_NAME = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]")
_ORIGIN = re.compile(r"\*|null|[A-Za-z][A-Za-z0-9+.-]*://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]+)?/?")


def wrong_forms(settings: Settings) -> Iterator[Mistake]:
    if not _HOST.fullmatch(settings.host):
        yield Mistake("host", f"expected a name or an address to listen on, as 127.0.0.1, got {settings.host!r}")
    for at, name in enumerate(settings.hosts or ()):
        if not _HOST_NAME.fullmatch(name):
            words = f"expected a name without scheme, port and path, as llm.example or [::1], got {name!r}"
            yield Mistake(f"hosts[{at}]", words)
    for at, origin in enumerate(settings.cors.origins):
        if not _ORIGIN.fullmatch(origin):
            words = f"expected an origin, as https://app.example or http://localhost:3000, or *, got {origin!r}"
            yield Mistake(f"cors.origins[{at}]", words)
    traces = settings.telemetry.traces
    if traces is not None and not _is_address(traces.endpoint):
        words = f"expected an address, as http://127.0.0.1:4318/v1/traces, got {traces.endpoint!r}"
        yield Mistake("telemetry.traces.endpoint", words)


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
