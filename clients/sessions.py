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
from pathlib import Path
from typing import NamedTuple

from clients import packages
from clients.client import KEY, URL, Client, Outcome, Reply, launch, tool_call
from clients.rehearsal import Server
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

BY_AGENT = "CRITICAL: Respond with TEXT ONLY|CONTEXT CHECKPOINT COMPACTION"
"""In what Claude Code and Codex ask the model for a summary with."""
BY_SERVER = "Now write (the|one) summary"
COMMANDS = {
    "read": "cat note.txt",
    "step": "echo step >> steps.txt; echo STEP DONE; seq 1 5000 | tr '\\n' ' '",
}


class Session(NamedTuple):
    client: Client
    """Its command is that of every turn, without a prompt."""
    first: Callable[[str], Sequence[str]]
    """The arguments of the first turn, from an id."""
    resume: Callable[[str], Sequence[str]]
    """The arguments of the next turns."""
    find_id: Callable[[Run], str] | None = None
    """Where a session that chooses its own id shows it."""


def sessions() -> Iterator[Session]:
    yield claude_code()
    yield codex("codex-session", launch("codex", "for-codex-session"), BY_AGENT, {})
    # The built-in provider uses a WebSocket, and lets the server shorten the conversation.
    built_in = ("codex", "--config", f'openai_base_url="{URL}/v1"', "--model", "for-codex-built-in-session")
    window = ("--config", f"model_context_window={CONTEXT}")
    yield codex("codex-built-in-session", (*built_in, *window), BY_SERVER, {"CODEX_API_KEY": KEY})


def claude_code() -> Session:
    model = "for-claude-code-session"
    command = launch("claude", model, "--print", "--allowedTools", "Bash")
    replies = remember("Bash", "command", BY_AGENT)
    package = "@anthropic-ai/claude-code"
    return Session(
        Client("claude-code-session", package, "messages", model, command, replies, context=CONTEXT),
        first=lambda name: ("--session-id", name),
        resume=lambda name: ("--resume", name),
    )


def codex(name: str, command: Sequence[str], compaction: str, environment: Mapping[str, str]) -> Session:
    arguments = (
        *("exec", "--skip-git-repo-check", "--sandbox", "danger-full-access"),
        *("--config", "model_auto_compact_token_limit=9000"),
    )
    return Session(
        Client(
            name=name,
            package="@openai/codex",
            api="responses",
            model=f"for-{name}",
            command=(*command, *arguments),
            replies=remember("exec_command", "cmd", compaction),
            environment=environment,
            uses_websocket=compaction == BY_SERVER,
            context=CONTEXT,
        ),
        first=lambda name: (),
        resume=lambda name: ("resume", name),
        find_id=lambda run: re.findall(r"session id: (\S+)", run.errors)[0],
    )


def remember(tool: str, argument: str, compaction: str) -> list[Reply]:
    """The script of a model that remembers what it sees, and nothing else."""
    calls = {name: tool_call(tool, {argument: command}) for name, command in COMMANDS.items()}
    first, second, third = (f"{ordinal} summary: {FACT}" for ordinal in ("first", "second", "third"))
    summaries = {third: third, second: third, first: second, FACT: first}
    return [
        *(
            {"match": compaction, "seen": seen, "output": f"<summary>\nThe {written}\n</summary>"}
            for seen, written in summaries.items()
        ),
        {"match": compaction, "output": "<summary>\nNothing is known.\n</summary>"},
        {"match": re.escape(LAST), "seen": third, "output": ANSWER},
        {"match": re.escape(LAST), "output": "I have not seen three summaries that contain it."},
        {"match": re.escape(CANCELLED), "delay": 2 * CANCEL_SECONDS, "output": "Too late."},
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
    command, name, before = session.client.command, str(uuid.uuid4()), len(server.answers())
    run = home.run([*command, *session.first(name), FIRST])
    if problem := find_bad_end(run):
        return f"first turn: {problem}", run
    resume = (*command, *session.resume(name if session.find_id is None else session.find_id(run)))
    for number in range(1, STEPS + 1):
        run = home.run([*resume, STEP])
        if problem := find_bad_end(run):
            return f"step {number}: {problem}", run
    run = _cancel(home, [*resume, CANCELLED], session.client.model, server)
    if run.status is None:
        return "SIGINT did not end it", run
    if not _wait_until(lambda: server.answers()[-1][0] == 499 and not server.is_busy(session.client.model)):
        return "the server did not cancel the request", run
    run = home.run([*resume, LAST])
    if problem := find_bad_end(run):
        return f"last turn: {problem}", run
    if ANSWER not in run.output:
        return "the fact was lost", run
    steps = home.work / "steps.txt"
    if not steps.exists() or len(steps.read_text().split()) < STEPS // 2:
        return "the tool did not run in most steps", run
    return find_refusals(session.client, server.answers()[before:]), run


def _cancel(home: Home, command: Sequence[str], model: str, server: Server) -> Run:
    """Send SIGINT while the server works on the request of a turn."""
    process = home.start(command)
    _wait_until(lambda: _is_computing(model, server))
    process.send_signal(signal.SIGINT)
    return finish(process, CANCEL_SECONDS)


def _is_computing(model: str, server: Server) -> bool:
    """Whether the server works on a request for longer than on those before it, such as a warm-up."""
    before = server.answers()
    if not server.is_busy(model):
        return False
    time.sleep(1)
    return server.is_busy(model) and server.answers() == before


def _wait_until(is_true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + CANCEL_SECONDS
    while not is_true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
