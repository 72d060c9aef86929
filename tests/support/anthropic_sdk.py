"""Helpers for tests with Anthropic's official SDK."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pydantic
from anthropic import Anthropic, DefaultHttpxClient

from tests.support.server_process import Running


@contextmanager
def anthropic_sdk(running: Running, key: str = "none", timeout: float = 60) -> Iterator[Anthropic]:
    http = DefaultHttpxClient(trust_env=False)
    with Anthropic(base_url=running.url, api_key=key, max_retries=0, timeout=timeout, http_client=http) as client:
        yield client


def validated(shape: Any, body: bytes | str) -> Any:
    """The body as the SDK's own type, in strict mode: no required field is missing, and there are no unknown fields."""
    value = pydantic.TypeAdapter(shape).validate_json(body, strict=True)
    _refuse_extras(value)
    return value


def _refuse_extras(value: object) -> None:
    if isinstance(value, pydantic.BaseModel):
        assert not value.model_extra, (type(value), value.model_extra)
        for name in type(value).model_fields:
            _refuse_extras(getattr(value, name))
    elif isinstance(value, list):
        for item in value:
            _refuse_extras(item)
