"""Sample requests of coding agents, with the size and structure of recorded ones. `dragoman probe` sends them.

    samples/NAME.json := {"version", "first_request_length", "request"}

`request` is the body of the second request of a session: the model has called a tool, and gets its result. The first
request has only the first `first_request_length` messages or items, and is otherwise the same. Prompt texts are those
of the agents' vendors, so they are not in the files:

    text := literal | [literal " "] "~" N     N characters: the literal, filled up with instructions that fit any agent
"""

import re
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

import msgspec

from dragoman.agents.table import Agent
from dragoman.core.request import GenerationRequest
from dragoman.protocols.registry import PROTOCOLS
from dragoman.protocols.responses import server as responses

FILLED = re.compile(r"(?P<literal>.*?) ?~(?P<length>\d+)", re.DOTALL)
FILLER = (
    "Read the code before you change it. Prefer small changes that fit the style of the file. Say what you did and "
    "what you left alone. When a command fails, read its output before you try again. Keep answers short, and name the "
    "files that you changed. Ask a question if a request can mean two things. Do not change files that have nothing to "
    "do with the request. Run the tests that concern a change, and report their result as it is. "
)


class AgentRequests(msgspec.Struct, frozen=True):
    """Two consecutive requests of an agent. `version` is that of the agent."""

    version: str
    first: GenerationRequest
    second: GenerationRequest


class SampleFile(msgspec.Struct, frozen=True):
    version: str
    first_request_length: int
    request: dict[str, Any]


def has_sample_requests(agent: Agent) -> bool:
    return _file(agent).is_file()


def read_sample_requests(agent: Agent) -> AgentRequests:
    file = msgspec.json.decode(_file(agent).read_bytes(), type=SampleFile)
    body = {"model": agent.name, **_fill(file.request)}
    field = "input" if agent.protocol == "responses" else "messages"
    first = body | {field: body[field][: file.first_request_length]}
    return AgentRequests(file.version, _decode(agent, first), _decode(agent, body))


def _file(agent: Agent) -> Traversable:
    return files("dragoman.agents") / "samples" / f"{agent.name}.json"


def _decode(agent: Agent, body: dict[str, Any]) -> GenerationRequest:
    encoded = msgspec.json.encode(body)
    if agent.protocol == "responses":
        return responses.decode(responses.parse(encoded)).request
    return PROTOCOLS[agent.protocol].decode(encoded)


def _fill(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _fill(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_fill(entry) for entry in value]
    filled = FILLED.fullmatch(value) if isinstance(value, str) else None
    if filled is None:
        return value
    length, literal = int(filled["length"]), filled["literal"]
    text = f"{literal} {FILLER * (length // len(FILLER) + 1)}" if literal else FILLER * (length // len(FILLER) + 1)
    return text[:length]
