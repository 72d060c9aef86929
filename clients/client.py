"""A client and what becomes of it: the values that the declarations and the mechanism share.

    task     := "write the proof and tell me what you wrote"
    client   calls its tool -> proof.txt has PROOF -> the model sees what the tool printed -> the client prints ANSWER

The command of the tool puts PROOF together, so the model sees it only if the tool ran.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

URL = "http://127.0.0.1:8000"
"""Stands for the address of the server in commands, variables and files, as a person would write it."""
KEY = "client-test-key"
PROMPT = "Write the proof and tell me what you wrote."
PROOF = "proof-4711"
ANSWER = f"The tool wrote {PROOF}."
COMMAND = "printf proof-%d 4711 | tee proof.txt"
DRAGOMAN = ("env", f"PYTHONPATH={Path(__file__).parents[1] / 'src'}", sys.executable, "-m", "dragoman")

Reply = Mapping[str, Any]
"""An entry of `replies` of the scripted engine."""


class Client(NamedTuple):
    name: str
    package: str
    """In npm, or in PyPI if clients/python has a lock file of this name."""
    api: str
    model: str
    command: Sequence[str]
    replies: Sequence[Reply]
    environment: Mapping[str, str] = {}
    files: Mapping[str, str] = {}
    """Where in its home a file of clients/settings belongs."""
    answers: int = 1
    """How often the answer is printed: programs ask twice, collected and streamed."""
    refused: frozenset[int] = frozenset()
    """Statuses that it is known to go on from."""
    uses_websocket: bool = False
    context: int = 200_000
    """Of its model."""


class Outcome(NamedTuple):
    client: Client
    version: str
    requests: int
    seconds: float
    problem: str
    """Empty if it has passed."""


def launch(agent: str, model: str, *arguments: str) -> Sequence[str]:
    """The command that starts an agent with the settings of `dragoman launch`."""
    return (*DRAGOMAN, "launch", agent, "--url", URL, "--api-key", KEY, "--model", model, "--", *arguments)


def script(tool: str, arguments: Mapping[str, Any]) -> list[Reply]:
    """The replies of a model that calls one tool, and answers when it has seen what that printed."""
    return [answer(), call(tool, arguments)]


def answer(then: str = "") -> Reply:
    return {"match": PROOF, "output": f"<think>It was written.</think>{ANSWER}{then}"}


def call(tool: str, arguments: Mapping[str, Any]) -> Reply:
    return {"output": f"<think>I need the tool.</think>I will write it.{tool_call(tool, arguments)}"}


def tool_call(tool: str, arguments: Mapping[str, Any]) -> str:
    """A call in the syntax of Hermes."""
    encoded = json.dumps({"name": tool, "arguments": arguments})
    return f"\n<tool_call>\n{encoded}\n</tool_call>"
