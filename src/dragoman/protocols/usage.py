"""Requests and replies of usage reports: `/admin/usage`, and OpenAI's `/v1/organization/usage/completions`.

    Dragoman's   := since: DATE | DAYS "d"     by: COLUMN ("," COLUMN)*     COLUMN := day | key | principal | model
    OpenAI's     := start_time [end_time] [bucket_width: 1d] [group_by*] [models*] [user_ids*] [api_key_ids*]
                    [limit] [page]             a list repeats its name, or its name with `[]`

Rules
1. Days begin at midnight UTC and are counted since 1970-01-01. `7d` means today and the six days before.
2. OpenAI's user is the principal. Fields of OpenAI that Dragoman does not know (projects, batches) are null.
"""

import datetime
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import msgspec
from msgspec import UNSET, UnsetType

from dragoman.core.errors import BadRequest, quote
from dragoman.protocols.openai import decode_limit

DAY = 86400
EPOCH = datetime.date(1970, 1, 1)
DEFAULT_SINCE = "30d"
DEFAULT_BUCKETS, MAX_BUCKETS = 7, 31
SECONDS = re.compile(r"[0-9]{1,10}")
DAYS = re.compile(r"([1-9][0-9]{0,4})d")
PAGE = re.compile(r"page_([0-9]{1,6})")
UsageColumn = Literal["day", "key", "principal", "model"]
COLUMNS: tuple[UsageColumn, ...] = get_args(UsageColumn)
DEFAULT_COLUMNS: tuple[UsageColumn, ...] = ("principal", "model")
COLUMN_BY_FIELD: dict[str, UsageColumn] = {"user_id": "principal", "api_key_id": "key", "model": "model"}
FILTERS: dict[str, UsageColumn] = {"user_ids": "principal", "api_key_ids": "key", "models": "model"}
UNKNOWN_FILTERS = ("project_ids", "batch")
"""Filters of OpenAI that cannot be applied: without them the answer would be wrong."""
Query = Sequence[tuple[str, str]]


class UsageQuery(msgspec.Struct, frozen=True):
    """The days from `first` up to `end` (exclusive), summed by these columns; only rows with these values."""

    first: int
    end: int
    by: tuple[UsageColumn, ...]
    where: Mapping[UsageColumn, tuple[str, ...]] = {}


class UsagePage(msgspec.Struct, frozen=True):
    """A page of OpenAI's buckets. `end` is the end of the whole time range."""

    query: UsageQuery
    end: int


class UsageEntry(msgspec.Struct, frozen=True):
    """Sums, and the columns that they were summed by. `cost` is in the operator's currency."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    cost: float
    day: str | UnsetType = UNSET
    key: str | UnsetType = UNSET
    principal: str | UnsetType = UNSET
    model: str | UnsetType = UNSET


class BudgetEntry(msgspec.Struct, frozen=True):
    """A budget in its present period. It is in tokens or in money, and so are the amounts."""

    per: str
    action: str
    used: float
    reserved: float
    remaining: float
    begins_anew: str
    principal: str | UnsetType = UNSET
    key: str | UnsetType = UNSET
    tokens: int | UnsetType = UNSET
    cost: float | UnsetType = UNSET


class UsageReport(msgspec.Struct, frozen=True):
    since: str
    by: tuple[UsageColumn, ...]
    data: tuple[UsageEntry, ...]
    budgets: tuple[BudgetEntry, ...]


def day_of(time: float) -> int:
    """The day of a Unix time."""
    return int(time // DAY)


def show_day(day: int) -> str:
    return str(EPOCH + datetime.timedelta(day))


def decode_usage_query(query: Query, today: int) -> UsageQuery:
    values = dict(query)
    names = values.get("by", ",".join(DEFAULT_COLUMNS)).split(",")
    by = tuple([name for name in COLUMNS if name in names])
    if unknown := [name for name in names if name not in COLUMNS]:
        raise BadRequest(f"by: unknown column {quote(unknown[0])}; columns: {', '.join(COLUMNS)}", param="by")
    return UsageQuery(_decode_since(values.get("since", DEFAULT_SINCE), today), today + 1, by)


def _decode_since(text: str, today: int) -> int:
    if days := DAYS.fullmatch(text):
        return today - int(days[1]) + 1
    try:
        return (datetime.date.fromisoformat(text) - EPOCH).days
    except ValueError as error:
        message = f"since: expected a date such as 2027-01-31, or a number of days such as 7d, not {quote(text)}"
        raise BadRequest(message, param="since") from error


def decode_usage_page(query: Query, today: int) -> UsagePage:
    values = dict(query)
    if values.get("bucket_width", "1d") != "1d":
        raise BadRequest("bucket_width: only 1d is supported", param="bucket_width")
    for name in UNKNOWN_FILTERS:
        if _list(query, name):
            raise BadRequest(f"{name}: the usage has no such column", param=name)
    by: list[UsageColumn] = ["day"]
    for field in _list(query, "group_by"):
        if field not in COLUMN_BY_FIELD:
            message = f"group_by: cannot group by {quote(field)}; supported: {', '.join(COLUMN_BY_FIELD)}"
            raise BadRequest(message, param="group_by")
        by.append(COLUMN_BY_FIELD[field])
    where = {column: tuple(found) for name, column in FILTERS.items() if (found := _list(query, name))}
    first = _decode_time(values, "start_time") // DAY
    # `end_time` is exclusive.
    end = -(-_decode_time(values, "end_time", (today + 1) * DAY) // DAY)
    if "page" in values:
        page = PAGE.fullmatch(values["page"])
        if page is None:
            raise BadRequest("page: expected the next_page of an earlier reply", param="page")
        first = max(first, int(page[1]))
    page_end = min(end, first + decode_limit(values, DEFAULT_BUCKETS, MAX_BUCKETS))
    return UsagePage(UsageQuery(first, page_end, tuple(dict.fromkeys(by)), where), end)


def _list(query: Query, name: str) -> list[str]:
    return [value for key, value in query if key in (name, f"{name}[]")]


def _decode_time(values: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = values.get(name)
    if text is None and default is not None:
        return default
    if text is None or not SECONDS.fullmatch(text):
        raise BadRequest(f"{name}: expected a time in seconds since 1970", param=name)
    return int(text)


def encode_usage_page(page: UsagePage, entries: Iterable[UsageEntry]) -> dict[str, Any]:
    by_day: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        assert entry.day is not UNSET
        by_day.setdefault(entry.day, []).append(_encode_result(entry))
    buckets = [
        {
            "object": "bucket",
            "start_time": day * DAY,
            "end_time": (day + 1) * DAY,
            "results": by_day.get(show_day(day), []),
        }
        for day in range(page.query.first, page.query.end)
    ]
    has_more = page.query.end < page.end
    return {
        "object": "page",
        "data": buckets,
        "has_more": has_more,
        "next_page": f"page_{page.query.end}" if has_more else None,
    }


def _encode_result(entry: UsageEntry) -> dict[str, Any]:
    return {
        "object": "organization.usage.completions.result",
        "input_tokens": entry.prompt_tokens,
        "output_tokens": entry.completion_tokens,
        "input_cached_tokens": entry.cached_tokens,
        "input_audio_tokens": 0,
        "output_audio_tokens": 0,
        "num_model_requests": entry.requests,
        "project_id": None,
        "user_id": None if entry.principal is UNSET else entry.principal,
        "api_key_id": None if entry.key is UNSET else entry.key,
        "model": None if entry.model is UNSET else entry.model,
        "batch": None,
        "service_tier": None,
        "api_source": None,
    }
