"""The settings of an agent for one server and one model, and their form as a shell script."""

import json
import shlex
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from dragoman.agents.table import Agent

NO_KEY = "none"
"""Sent to a server without keys: agents want one."""
MAX_OUTPUT = 32_000
SCRIPT_DIRECTORY = "$dir"


class Endpoint(msgspec.Struct, frozen=True):
    """A model of a running server. `root_url` has no /v1, `api_url` has it."""

    root_url: str
    api_url: str
    key: str
    model: str
    context: int | None = None
    format: str | None = None

    @property
    def max_output_tokens(self) -> int | None:
        """The tokens of one reply: a quarter of the context, so that the rest can hold the conversation."""
        return None if self.context is None else min(MAX_OUTPUT, self.context // 4)


class AgentSetup(msgspec.Struct, frozen=True):
    environment: Mapping[str, str]
    removed: tuple[str, ...]
    """Variables that the agent must not see."""
    files: Mapping[str, str]
    command: tuple[str, ...]

    def write_files(self, directory: Path) -> None:
        for name, text in self.files.items():
            file = directory / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)

    def apply(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of the agent."""
        return {name: value for name, value in environ.items() if name not in self.removed} | dict(self.environment)


def build_setup(agent: Agent, endpoint: Endpoint, directory: str) -> AgentSetup:
    """Fill in the settings of an agent. `directory` is where its files will be."""
    max_output = endpoint.max_output_tokens
    values = {
        "root_url": endpoint.root_url,
        "api_url": endpoint.api_url,
        "key": endpoint.key,
        "model": endpoint.model,
        "context": endpoint.context,
        "max_output_tokens": max_output,
        "prompt": None if endpoint.context is None or max_output is None else endpoint.context - max_output,
        "dir": directory,
    }
    filled = _fill({name: value for name, value in agent.environment.items() if value is not None}, values)
    arguments = _fill(agent.arguments, values)
    return AgentSetup(
        environment={name: _to_text(value) for name, value in filled.items()},
        removed=tuple(name for name, value in agent.environment.items() if value is None),
        files={name: _file(_fill(content, values)) for name, content in agent.files.items()},
        command=(agent.program, *map(str, arguments)),
    )


def _fill(value: Any, values: Mapping[str, Any]) -> Any:
    """Replace the placeholders in a value. None stands for a text that needs an unknown value."""
    if isinstance(value, str):
        template = string.Template(value)
        names = template.get_identifiers()
        if any(values[name] is None for name in names):
            return None
        is_one = len(names) == 1 and value == f"${names[0]}"
        return values[names[0]] if is_one else template.substitute(values)
    if isinstance(value, Mapping):
        filled = {_fill(name, values): _fill(entry, values) for name, entry in value.items()}
        return {name: entry for name, entry in filled.items() if entry is not None}
    if isinstance(value, list | tuple):
        return [filled for entry in value if (filled := _fill(entry, values)) is not None]
    return value


def _to_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _file(content: Any) -> str:
    parts = content if isinstance(content, list) else [content]
    return "".join(part if isinstance(part, str) else json.dumps(part, indent=2) for part in parts) + "\n"


def format_script(setup: AgentSetup) -> str:
    """Return the settings as a shell script. `setup` was built with `SCRIPT_DIRECTORY`."""
    lines = [f"{SCRIPT_DIRECTORY[1:]}=$(mktemp -d)"] if setup.files else []
    for name, text in setup.files.items():
        folder = str(Path(name).parent)
        lines += [f'mkdir -p "{SCRIPT_DIRECTORY}/{folder}"'] if folder != "." else []
        lines += [f"cat > \"{SCRIPT_DIRECTORY}/{name}\" <<'END'", text.rstrip("\n"), "END"]
    lines += [f"export {name}={_quote(value)}" for name, value in setup.environment.items()]
    lines += [f"unset {' '.join(setup.removed)}"] if setup.removed else []
    lines.append(" \\\n  ".join(_group(setup.command)))
    return "\n".join(lines)


def _group(command: tuple[str, ...]) -> list[str]:
    """Return the words of a command, with the value of an option on the same line."""
    lines: list[str] = []
    for word in command:
        if lines and not word.startswith("-") and len(lines) > 1:
            lines[-1] += f" {_quote(word)}"
        else:
            lines.append(_quote(word))
    return lines if len(lines) > 2 else [" ".join(lines)]


def _quote(word: str) -> str:
    """Quote a word for the shell. The directory stays a variable."""
    before, directory, after = word.partition(SCRIPT_DIRECTORY)
    if not directory:
        return shlex.quote(word)
    return f'{before}"{SCRIPT_DIRECTORY}{after}"'
