"""Prompts of whole conversations for each family's template, compared with reviewed files.

After a change, `python -m tests.prompt.test_known_templates` rewrites the files.
"""

import pytest

from dragoman.formats import detect_format
from dragoman.prompt import Prompt
from tests.prompt.families import CASES, CONVERSATION, FOLDER, WORKING, made, source


def golden(prompt: Prompt) -> str:
    ends = " inside a thought" if prompt.opener else ""
    return f"{prompt.text}\n===== the prompt ends here{ends}\n"


def render(name: str) -> str:
    template = made(name)
    return golden(template.render(CONVERSATION)) + golden(template.render(WORKING))


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"chatml"}))
def test_format_is_detected_from_template(name: str) -> None:
    assert detect_format(source(name)) == CASES[name].format


@pytest.mark.parametrize("name", CASES)
def test_prompt(name: str) -> None:
    assert render(name) == (FOLDER / f"{name}.txt").read_text("utf-8")


if __name__ == "__main__":
    for each in CASES:
        (FOLDER / f"{each}.txt").write_text(render(each), "utf-8")
