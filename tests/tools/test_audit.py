"""`tools/audit.py`: what the reports of pip-audit mean. The reports have the form that pip-audit 2.10 writes."""

from typing import Any

import pytest
from tools.audit import NOT_AUDITED, VULNERABLE, judge

SOUND = {"name": "anyio", "version": "4.16.0", "vulns": []}
SKIPPED = {"name": "idna", "skip_reason": "Dependency not found on PyPI and could not be audited: idna (3.20)"}
FLAWED = {
    "name": "jinja2",
    "version": "3.1.2",
    "vulns": [{"id": "PYSEC-2024-1", "fix_versions": ["3.1.3"], "aliases": ["CVE-2024-22195"], "description": "..."}],
}


@pytest.mark.parametrize(
    ("dependencies", "code", "first"),
    [
        ([SOUND], 0, "1 dependencies, no known vulnerability"),
        ([SOUND, FLAWED], VULNERABLE, "jinja2 3.1.2: PYSEC-2024-1, fixed in 3.1.3"),
        ([SKIPPED, FLAWED], VULNERABLE, "jinja2 3.1.2: PYSEC-2024-1, fixed in 3.1.3"),
        ([SOUND, SKIPPED], NOT_AUDITED, "vulnerability database unreachable or incomplete: 1 of 2 were not looked up"),
        ([], NOT_AUDITED, "the lock files name no dependency"),
    ],
)
def test_only_a_full_lookup_without_findings_passes(dependencies: list[Any], code: int, first: str) -> None:
    verdict = judge({"dependencies": dependencies, "fixes": []})
    assert (verdict.code, verdict.lines[0]) == (code, first)


def test_long_list_of_skipped_dependencies_is_cut() -> None:
    skipped = [SKIPPED | {"name": f"package-{number}"} for number in range(20)]
    assert judge({"dependencies": skipped}).lines[-1] == "... and 15 more"
