"""Addresses of requests, and the patterns that allow them."""

import pytest

from dragoman.core.errors import ConfigError
from dragoman.core.url_patterns import PlainUrl, UrlPattern

ALLOWED = [
    ("https://mcp.example.com/mcp", "https://mcp.example.com/mcp"),
    ("https://mcp.example.com/mcp", "https://MCP.Example.com./mcp?key=x"),
    ("https://mcp.example.com", "https://mcp.example.com/any/path"),
    ("https://mcp.example.com", "https://mcp.example.com"),
    ("https://*.example.com/mcp", "https://a.b.example.com/mcp"),
    ("https://*", "https://example.com/x"),
    ("http://*:*", "http://example.com:8000/x"),
    ("http://127.0.0.1:8000/*", "http://127.0.0.1:8000/a/b"),
    ("https://[::1]/x", "https://[::1]:443/x"),
    ("https://a/x[1]+*", "https://a/x[1]+2"),
]
REFUSED = [
    ("https://example.com", "http://example.com/"),
    ("https://example.com", "https://example.com:444/"),
    ("https://example.com", "https://example.com.evil.org/"),
    ("https://example.com", "https://evilexample.com/"),
    ("https://*.example.com", "https://example.com/"),
    ("https://*.example.com", "https://evil.org/.example.com/"),
    ("https://*.example.com/mcp", "https://evil.org/a.example.com/mcp"),
    ("https://example.com/mcp", "https://example.com/mcp/x"),
    ("https://example.com/mcp", "https://example.com/MCP"),
    ("https://a/x[1]", "https://a/x1"),
    ("https://a/x.y", "https://a/xzy"),
]


@pytest.mark.parametrize(("pattern", "url"), ALLOWED)
def test_allowed_addresses(pattern: str, url: str) -> None:
    parsed = PlainUrl.parse(url)
    assert parsed is not None
    assert UrlPattern.parse(pattern).matches(parsed)


@pytest.mark.parametrize(("pattern", "url"), REFUSED)
def test_refused_addresses(pattern: str, url: str) -> None:
    parsed = PlainUrl.parse(url)
    assert parsed is not None
    assert not UrlPattern.parse(pattern).matches(parsed)


@pytest.mark.parametrize(
    "pattern",
    [
        *("", "*", "example.com", "ftp://example.com", "https://", "https://a*b.com", "https://*example.com"),
        *("https://user@example.com", "https://example.com/?x=*", "https://example.com/#x", "https://a b/"),
    ],
)
def test_invalid_patterns(pattern: str) -> None:
    with pytest.raises(ConfigError, match="expected a pattern such as"):
        UrlPattern.parse(pattern)


@pytest.mark.parametrize(
    "url",
    [
        *("https://user:password@example.com/", "https://example.com\\@evil.org/", "https://example.com/../x"),
        *(
            "https://example.com/%2e%2E/x",
            "https://example.com/#x",
            "https://exämple.com/",
            "https://a b/",
            "HTTPS://a/",
        ),
        *(
            "https://a:0/",
            "https://a:65536/",
            "https:///x",
            "//a/",
            "javascript:x",
            "https://a/\n",
            "https://a/" + "x" * 3000,
        ),
    ],
)
def test_addresses_that_parsers_may_read_differently(url: str) -> None:
    assert PlainUrl.parse(url) is None
