"""Break things under load, and judge what the server makes of it.

    python -m tools.faults [SCENARIO ...] [--times N] [--seed S] [--patience F]

Without names all scenarios run, each on a server of its own, as often as it says. The exit code is 1 where one of them
fails. What passes is in judge.py. It needs the /proc of Linux.
"""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from tools.faults.judge import run_scenario
from tools.faults.scenarios import SCENARIOS
from tools.faults.trial import Skipped


def main() -> int:
    names = "\n".join(
        f"  {name:20} {(scenario.inject.__doc__ or '').splitlines()[0]}" for name, scenario in SCENARIOS.items()
    )
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\nscenarios:\n{names}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO")
    parser.add_argument("--times", type=int, help="how often the fault is injected")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--patience", type=float, default=1.0, help="factor of the time bounds, for a busy machine")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.scenarios if name not in SCENARIOS]:
        parser.error(f"no such scenario: {', '.join(unknown)}; there are {', '.join(SCENARIOS)}")
    failed = []
    for name in arguments.scenarios or SCENARIOS:
        scenario = SCENARIOS[name]
        times = arguments.times or scenario.times
        print(f"\n{name}", flush=True)
        try:
            with tempfile.TemporaryDirectory() as folder:
                verdict = asyncio.run(
                    run_scenario(name, scenario, Path(folder), times, arguments.seed, arguments.patience)
                )
        except Skipped as reason:
            print(f"  skipped: {reason}", flush=True)
            continue
        print("\n".join(f"  {line}" for line in verdict.lines), flush=True)
        print("\n".join(f"  FAILED: {problem}" for problem in verdict.problems) or "  passed", flush=True)
        failed += [name] if verdict.problems else []
    if failed:
        print(f"\nfailed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
