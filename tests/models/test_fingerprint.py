"""The value that identifies a loaded model in replies."""

import os
import re
from pathlib import Path

import pytest

from dragoman.config.model_spec import ModelSpec
from dragoman.core.engine import Engine
from dragoman.core.version import __version__
from dragoman.engines.scripted import ScriptedEngine
from dragoman.models import fingerprint
from dragoman.models.fingerprint import model_fingerprint


class OtherEngine(Engine):
    pass


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"one")
    return path


def fingerprint_of(engine: str, source: str | None = None, **options: object) -> str:
    return model_fingerprint(ModelSpec("m", engine, source, options), OtherEngine())


def test_fingerprint_contains_the_version() -> None:
    assert re.fullmatch(rf"dragoman-{re.escape(__version__)}-[0-9a-f]{{12}}", fingerprint_of("scripted"))


def test_fingerprint_is_stable(file: Path) -> None:
    assert fingerprint_of("llama", str(file), context=8) == fingerprint_of("llama", str(file), context=8)


def test_fingerprint_changes_with_file_engine_options_and_version(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        fingerprint_of("scripted"),
        fingerprint_of("scripted", chunk=4),
        fingerprint_of("llama", str(file)),
        fingerprint_of("llama", str(file), layout="as-is"),
        fingerprint_of("vllm", "hf:org/a"),
        fingerprint_of("vllm", "hf:org/b"),
        model_fingerprint(None, ScriptedEngine()),
        model_fingerprint(None, OtherEngine()),
    ]
    os.utime(file, (1, 1))
    found.append(fingerprint_of("llama", str(file)))
    file.write_bytes(b"other")
    os.utime(file, (1, 1))
    found.append(fingerprint_of("llama", str(file)))
    monkeypatch.setattr(fingerprint, "__version__", "99")
    found.append(fingerprint_of("llama", str(file)))
    assert len(set(found)) == len(found)


def test_fingerprint_does_not_depend_on_credentials() -> None:
    urls = ("http://me:one@localhost/v1", "http://me:two@localhost/v1", "http://localhost:1/v1")
    first, second, other = (fingerprint_of("upstream", url=url) for url in urls)
    assert first == second != other
