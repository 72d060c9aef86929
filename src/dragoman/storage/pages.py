"""Selects pages of the rows of tables with the columns `created` and `id`."""

from typing import Any, Protocol

from sqlalchemy import Select, Table, tuple_

from dragoman.protocols.files import Order


class Created(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def created(self) -> float: ...


def select_page(query: Select[Any], table: Table, limit: int, after: Created | None, order: Order) -> Select[Any]:
    """Restrict a query to rows in the order of their creation, beginning after `after`. It selects one row above
    `limit`, which tells that there are more."""
    columns = (table.c.created, table.c.id)
    if after is not None:
        place, last = tuple_(*columns), (after.created, after.id)
        query = query.where(place > last if order == "asc" else place < last)
    query = query.order_by(*(column.asc() if order == "asc" else column.desc() for column in columns))
    return query.limit(limit + 1)
