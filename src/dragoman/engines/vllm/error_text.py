"""vLLM's errors in one line, for the operator who has to mend something.

Rules
1. What is wrong with an argument is told with its name: `args.NAME` where the operator wrote it there, our own word
   where that set it, otherwise the name of vLLM's section and its field. What the operator wrote comes first.
2. Everything that is wrong is told, and nothing of where to read more about the library that checks.
"""

import re
from collections.abc import Mapping
from typing import Any

from dragoman.engines.vllm.options import OURS, VllmOptions, names

_QUOTED = re.compile(r"Worker failed with error '(.+)', please check")
MOST_CHARACTERS = 60
"""Of a value that is shown."""


def refusal(error: Exception, options: VllmOptions) -> str:
    """What vLLM says to its arguments, or to the model that they name."""
    findings = getattr(error, "errors", None)
    if not callable(findings):
        return " ".join(str(error).split()) or type(error).__name__
    title = str(getattr(error, "title", ""))
    told: dict[str, list[str]] = {}
    shown: dict[str, str] = {}
    for finding in findings():
        place = _place(finding, title, options)
        told.setdefault(place, []).append(str(finding["msg"]).removeprefix("Value error, "))
        shown[place] = f", not {_shown(finding.get('input'))}" if finding["loc"] else ""
    lines = [f"{place}{' or '.join(dict.fromkeys(words))}{shown[place]}" for place, words in told.items()]
    return "; ".join(sorted(lines, key=lambda line: not line.startswith("args.")))


def _place(finding: Mapping[str, Any], title: str, options: VllmOptions) -> str:
    if not finding["loc"]:
        return ""
    field = str(finding["loc"][0])
    if field in names(options.args):
        return f"args.{names(options.args)[field]}: "
    return f"{OURS[field]}: " if field in OURS else f"{title}.{field}: "


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}..."


def last_line(error: Exception) -> str:
    """Of what its workers say, where vLLM puts it between words of its own."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    quoted = _QUOTED.search(lines[-1])
    return quoted[1] if quoted else lines[-1]
