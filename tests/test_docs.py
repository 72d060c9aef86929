"""The documentation is correct: its tables of errors are complete, and its examples work.

Rules for the code blocks of README.md and of the pages in docs/
1. Every Python block is run as a script; the scripts of one page share a process. `http://127.0.0.1:8000` is replaced
   by the address of a server with `smollm2` (the default), `minilm` and the models of testing.md's first YAML block.
2. A block with test functions is run by pytest. In a block that calls `serve`, the engine has to answer a request.
3. A block that begins with a comment such as `# my_module.py` is a file. The other blocks of its page find it.
4. Every YAML or JSON block with a key of the configuration has to be accepted as a configuration.
5. A TOML block with entry points is that of an installed package.
6. A block after the line `<!-- not run: REASON -->` is skipped.
"""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from dragoman.config.loading import Flags, load
from dragoman.config.settings import Settings
from dragoman.core import errors
from tests.support.pytest_runs import environment, run_pytest
from tests.support.server_process import Running, serving

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = (ROOT / "README.md", *sorted(DOCS.glob("*.md")))
DOCUMENTED_ADDRESS = "http://127.0.0.1:8000"
RUN_EXAMPLES = ROOT / "tests" / "support" / "run_examples.py"
TIMEOUT_SECONDS = 120
"""For the scripts or the tests of one page."""

CLIENT_ONLY = {"MalformedToolCall", "OutputMismatch", "StepLimitReached"}
SERVER_ONLY = {
    *("EngineFailed", "EngineDied", "EngineTimeout", "DeadlineExceeded", "ModelFailed", "StorageUnavailable"),
    *(
        "CompactionFailed",
        "InvalidSeal",
        "InvalidConfig",
        "ThreadUnsupported",
        "PreviousResponseNotFound",
        "TokensLimited",
        "RequestTimeout",
    ),
    *("InvalidStreamId", "ResponseCancelled", "StreamLimitReached"),
    *("UnsupportedMedia", "UpgradeRequired", "HeadersTooLarge", "NoRoomForReply", "RequestRefused", "DragomanError"),
}
"""Errors that the client does not raise for other servers."""

FENCE = re.compile(r"^ *```(\w*)")
SKIPPED = re.compile(r"^ *<!-- not run: (.+) -->$")
FILE_NAME = re.compile(r"# (\w+\.(?:py|yaml))\b")
IS_TEST = re.compile(r"^(async )?def test_", re.MULTILINE)
OWN_ENGINE = re.compile(r"""engine: ["']?(\w+):(\w+)""")


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    code: str
    skip_reason: str | None

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def file_name(self) -> str | None:
        named = FILE_NAME.match(self.code)
        return named[1] if named else None

    @property
    def is_config(self) -> bool:
        try:
            values = yaml.safe_load(self.code)
        except yaml.YAMLError:
            return self.language == "yaml"
        return isinstance(values, dict) and not {"models", "aliases", *Settings.__struct_fields__}.isdisjoint(values)


def read_blocks(page: Path) -> Iterator[Block]:
    lines = page.read_text().splitlines()
    at = 0
    while at < len(lines):
        opening = FENCE.match(lines[at])
        if opening is not None:
            end = next(line for line in range(at + 1, len(lines)) if FENCE.match(lines[line]))
            skipped = SKIPPED.match(lines[at - 1]) if at else None
            indent = len(lines[at]) - len(lines[at].lstrip())
            code = "".join(f"{line[indent:]}\n" for line in lines[at + 1 : end])
            yield Block(page, at + 1, opening[1], code, skipped[1] if skipped else None)
            at = end
        at += 1


BLOCKS = [block for page in PAGES for block in read_blocks(page)]
PYTHON = [block for block in BLOCKS if block.language == "python" and block.skip_reason is None]
CONFIGS = [
    block for block in BLOCKS if block.language in ("yaml", "json") and block.skip_reason is None and block.is_config
]


def error_tree(kind: type[errors.DragomanError]) -> list[type[errors.DragomanError]]:
    return [kind, *(found for child in kind.__subclasses__() for found in error_tree(child))]


def section(page: str, heading: str) -> str:
    return (DOCS / page).read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("kind", error_tree(errors.DragomanError), ids=lambda kind: kind.__name__)
def test_errors_are_in_the_tables(kind: type[errors.DragomanError]) -> None:
    if kind.__module__ != errors.__name__:
        return
    if kind.code is not None and kind.__name__ not in CLIENT_ONLY:
        assert f"`{kind.code}`" in section("api.md", "Errors")
    if kind.__name__ not in SERVER_ONLY:
        assert f"`{kind.__name__}`" in section("client.md", "What can go wrong")


def write_files(folder: Path, page: Path, address: str = DOCUMENTED_ADDRESS) -> None:
    """Write the blocks of a page that are files, and install its entry points."""
    for block in (block for block in BLOCKS if block.page == page):
        if block.file_name is not None:
            (folder / block.file_name).write_text(block.code.replace(DOCUMENTED_ADDRESS, address))
        groups = entry_points(block)
        if groups:
            info = folder / f"line_{block.line}-1.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: line-{block.line}\nVersion: 1\n")
            with (info / "entry_points.txt").open("w") as file:
                for group, names in groups.items():
                    file.writelines([f"[{group}]\n", *(f"{name} = {target}\n" for name, target in names.items())])


def entry_points(block: Block) -> dict[str, dict[str, str]]:
    """The entry points of a TOML block, by group."""
    project = tomllib.loads(block.code).get("project", {}) if block.language == "toml" else {}
    return dict(project.get("entry-points", {}))


@pytest.mark.parametrize("block", CONFIGS, ids=str)
def test_configuration_is_accepted(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in OWN_ENGINE.findall(block.code):
        engine = f"class {name}(Engine):\n    def generate(self, request):\n        yield ''\n"
        code = f"from dragoman import Engine\n\n\n{engine}"
        (tmp_path / f"{module}.py").write_text(code)
        monkeypatch.delitem(sys.modules, module, raising=False)
    write_files(tmp_path, block.page)
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / f"documented.{block.language}"
    file.write_text(block.code)
    load(str(file), Flags(), {})


INSTALLING = re.compile(r"\b(pip install|make)\b")


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "sh"], ids=str)
def test_install_lines_can_be_pasted_into_zsh(block: Block) -> None:
    """An interactive zsh has no comments, and takes unquoted brackets for a pattern of file names."""
    for line in block.code.splitlines():
        if INSTALLING.search(line):
            unquoted = re.sub(r"'[^']*'|\"[^\"]*\"", "", line)
            assert not set("#[]*?") & set(unquoted)


def test_extras_are_installed_from_the_checkout() -> None:
    """The package is not in an index."""
    assert not [page.name for page in PAGES if "dragoman[" in page.read_text()]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path, minilm_path: Path) -> Iterator[Running]:
    scripted = next(block for block in CONFIGS if block.page.name == "testing.md")
    smollm2 = {
        "source": str(smollm2_path),
        "context": 2048,
        "slots": 2,
        "layout": "as-is",
        # Makes replies short and repeatable where an example does not set these.
        "sampling": {"temperature": 0, "max_tokens": 60},
    }
    models = {"smollm2": smollm2, "minilm": {"source": str(minilm_path)}, **yaml.safe_load(scripted.code)["models"]}
    with serving(tmp_path_factory.mktemp("docs"), {"models": models, "default": "smollm2"}) as running:
        yield running


@pytest.mark.parametrize("page", sorted({block.page for block in PYTHON}), ids=lambda page: page.name)
def test_python_runs(page: Path, server: Running, tmp_path: Path) -> None:
    write_files(tmp_path, page, server.url)
    scripts: list[str] = []
    tests: list[str] = []
    for block in (block for block in PYTHON if block.page == page):
        name = block.file_name or f"line_{block.line}.py"
        (tmp_path / name).write_text(block.code.replace(DOCUMENTED_ADDRESS, server.url))
        (tests if IS_TEST.search(block.code) else scripts).append(name)
    if scripts:
        run(tmp_path, str(RUN_EXAMPLES), *scripts)
    if tests:
        assert_success(run_pytest(tmp_path, "-q", *tests))


def run(folder: Path, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment(),
        timeout=TIMEOUT_SECONDS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert_success(done)


def assert_success(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
