"""The tables of errors in the documentation have all of them."""

from pathlib import Path

import pytest

from dragoman.core import errors

DOCS = Path(__file__).parents[1] / "docs"
ONLY_OF_THE_CLIENT = {"QuotaExhausted", "MalformedToolCall", "OutputMismatch", "StepLimitReached"}
ONLY_OF_OURS = {
    *("EngineFailed", "EngineDied", "EngineTimeout", "DeadlineExceeded", "ModelFailed", "StorageUnavailable"),
    *("InvalidConfig", "ThreadUnsupported", "PreviousResponseNotFound", "TokensLimited", "RequestTimeout"),
    *("UnsupportedMedia", "UpgradeRequired", "HeadersTooLarge", "NoRoomForReply", "RequestRefused", "DragomanError"),
}
"""Errors that servers of other kinds do not have."""


def tree(kind: type[errors.DragomanError]) -> list[type[errors.DragomanError]]:
    return [kind, *(found for child in kind.__subclasses__() for found in tree(child))]


def section(page: str, heading: str) -> str:
    return (DOCS / page).read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("kind", tree(errors.DragomanError), ids=lambda kind: kind.__name__)
def test_errors_are_in_the_tables(kind: type[errors.DragomanError]) -> None:
    if kind.__module__ != errors.__name__:
        return
    if kind.code is not None and kind.__name__ not in ONLY_OF_THE_CLIENT:
        assert f"`{kind.code}`" in section("api.md", "Errors")
    if kind.__name__ not in ONLY_OF_OURS:
        assert f"`{kind.__name__}`" in section("client.md", "What can go wrong")
