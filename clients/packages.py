"""Where `make clients` has installed the clients, and in which versions.

.clients/node_modules      the packages of package.json, with a Node of their own
.clients/python/NAME       a virtual environment for each clients/python/NAME.lock
"""

import json
import os
import shutil
from importlib.metadata import distributions
from pathlib import Path

HERE = Path(__file__).parent
INSTALLED = HERE.parent / ".clients"
LOCKS = HERE / "python"


def prepare() -> None:
    if not (INSTALLED / ".installed").exists():
        raise SystemExit("the clients are not installed: run `make clients`")
    # A script finds its packages in the folder where it lies.
    for program in (HERE / "sdks").glob("*.mjs"):
        shutil.copy(program, INSTALLED)


def program(part: str) -> str:
    """A part of a command, with the place of a program of clients/sdks."""
    return str(INSTALLED / part) if part.endswith(".mjs") else part


def search_path(package: str) -> str:
    folders = [INSTALLED / "node_modules" / ".bin"]
    if is_python(package):
        folders.insert(0, _environment(package) / "bin")
    return os.pathsep.join([*map(str, folders), os.environ["PATH"]])


def version(package: str) -> str:
    if is_python(package):
        folders = map(str, _environment(package).glob("lib/python*/site-packages"))
        return next(iter(distributions(name=package, path=list(folders)))).version
    description = json.loads((INSTALLED / "node_modules" / package / "package.json").read_text())
    return str(description["version"])


def is_python(package: str) -> bool:
    return (LOCKS / f"{package}.lock").exists()


def _environment(package: str) -> Path:
    return INSTALLED / "python" / package
