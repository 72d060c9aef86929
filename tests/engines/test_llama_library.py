"""Another version of the wheel, or structs that lie elsewhere, must be refused before they are used."""

import ctypes
from typing import ClassVar

import pytest

from dragoman.engines.llama import library
from dragoman.errors import ConfigError


class Shifted(ctypes.Structure):
    _fields_: ClassVar = [("new", ctypes.c_uint64), *library._ContextParams._fields_]


def test_the_library_loads_once() -> None:
    assert library.library() is library.library()


def test_another_version_is_refused_by_both_names(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = library.SUPPORTED
    monkeypatch.setattr(library, "_loaded", None)
    monkeypatch.setattr(library, "SUPPORTED", "1999.1.1")
    with pytest.raises(ConfigError, match=rf"needs xllamacpp 1999\.1\.1, but {installed} is installed"):
        library.library()


def test_structs_of_another_layout_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_loaded", None)
    monkeypatch.setitem(library._PROTOTYPES, "llama_context_default_params", (Shifted,))
    with pytest.raises(ConfigError, match="structs"):
        library.library()
