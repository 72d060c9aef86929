"""Addresses of servers: the API path, and the removal of secrets."""

import pytest

from dragoman.client.planner import request_headers
from dragoman.core.errors import ConfigError
from dragoman.core.urls import parse_address, remove_credentials


@pytest.mark.parametrize(
    ("url", "api", "root"),
    [
        ("http://h", "http://h/v1", "http://h"),
        ("http://h:81/", "http://h:81/v1", "http://h:81"),
        ("https://h/v1/", "https://h/v1", "https://h"),
        ("http://h/api/v4", "http://h/api/v4", "http://h/api/v4"),
        ("http://h/below", "http://h/below/v1", "http://h/below"),
        ("http://[::1]:8000/v1beta/openai", "http://[::1]:8000/v1beta/openai", "http://[::1]:8000/v1beta/openai"),
        ("http://me:pw@h:81/v1", "http://h:81/v1", "http://h:81"),
    ],
)
def test_api_of_an_address(url: str, api: str, root: str) -> None:
    found = parse_address(url)
    assert (found.api, found.root) == (api, root)


@pytest.mark.parametrize("url", ["h:80", "ftp://h", "http://", "http://h:99999", "http://[h"])
def test_invalid_addresses(url: str) -> None:
    with pytest.raises(ConfigError, match="expected an address such as http"):
        parse_address(url)


@pytest.mark.parametrize("url", ["http://h/v1?x=1", "http://h?key=secret", "http://h/v1#x"])
def test_query_is_rejected(url: str) -> None:
    with pytest.raises(ConfigError, match="must not contain") as caught:
        parse_address(url)
    assert "secret" not in str(caught.value)


def test_credentials_are_sent_only_in_a_header() -> None:
    found = parse_address("http://me%40here:p%3Aw@h/v1")
    assert "p%3Aw" not in found.api + found.root
    # "me@here:p:w"
    assert request_headers(found, "key", "chat")["authorization"] == "Basic bWVAaGVyZTpwOnc="
    assert request_headers(parse_address("http://h"), "key", "chat")["authorization"] == "Bearer key"
    with pytest.raises(ConfigError) as refusal:
        parse_address("ftp://me:pw@h")
    assert "pw" not in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://u:p@h/a@b", "http://***@h/a@b"),
        ("socks5://u:p@w@h:1", "socks5://***@h:1"),
        ("tried http://u@a and https://b", "tried http://***@a and https://b"),
        ("http://h?mail=a@b", "http://h?mail=a@b"),
        ("a@b", "a@b"),
    ],
)
def test_credentials_are_removed_from_text(text: str, shown: str) -> None:
    assert remove_credentials(text) == shown
