"""Long sessions: does an agent still know a fact of its first turn after three compactions?

    first turn    the tool prints the fact
    steps         the tool prints so much that the agent shortens the conversation
    cancelled     SIGINT while the server computes a reply
    last turn     the session is resumed by its id, and the agent is asked for the fact

The model copies the fact into a summary only if it sees it, and counts: a second summary needs a first one in the
conversation. It knows the answer only if it sees the third.
"""

import re
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from clients import packages
from clients.client import KEY, URL, Client, Outcome, Reply, launch, tool_call
from clients.rehearsal import SLOW, Server
from clients.trial import Home, Run, find_bad_end, find_refusals, finish, show_failure

FACT = "ORCHID-7351"
NOTE = f"The launch code is {FACT}."
FIRST = "Read the file note.txt, and remember the launch code."
STEP = "Take a step."
CANCELLED = "Think about it for a long time."
LAST = "What is the launch code?"
ANSWER = f"The launch code is still {FACT}."
STEPS = 6
CONTEXT = 30_000
CANCEL_SECONDS = 30

COMPACTION = "CRITICAL: Respond with TEXT ONLY|CONTEXT CHECKPOINT COMPACTION|Now write (the|one) summary"
"""In what Claude Code, Codex and Dragoman itself ask for a summary with."""
COMMANDS = {
    "read": "cat note.txt",
    "step": "echo step >> steps.txt; echo STEP DONE; seq 1 5000 | tr '\\n' ' '",
}


class Session(NamedTuple):
    client: Client
    command: Callable[[str, Sequence[str]], Sequence[str]]
    """From a model and the arguments of a turn."""
    first: Callable[[str], Sequence[str]]
    """The arguments of the first turn that come before its prompt, from an id."""
    resume: Callable[[str], Sequence[str]]
    """Those of the next turns."""
    find_id: Callable[[Run], str] | None = None
    """Where a session that chooses its own id shows it."""


def sessions() -> Iterator[Session]:
    yield claude_code()
    yield codex("codex-session", partial(launch, "codex"))
    # The built-in provider uses a WebSocket, and lets the server shorten the conversation.
    flags = ("codex", "--config", f'openai_base_url="{URL}/v1"', "--config", f"model_context_window={CONTEXT}")
    yield codex(
        "codex-built-in-session",
        lambda model, *arguments: (*flags, "--model", model, *arguments),
        {"CODEX_API_KEY": KEY},
    )


def claude_code() -> Session:
    model, replies = "for-claude-session", remember("Bash", "command")
    command = partial(launch, "claude")
    arguments = ("--print", "--allowedTools", "Bash")
    return Session(
        Client("claude-code-session", "@anthropic-ai/claude-code", "messages", model, (), replies, context=CONTEXT),
        lambda model, turn: command(model, *arguments, *turn),
        first=lambda name: ("--session-id", name),
        resume=lambda name: ("--resume", name),
    )


def codex(name: str, command: Callable[..., Sequence[str]], environment: Mapping[str, str] = {}) -> Session:
    model, replies = "for-codex-session", remember("exec_command", "cmd")
    arguments = (
        *("exec", "--skip-git-repo-check", "--sandbox", "danger-full-access"),
        *("--config", "model_auto_compact_token_limit=9000"),
    )
    return Session(
        Client(name, "@openai/codex", "responses", model, (), replies, environment, context=CONTEXT),
        lambda model, turn: command(model, *arguments, *turn),
        first=lambda name: (),
        resume=lambda name: ("resume", name),
        find_id=lambda run: re.findall(r"session id: (\S+)", run.errors)[0],
    )


def remember(tool: str, argument: str) -> list[Reply]:
    """The script of a model that remembers what it sees, and nothing else."""
    calls = {name: tool_call(tool, {argument: command}) for name, command in COMMANDS.items()}
    ordinals = ("first", "second", "third")
    summaries = [f"{ordinal} summary: {FACT}" for ordinal in ordinals]
    seen = (summaries[2], summaries[1], summaries[0], FACT)
    written = (summaries[2], summaries[2], summaries[1], summaries[0])
    return [
        *(
            {"match": COMPACTION, "seen": before, "output": f"<summary>\nThe {after}\n</summary>"}
            for before, after in zip(seen, written, strict=True)
        ),
        {"match": COMPACTION, "output": "<summary>\nNothing is known.\n</summary>"},
        {"match": re.escape(LAST), "seen": summaries[2], "output": ANSWER},
        {"match": re.escape(LAST), "output": "I have not seen three summaries that contain it."},
        {"match": "STEP DONE|[a-z]+ summary: ", "output": "The step is done."},
        {"match": re.escape(NOTE), "output": "I remember it."},
        {"match": re.escape(FIRST), "output": calls["read"]},
        {"match": re.escape(STEP), "output": calls["step"]},
    ]


def hold(session: Session, server: Server) -> Outcome:
    client = session.client
    before, begun = len(server.answers()), time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        home = Home(Path(folder), client, server.url)
        (home.work / "note.txt").write_text(f"{NOTE}\n")
        problem, run = _take_turns(session, home, server)
    answers = server.answers()[before:]
    if problem:
        show_failure(client.name, problem, run, server, answers)
    version, seconds = packages.version(client.package), time.monotonic() - begun
    return Outcome(client, version, len(answers), seconds, problem)


def _take_turns(session: Session, home: Home, server: Server) -> tuple[str, Run]:
    """The problem, if there is one, and the last run."""
    name, model, before = str(uuid.uuid4()), session.client.model, len(server.answers())
    run = home.run(session.command(model, (*session.first(name), FIRST)))
    if problem := find_bad_end(run):
        return f"first turn: {problem}", run
    name = name if session.find_id is None else session.find_id(run)
    for number in range(1, STEPS + 1):
        run = home.run(session.command(model, (*session.resume(name), STEP)))
        if problem := find_bad_end(run):
            return f"step {number}: {problem}", run
    run = _cancel(session, home, server, name)
    if run.status is None:
        return "SIGINT did not end it", run
    if not _wait_until(lambda: server.answers()[-1][0] == 499 and not server.is_busy(SLOW)):
        return "the server did not cancel the request", run
    run = home.run(session.command(model, (*session.resume(name), LAST)))
    if problem := find_bad_end(run):
        return f"last turn: {problem}", run
    if ANSWER not in run.output:
        return "the fact was lost", run
    taken = (home.work / "steps.txt").read_text().split() if (home.work / "steps.txt").exists() else []
    if len(taken) < STEPS // 2:
        return f"the tool ran only in {len(taken)} steps", run
    return find_refusals(server.answers()[before:]), run


def _cancel(session: Session, home: Home, server: Server, name: str) -> Run:
    """Send SIGINT while the server works on the request of a turn."""
    process = home.start(session.command(SLOW, (*session.resume(name), CANCELLED)))
    _wait_until(lambda: server.is_busy(SLOW))
    process.send_signal(signal.SIGINT)
    return finish(process, CANCEL_SECONDS)


def _wait_until(is_true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + CANCEL_SECONDS
    while not is_true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
