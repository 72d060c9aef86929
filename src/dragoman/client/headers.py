"""Who a server is told that we are, and the words that some of them want otherwise.

Redirects are not followed: nobody is asked, or told a key, but who was named (`dragoman.core.urls`).
"""

from collections.abc import Mapping

from dragoman.client.decompression import ASKED
from dragoman.core.urls import Site
from dragoman.core.version import __version__

ANTHROPIC_VERSION = "2023-06-01"


def headers(where: Site, key: str | None, protocol: str) -> dict[str, str]:
    """Anthropic's own servers take the key in one place only; others that speak as they do look in either."""
    told: dict[str, str] = {
        "content-type": "application/json",
        "accept-encoding": ASKED,
        "user-agent": f"dragoman/{__version__}",
    }
    speaks_messages = protocol == "messages"
    if speaks_messages:
        told["anthropic-version"] = ANTHROPIC_VERSION
    if key is not None and (speaks_messages or where.is_at("anthropic.com")):
        told["x-api-key"] = key
    if key is not None and not where.is_at("anthropic.com"):
        told["authorization"] = f"Bearer {key}"
    if where.login is not None:
        told["authorization"] = where.login
    return told


def adapted(where: Site, body: Mapping[str, object]) -> dict[str, object]:
    """The body, in the one word that OpenAI's own newer models want otherwise than all others know it."""
    changed = dict(body)
    if "max_tokens" in body and "messages" in body and (where.is_at("openai.com") or where.is_at("azure.com")):
        changed["max_completion_tokens"] = changed.pop("max_tokens")
    return changed
