"""Names of functions, filters and rules for the tools of servers."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.core.tool_servers import (
    NO_APPROVAL,
    ApprovalRule,
    ListedTool,
    ToolFilter,
    ToolServer,
    find_header_error,
    function_name,
)

NAMES = st.text(min_size=1, max_size=100)
READ, WRITE = ListedTool("read", is_read_only=True), ListedTool("write")


@given(NAMES, NAMES, NAMES, NAMES)
def test_different_tools_have_different_names(label: str, tool: str, other_label: str, other_tool: str) -> None:
    name, other = function_name(label, tool), function_name(other_label, other_tool)
    assert re.fullmatch("[A-Za-z0-9_-]{1,64}", name)
    assert function_name(label, tool) == name
    # Only labels and names with "__" can collide; the session renames one of them then.
    if "__" not in label + other_label + tool + other_tool and (label, tool) != (other_label, other_tool):
        assert name != other or f"{label}__{tool}" == f"{other_label}__{other_tool}"


def test_plain_names_are_kept() -> None:
    assert function_name("docs", "search-all_2") == "docs__search-all_2"
    assert function_name("docs", "search.all").startswith("docs__search_all_")
    assert len(function_name("docs", "x" * 200)) == 64


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (ToolFilter(), [READ, WRITE]),
        (ToolFilter(("write", "other")), [WRITE]),
        (ToolFilter(()), []),
        (ToolFilter(hidden=("write",)), [READ]),
        (ToolFilter(is_read_only=True), [READ]),
        (ToolFilter(is_read_only=False), [WRITE]),
        (ToolFilter(("write",), is_read_only=True), []),
    ],
)
def test_filter_chooses_tools_by_name_and_read_only_hint(chosen: ToolFilter, expected: list[ListedTool]) -> None:
    assert [tool for tool in (READ, WRITE) if chosen.matches(tool)] == expected


@pytest.mark.parametrize(
    ("rule", "needs"),
    [
        (ApprovalRule(), True),
        (NO_APPROVAL, False),
        (ApprovalRule(always=ToolFilter(("write",))), True),
        (ApprovalRule(always=ToolFilter(("read",))), False),
        (ApprovalRule(never=ToolFilter(("write",))), False),
        (ApprovalRule(never=ToolFilter(("read",))), True),
        (ApprovalRule(ToolFilter(("read",)), ToolFilter(("read",))), True),
        (ApprovalRule(ToolFilter(("write",)), ToolFilter()), True),
    ],
)
def test_approval_rules(rule: ApprovalRule, needs: bool) -> None:
    assert rule.needs_approval(WRITE) is needs


def test_listing_is_needed_for_tools_that_are_not_known() -> None:
    server = ToolServer("s", "tools[0]")
    assert server.needs_listing
    assert not ToolServer("s", "tools[0]", listed=()).needs_listing
    assert not ToolServer("s", "tools[0]", listed=(READ,), offered=ToolFilter(("read",))).needs_listing
    assert ToolServer("s", "tools[0]", listed=(READ,), offered=ToolFilter(("read", "write"))).needs_listing


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("Host", "x"), ("content-length", "5"), ("Mcp-Session-Id", "x"), ("a b", "x"), ("", "x"), ("a:", "x")),
        *(("A", "x\r\nB: y"), ("A", "x\n"), ("A", " x"), ("A", "x "), ("A", "\x00"), ("A", "é")),
    ],
)
def test_headers_that_cannot_be_sent(name: str, value: str) -> None:
    error = find_header_error({"Fine": "1", name: value})
    assert error is not None
    assert error[0] == name
    assert value.strip() not in error[1] or len(value) < 5


def test_headers_that_can_be_sent() -> None:
    assert find_header_error({"Authorization": "Bearer a.b-c_d=", "X-Empty": "", "x": "a b\tc"}) is None
