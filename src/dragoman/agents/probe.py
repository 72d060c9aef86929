"""Finds out whether a model can drive an agent: runs checks and gives a verdict.

Rules
1. Each check has a time limit. A check that fails does not end the others.
2. A check is required, or its failure only limits the agent. What the engine cannot show is skipped.
3. The verdict is `does not work` if a required check fails, `works with limits` if another one does.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import msgspec

from dragoman.agents.sample_requests import AgentRequests, read_sample_requests
from dragoman.agents.setup import Endpoint
from dragoman.agents.table import Agent
from dragoman.client.sync_client import Client
from dragoman.core.errors import AnswerTimeout, DragomanError, EngineTimeout
from dragoman.core.reply import Reply
from dragoman.core.request import Message, Tool

Result = Literal["ok", "limited", "failed", "skipped"]
Verdict = Literal["works", "works with limits", "does not work"]
TIMEOUT_HEADER = "X-Dragoman-Timeout"
"""The server ends the generation too."""


class CheckResult(msgspec.Struct, frozen=True):
    check: str
    result: Result
    detail: str


class CheckFailed(Exception):
    """With `is_limit`, the failure of a required check only limits the agent."""

    def __init__(self, detail: str, *, is_limit: bool = False) -> None:
        super().__init__(detail)
        self.detail = detail
        self.is_limit = is_limit


class CheckSkipped(Exception):
    pass


class Probe:
    """The model and the agent that the checks are about. `limit` is the time of a check in seconds."""

    def __init__(self, agent: Agent, endpoint: Endpoint, limit: float) -> None:
        self.agent = agent
        self.endpoint = endpoint
        self.requests: AgentRequests = read_sample_requests(agent)
        self.fits = True
        """Whether the prompt of the agent fits into the context."""
        self.thinks = False
        """Whether a reply has shown thinking."""
        self.limit = limit
        self._deadline = 0.0

    def start_check(self) -> None:
        self._deadline = time.monotonic() + self.limit

    def client(self) -> Client:
        """A client for the rest of the time. Chat completions keep all that the other protocols can express."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise AnswerTimeout("the time is over")
        return Client(
            self.endpoint.root_url,
            api_key=self.endpoint.key,
            model=self.endpoint.model,
            protocol="chat",
            timeout=left,
            headers={TIMEOUT_HEADER: f"{left:.3f}"},
        )

    def ask(self, messages: Sequence[Message], tools: Sequence[Tool] = (), **options: Any) -> Reply:
        """Stream a reply, as agents do, and return it."""
        with self.client() as client, client.stream(messages, tools=tools, **options) as events:
            for _ in events:
                pass
            return events.reply()


class Check(msgspec.Struct, frozen=True):
    """`run` returns a detail, or raises `CheckFailed` or `CheckSkipped`."""

    name: str
    run: Callable[[Probe], str]
    is_required: bool = True


def run_checks(probe: Probe, checks: Sequence[Check]) -> Iterator[CheckResult]:
    for check in checks:
        probe.start_check()
        failure: Result = "failed" if check.is_required else "limited"
        try:
            yield CheckResult(check.name, "ok", check.run(probe))
        except CheckSkipped as skipped:
            yield CheckResult(check.name, "skipped", str(skipped))
        except CheckFailed as failed:
            yield CheckResult(check.name, "limited" if failed.is_limit else failure, failed.detail)
        except (AnswerTimeout, EngineTimeout):
            yield CheckResult(check.name, failure, f"not finished within {probe.limit:g} s")
        except DragomanError as error:
            yield CheckResult(check.name, failure, error.message)


def find_verdict(results: Sequence[CheckResult]) -> Verdict:
    found = {entry.result for entry in results}
    if "failed" in found:
        return "does not work"
    return "works with limits" if "limited" in found else "works"
