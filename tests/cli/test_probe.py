"""`dragoman probe`, with scripted models that play well or badly, templates that lose something, and SmolLM2."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dragoman.agents.sample_requests import read_sample_requests
from dragoman.agents.table import AGENTS
from tests.cli.test_cli import environment, refused
from tests.support.server_process import Running, serving

RECORDED = ("claude", "codex", "opencode")
FILE_TOOL = {"claude": ("Read", "file_path"), "codex": ("exec_command", "cmd"), "opencode": ("read", "filePath")}
CONTEXT = 131_072
ENGINE = '''
"""An engine that shows its prompts, with a template that has the faults in the name of the model."""
import os
from datetime import datetime
from dragoman import Engine, ModelInfo
from dragoman.core.engine import RenderedPrompt

class Template(Engine):
    def models(self):
        names = ("good", "no-tools", "no-system", "no-parallel", "no-thinking", "turns", "dated")
        return [ModelInfo(name, context=200_000, format="hermes") for name in names]

    def supports(self):
        return super().supports() | {"tools", "thinking"}

    def generate(self, request):
        yield "" if request.thinking.is_off else "<think>Hm.</think>"
        yield "Yes."

    def count_tokens(self, request):
        return len(self.render(request).tokens)

    def render(self, request):
        fault = request.model
        last_user = max(at for at, message in enumerate(request.messages) if message.role == "user")
        lines = [datetime.now().strftime("Today is %d %B %Y.")] if fault == "dated" else []
        lines += [] if fault == "no-tools" else [f"tool {tool.name}" for tool in request.tools]
        for at, message in enumerate(request.messages):
            if fault == "no-system" and message.role == "system" and at > 0:
                continue
            drops_thinking = fault == "no-thinking" or (fault == "turns" and at < last_user)
            thinking = "" if drops_thinking else message.reasoning
            calls = message.tool_calls[: 1 if fault == "no-parallel" else None]
            lines.append(f"<{message.role}>{thinking}{message.text}{[(call.name, call.arguments) for call in calls]}")
        text = "\\n".join([*lines, "<assistant>"])
        return RenderedPrompt(text, tuple(text.encode()), "hermes")
'''


def call(name: str, **arguments: Any) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


def script(agent: str, **changed: str) -> dict[str, Any]:
    """A model that plays well, except for what is changed."""
    tool, argument = FILE_TOOL[agent]
    outputs = {
        "after": ("README.md", "<think>There.</think>" + call("read_file", path="notes.txt")),
        "single": ("src/main.py", "<think>Look.</think>" + call("read_file", path="src/main.py")),
        "parallel": ("src/a.py", call("read_file", path="src/a.py") + "\n" + call("read_file", path="src/b.py")),
        "sum": ("17 \\+ 25", "<think>Easy.</think>42"),
        "answer": ("access code is", "<think>There it is.</think>The code is 7351-KILO."),
        "task": ("access code", "<think>Read it.</think>" + call(tool, **{argument: "notes.txt"})),
    }
    assert set(changed) <= set(outputs)
    replies = [{"match": match, "output": changed.get(name, output)} for name, (match, output) in outputs.items()]
    return {"engine": "scripted", "format": "hermes", "context": CONTEXT, "replies": replies}


BAD = {
    "silent": (script("claude", single="I would read it."), "does not work", "tool call", "failed", "no tool call"),
    "stranger": (
        script("claude", single=call("open_file", path="x")),
        *("does not work", "tool call", "failed", "called 'open_file', which is not a tool"),
    ),
    "loose": (
        script("claude", after=call("read_file", path="notes.txt", max_lines="all")),
        *("does not work", "call after a result", "failed", "does not fit the schema: 'all' is not of type 'integer'"),
    ),
    "serial": (
        script("claude", parallel=call("read_file", path="src/a.py")),
        *("works with limits", "parallel calls", "limited", "one call in a reply where two were needed"),
    ),
    "broken": (
        script("claude", single='<tool_call>\n{"name": "read_file", "arguments": {"path": \n</tool_call>'),
        *("does not work", "tool call", "failed", ""),
    ),
    "leaking": (
        script("claude", sum="<tool_call>42</tool_call>"),
        *("works with limits", "thinking", "limited", "<tool_call> is in the text"),
    ),
    "guessing": (
        script("claude", task="The code is 0000."),
        *("does not work", "task", "failed", "round 1: answered 'The code is 0000.' instead of 7351-KILO"),
    ),
    "endless": (
        script("claude", answer=call("Read", file_path="notes.txt")),
        *("does not work", "task", "failed", "no answer after 6 rounds of tool calls"),
    ),
    "plain": ({"engine": "scripted", "context": CONTEXT}, "does not work", "tool syntax", "failed", "plain: "),
    "narrow": (
        script("claude") | {"context": 3000},
        *("does not work", "context", "failed", "the context of 3,000 is too small: set `context`"),
    ),
    "tight": (
        script("claude") | {"context": 30_000},
        *("works with limits", "context", "limited", "65,536 or more is better"),
    ),
    "hanging": (
        script("claude") | {"hang_after": 0},
        *("does not work", "tool call", "failed", "not finished within 1 s"),
    ),
    "crashing": (script("claude") | {"crash_after": 1}, "does not work", "task", "failed", ""),
}
"""Models, and for each the verdict and one result."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    models = {f"good-{agent}": script(agent) for agent in RECORDED} | {name: BAD[name][0] for name in BAD}
    folder = tmp_path_factory.mktemp("probe")
    with serving(folder, {"models": models, "api_keys": ["probe-key"]}, workers=2) as running:
        yield running


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("templates")
    (folder / "probe_template.py").write_text(ENGINE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=":")
        with serving(folder, {}, "--engine", "probe_template:Template") as running:
            yield running


def probe(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "dragoman", "probe", *arguments],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=200,
    )


def probe_json(folder: Path, *arguments: str) -> tuple[int, str, dict[str, tuple[str, str]]]:
    """The exit code, the verdict, and the results with their details."""
    done = probe(folder, *arguments, "--json")
    assert "Traceback" not in done.stderr
    report = json.loads(done.stdout)
    results = {entry["check"]: (entry["result"], entry["detail"]) for entry in report["checks"]}
    return done.returncode, report["verdict"], results


@pytest.mark.parametrize("agent", RECORDED)
def test_model_that_plays_well_works(tmp_path: Path, server: Running, agent: str) -> None:
    arguments = (f"good-{agent}", "--agent", agent, "--url", server.url, "--api-key", "probe-key")
    done = probe(tmp_path, *arguments)
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    assert lines[-1] == f"good-{agent} works with {AGENTS[agent].title}"
    results = {line[:25].strip(): line[25:].split()[0] for line in lines[:-1]}
    assert set(results.values()) == {"ok", "skipped"}
    assert results["task"] == results["tool call"] == results["context"] == "ok"
    assert results["prefix: next step"] == "skipped"


@pytest.mark.parametrize("name", BAD)
def test_fault_of_a_model_is_reported(tmp_path: Path, server: Running, name: str) -> None:
    _, verdict, check, result, detail = BAD[name]
    limit = "1" if name == "hanging" else "60"
    arguments = (name, "--url", server.url, "--api-key", "probe-key", "--timeout", limit)
    code, found, results = probe_json(tmp_path, *arguments)
    assert (code, found) == (verdict == "does not work", verdict)
    assert results[check][0] == result
    assert detail in results[check][1]


@pytest.mark.parametrize(
    ("name", "check", "result", "detail"),
    [
        ("no-tools", "template: tools", "failed", "leaves out tools: read_file is not in the prompt"),
        ("no-system", "template: system messages", "limited", "leaves out system messages in mid-conversation"),
        ("no-parallel", "template: parallel calls", "limited", "leaves out parallel calls: probe-2.txt"),
        ("no-thinking", "template: thinking", "limited", "leaves out thinking between tool calls"),
        ("turns", "prefix: next turn", "limited", "then 'thinking...["),
        ("dated", "prefix: next step", "ok", "the template writes today's date"),
    ],
)
def test_fault_of_a_template_is_reported(
    tmp_path: Path, templates: Running, name: str, check: str, result: str, detail: str
) -> None:
    """All other checks of the prompt are as with a template without faults."""
    names = (
        *("tools", "system messages", "parallel calls", "thinking"),
        *("next step", "next turn"),
    )
    checks = {f"{'prefix' if 'next' in entry else 'template'}: {entry}" for entry in names}
    results = probe_json(tmp_path, name, "--url", templates.url)[2]
    assert results[check][0] == result
    assert detail in results[check][1]
    assert {results[other][0] for other in checks - {check}} == {"ok"}


def test_repeated_tokens_are_counted(tmp_path: Path, templates: Running) -> None:
    results = probe_json(tmp_path, "turns", "--url", templates.url)[2]
    step, turn = results["prefix: next step"][1], results["prefix: next turn"][1]
    repeated, _, total, *_ = step.split()
    assert 0 <= int(total.replace(",", "")) - int(repeated.replace(",", "")) < 16
    repeated, _, total, *_ = turn.split()
    assert int(repeated.replace(",", "")) < int(total.replace(",", "")) - 16


@pytest.mark.parametrize("agent", RECORDED)
def test_sample_requests_have_the_size_of_real_requests(agent: str) -> None:
    """Agents send 30 to 116 KB."""
    requests = read_sample_requests(AGENTS[agent])
    second = requests.second
    size = sum(len(message.text) for message in second.messages)
    size += sum(len(tool.description) + len(json.dumps(tool.parameters)) for tool in second.tools)
    assert 25_000 < size < 116_000
    assert second.messages[: len(requests.first.messages)] == requests.first.messages
    assert second.tools == requests.first.tools
    assert [message.role for message in second.messages[-2:]] == ["assistant", "tool"]
    assert FILE_TOOL[agent][0] in [tool.name for tool in second.tools]


def test_smollm2_cannot_drive_an_agent(tmp_path: Path, smollm2_path: Path) -> None:
    """The server is started for the probe, and the real prompt is too long for this context."""
    config = {"models": {"smollm2": {"source": str(smollm2_path), "context": 2048, "layout": "as-is"}}}
    (tmp_path / "dragoman.yaml").write_text(json.dumps(config | {"port": 1, "models_dir": [], "api_keys": ["k"]}))
    code, verdict, results = probe_json(tmp_path, "--agent", "opencode", "--timeout", "60")
    assert (code, verdict) == (1, "does not work")
    assert results["context"][0] == "failed"
    assert results["tool syntax"] == ("ok", "hermes")
    assert results["template: tools"][0] == "ok"
    assert results["prefix: next step"][0] == "ok"
    assert results["task"] == ("skipped", "the prompt does not fit into the context")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plain", "--url", "{url}", "--timeout", "0"], "--timeout 0: expected more than 0 seconds"),
        (["plain", "--agent", "aider"], "argument --agent: invalid choice: 'aider'"),
        (["none", "--url", "{url}", "--api-key", "probe-key"], "model 'none' is not served here"),
    ],
)
def test_user_errors(tmp_path: Path, server: Running, arguments: list[str], words: str) -> None:
    given = [argument.replace("{url}", server.url) for argument in arguments]
    assert words in refused(probe(tmp_path, *given))
