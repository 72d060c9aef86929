"""Reads pages of lists whose cursors are the ids of objects."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from dragoman.core.errors import BadRequest, quote
from dragoman.protocols.files import Order, PageQuery

T = TypeVar("T")


async def read_page(
    query: PageQuery,
    kind: str,
    find: Callable[[str], Awaitable[T | None]],
    list_after: Callable[[T | None, Order], Awaitable[tuple[Sequence[T], bool]]],
) -> tuple[Sequence[T], bool]:
    """Return the objects of a page, and whether there are more. `kind` is what errors call them."""
    cursor = query.after if query.before is None else query.before
    start = None if cursor is None else await find(cursor)
    if cursor is not None and start is None:
        raise BadRequest(f"{query.cursor}: no {kind} {quote(cursor)}", param=query.cursor)
    if query.before is None:
        return await list_after(start, query.order)
    found, has_more = await list_after(start, "asc")
    return found[::-1], has_more
