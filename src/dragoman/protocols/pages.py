"""Lists that are told in pages."""

from collections.abc import Mapping

from dragoman.core.errors import BadRequest


def decode_limit(query: Mapping[str, str], usual: int, most: int) -> int:
    """How long a page may be."""
    given = query.get("limit", str(usual))
    if given.isascii() and given.isdigit() and len(given) <= len(str(most)) and 1 <= int(given) <= most:
        return int(given)
    raise BadRequest(f"limit: a number from 1 to {most}", param="limit")
