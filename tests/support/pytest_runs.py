"""Runs pytest in a process of its own, with the plugin of `dragoman.testing`."""

import os
import subprocess
import sys
from pathlib import Path

TIMEOUT_SECONDS = 120
PLUGIN = ("-p", "no:dragoman", "-p", "dragoman.testing.plugin")
"""Loads the plugin once, whether or not the installed package has its entry point."""


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *PLUGIN, *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
    )


def environment() -> dict[str, str]:
    """The environment of the tests, without settings of the SDKs and without proxies."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "ANTHROPIC_"))}
    return {**inherited, "NO_PROXY": "*", "no_proxy": "*", "COLUMNS": "200"}
