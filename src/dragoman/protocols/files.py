"""Requests and replies about files, in OpenAI's and in Anthropic's API.

    openai     {id, object: "file", bytes, created_at, expires_at, filename, purpose, status}
    anthropic  {id, type: "file", size_bytes, created_at, expires_at, filename, mime_type, downloadable}

Anthropic's lists have pages by `page` and `next_page`, and as in its older versions by `after_id` and `before_id`.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, get_args

import msgspec

from dragoman.core.choices import list_choices
from dragoman.core.errors import BadRequest
from dragoman.protocols.openai import decode_limit

Purpose = Literal["assistants", "batch", "evals", "user_data", "vision"]
"""What an uploaded file may be for. All are stored alike; only batches read files."""
PURPOSES = (*get_args(Purpose), "assistants_output", "batch_output", "fine-tune", "fine-tune-results")
"""All purposes of OpenAI's API, to filter lists by."""
ANTHROPIC_PURPOSE = "user_data"
"""Anthropic's files have no purpose."""
BINARY = "application/octet-stream"
MAX_PAGE, ANTHROPIC_PAGE, ANTHROPIC_MAX_PAGE = 10_000, 20, 1000
MAX_IDS = 100
PAGE_PREFIX = "page_"
Order = Literal["asc", "desc"]


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A file as clients see it."""

    id: str
    created: float
    expires: float
    name: str
    purpose: str
    media_type: str
    size: int


class ExpiresAfter(msgspec.Struct, frozen=True):
    anchor: Literal["created_at"]
    seconds: Annotated[int, msgspec.Meta(ge=3600, le=2_592_000)]


class UploadFields(msgspec.Struct, frozen=True):
    purpose: Purpose
    expires_after: ExpiresAfter | None = None

    @property
    def seconds(self) -> int | None:
        return None if self.expires_after is None else self.expires_after.seconds


class AnthropicUploadFields(msgspec.Struct, frozen=True):
    expires_in_seconds: Annotated[int, msgspec.Meta(ge=3600, le=7_776_000)] | None = None

    @property
    def purpose(self) -> str:
        return ANTHROPIC_PURPOSE

    @property
    def seconds(self) -> int | None:
        return self.expires_in_seconds


class PageQuery(msgspec.Struct, frozen=True):
    """Which objects a list contains: `limit` of them after or before another one."""

    limit: int
    order: Order = "desc"
    after: str | None = None
    before: str | None = None
    cursor: str = "after"
    """The name of the parameter that `after` or `before` comes from."""


class FileQuery(PageQuery, frozen=True):
    purpose: str | None = None


def decode_query(query: Mapping[str, str]) -> FileQuery:
    order, purpose = query.get("order", "desc"), query.get("purpose")
    if order not in ("asc", "desc"):
        raise BadRequest("order: expected asc or desc", param="order")
    if purpose is not None and purpose not in PURPOSES:
        raise BadRequest(f"purpose: expected {list_choices(PURPOSES)}", param="purpose")
    limit = decode_limit(query, MAX_PAGE, MAX_PAGE)
    return FileQuery(limit, "asc" if order == "asc" else "desc", query.get("after"), purpose=purpose)


def decode_anthropic_query(query: Mapping[str, str]) -> FileQuery:
    if "scope_id" in query:
        raise BadRequest("scope_id: files here belong to no session", param="scope_id")
    limit = decode_limit(query, ANTHROPIC_PAGE, ANTHROPIC_MAX_PAGE)
    if "before_id" in query:
        return FileQuery(limit, before=query["before_id"], cursor="before_id")
    if "page" in query:
        return FileQuery(limit, after=query["page"].removeprefix(PAGE_PREFIX), cursor="page")
    return FileQuery(limit, after=query.get("after_id"), cursor="after_id")


def check_ids(ids: Sequence[str], query: Mapping[str, str]) -> Sequence[str]:
    """The ids that Anthropic's list is restricted to, each once."""
    if "page" in query or "limit" in query:
        raise BadRequest("ids: cannot be combined with page or limit", param="ids")
    unique = tuple(dict.fromkeys(ids))
    if len(unique) > MAX_IDS:
        raise BadRequest(f"ids: at most {MAX_IDS} ids are accepted", param="ids")
    return unique


def encode_file(file: FileEntry) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.size,
        "created_at": int(file.created),
        "expires_at": int(file.expires),
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
    }


def encode_anthropic_file(file: FileEntry) -> dict[str, Any]:
    return {
        "id": file.id,
        "type": "file",
        "filename": file.name,
        "mime_type": file.media_type,
        "size_bytes": file.size,
        "created_at": _timestamp(file.created),
        "expires_at": _timestamp(file.expires),
        "downloadable": True,
    }


def encode_files(files: Sequence[FileEntry], has_more: bool) -> dict[str, Any]:
    ends = {"first_id": files[0].id if files else "", "last_id": files[-1].id if files else ""}
    return {"object": "list", "data": [encode_file(file) for file in files], **ends, "has_more": has_more}


def encode_anthropic_files(files: Sequence[FileEntry], has_more: bool, *, is_before: bool = False) -> dict[str, Any]:
    """`is_before`: there are more files before these, not after them."""
    return {
        "data": [encode_anthropic_file(file) for file in files],
        "first_id": files[0].id if files else None,
        "last_id": files[-1].id if files else None,
        "has_more": has_more,
        "next_page": f"{PAGE_PREFIX}{files[-1].id}" if files and has_more and not is_before else None,
    }


def encode_deleted(file_id: str) -> dict[str, Any]:
    return {"id": file_id, "object": "file", "deleted": True}


def encode_anthropic_deleted(file_id: str) -> dict[str, Any]:
    return {"id": file_id, "type": "file_deleted"}


def _timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
