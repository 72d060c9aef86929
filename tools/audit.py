"""Write a software bill of materials of the locked dependencies, and look for known vulnerabilities in them.

    python -m tools.audit --sbom FILE LOCK...

Exit codes

    0  every dependency was looked up, and none has a known vulnerability
    1  a dependency has a known vulnerability
    2  a dependency could not be looked up: the vulnerability database cannot be reached, or does not have it

`make audit` runs it in an environment that has `pip-audit` and `cyclonedx-bom`. The SBOM is CycloneDX JSON of the first
lock file. It needs no network, so it is written even where the database cannot be reached.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

VULNERABLE, NOT_AUDITED = 1, 2
SHOWN = 5
"""Dependencies that are listed if they could not be looked up. Of the rest only the number is printed."""


class Verdict(NamedTuple):
    code: int
    lines: list[str]


def judge(report: dict[str, Any]) -> Verdict:
    """The verdict on pip-audit's JSON report. A report without any lookup is a success for pip-audit, but not here."""
    known = {entry["name"]: entry for entry in report["dependencies"]}
    found = [
        f"{name} {entry['version']}: {flaw['id']}, fixed in {', '.join(flaw['fix_versions']) or 'no version yet'}"
        for name, entry in known.items()
        for flaw in entry.get("vulns", ())
    ]
    skipped = [f"{name}: {entry['skip_reason']}" for name, entry in known.items() if "skip_reason" in entry]
    if found:
        return Verdict(VULNERABLE, found)
    if not known:
        return Verdict(NOT_AUDITED, ["the lock files name no dependency"])
    if skipped:
        words = f"vulnerability database unreachable or incomplete: {len(skipped)} of {len(known)} were not looked up"
        more = [f"... and {len(skipped) - SHOWN} more"] if len(skipped) > SHOWN else []
        return Verdict(NOT_AUDITED, [words, *skipped[:SHOWN], *more])
    return Verdict(0, [f"{len(known)} dependencies, no known vulnerability"])


def write_sbom(lock: Path, sbom: Path) -> None:
    sbom.parent.mkdir(parents=True, exist_ok=True)
    command = [*_tool("cyclonedx-py"), "requirements", str(lock), "--pyproject", "pyproject.toml"]
    # The tool warns on stderr that lock files have no dependency graph.
    subprocess.run([*command, "--output-reproducible", "--output-file", str(sbom)], check=True, stderr=subprocess.PIPE)


def look_up(locks: Sequence[Path]) -> Verdict:
    command = [*_tool("pip-audit"), "--require-hashes", "--disable-pip", "--progress-spinner=off", "--format=json"]
    for lock in locks:
        command += ["--requirement", str(lock)]
    run = subprocess.run(command, check=False, capture_output=True, text=True)
    try:
        return judge(json.loads(run.stdout))
    except json.JSONDecodeError:
        # Without a network pip-audit ends with a traceback, whose last line says why.
        why = (run.stderr.strip().splitlines() or ["pip-audit printed nothing"])[-1]
        return Verdict(NOT_AUDITED, [f"vulnerability database unreachable: {why}"])


def _tool(name: str) -> list[str]:
    return [str(Path(sys.executable).with_name(name))]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.audit")
    parser.add_argument("locks", metavar="LOCK", type=Path, nargs="+", help="a lock file with hashes")
    parser.add_argument("--sbom", metavar="FILE", type=Path, required=True, help="where the SBOM is written")
    arguments = parser.parse_args()
    try:
        write_sbom(arguments.locks[0], arguments.sbom)
    except subprocess.CalledProcessError as error:
        sys.exit(f"the SBOM cannot be written: {error.stderr.decode().strip()}")
    print(f"wrote {arguments.sbom}")
    code, lines = look_up(arguments.locks)
    print("\n".join(lines), file=sys.stderr if code else sys.stdout)
    return code


if __name__ == "__main__":
    sys.exit(main())
