"""Runs pytest in a process of its own, with the plugin of `dragoman.testing`."""

import os
import subprocess
import sys
from pathlib import Path

PLUGIN = ("-p", "no:dragoman", "-p", "dragoman.testing.plugin")
"""Loads the plugin once, whether or not the installed package has its entry point."""


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *PLUGIN, *arguments]
    environment = {**os.environ, "NO_PROXY": "*", "no_proxy": "*", "COLUMNS": "200"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
