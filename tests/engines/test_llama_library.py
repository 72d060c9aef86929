"""Loading the C library: wrong versions and struct layouts are refused."""

import ctypes
import os
import signal
import subprocess
import sys
from typing import ClassVar

import pytest

from dragoman.core.errors import ConfigError
from dragoman.engines.llama import library


class Shifted(ctypes.Structure):
    _fields_: ClassVar = [("new", ctypes.c_uint64), *library._ContextParams._fields_]


def test_other_version_is_refused_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = library.SUPPORTED
    monkeypatch.setattr(library, "_loaded", None)
    monkeypatch.setattr(library, "SUPPORTED", "1999.1.1")
    with pytest.raises(ConfigError, match=rf"needs xllamacpp 1999\.1\.1, but {installed} is installed"):
        library.library()


def test_other_struct_layout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_loaded", None)
    monkeypatch.setitem(library._PROTOTYPES, "llama_context_default_params", (Shifted,))
    with pytest.raises(ConfigError, match="structs"):
        library.library()


ABORT = """
from dragoman.engines.llama.library import library
library().ggml_abort(b"x.c", 7, b"lost")
"""


def test_abort_writes_one_line() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GGML_NO_BACKTRACE"}
    done = subprocess.run([sys.executable, "-c", ABORT], capture_output=True, text=True, env=environment)
    assert done.returncode == -signal.SIGABRT
    assert done.stderr.splitlines() == ["x.c:7: lost"]


def test_backtrace_setting_of_the_operator_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_loaded", None)
    monkeypatch.setenv("GGML_NO_BACKTRACE", "mine")
    library.library()
    assert os.environ["GGML_NO_BACKTRACE"] == "mine"
