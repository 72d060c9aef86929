"""`dragoman replay`: recorded requests are sent again, and made into a script that answers them in the same way."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from dragoman.cli import main
from dragoman.config.loading import Flags, load_settings
from tests.server.test_recorded import HERMES, RESPONSES, names, replayed
from tests.support.requests import CHAT, COMPLETIONS, ask, talking
from tests.support.server_process import Running, Serving

POSTED = [*names("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/embeddings"), *RESPONSES]
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
MESSAGES_TOOL = {"name": "get_weather", "input_schema": {"type": "object"}}
RESPONSES_TOOL = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Köln", "days": [1, 2.5]}}</tool_call>'
OUTPUTS = {
    "plain": "It is sunny.",
    "thinking": "<think>Hm, 21 °C.</think>It is sunny.",
    "calls": f"<think>I need two.</think>Let me see.\n{CALL}\n{CALL.replace('Köln', 'Bonn')}",
    "only a call": CALL,
    "blank lines": "  One.\n\n\tTwo: 'yes', \"no\"; {a: 1} # \\d\n",
    "markers": "Write <think> or ```json\n{}\n``` & 😀 \x7f\u2028.",
    "empty": "",
    "numbers": "yes\n1e3\n- 5\nnull",
}


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory, serving: Serving) -> Iterator[tuple[Running, Path]]:
    folder = tmp_path_factory.mktemp("recording")
    replies = [{"match": f"^{name}$", "output": output} for name, output in OUTPUTS.items()]
    said = {"engine": "scripted", "format": "hermes", "replies": replies}
    config = {
        "models": {"hermes": HERMES, "said": said},
        "aliases": {"*": "hermes"},
    }
    file = folder / "recording.jsonl"
    with serving(folder, config, "--record", str(file)) as running:
        with talking(running) as client:
            send_all(client)
        # A replay to this server is recorded too.
        copy = file.rename(folder / "copy.jsonl")
        yield running, copy


def send_all(client: httpx.Client) -> None:
    for name in POSTED:
        replayed(client, name)
    for said in OUTPUTS:
        for stream in (False, True):
            fields = {"model": "said", "stream": stream, "messages": [{"role": "user", "content": said}]}
            ask(client, CHAT, **fields, tools=[TOOL])
            ask(client, CHAT, **fields, tools=[TOOL], max_tokens=7)
            ask(client, "/v1/messages", **fields, max_tokens=50, tools=[MESSAGES_TOOL])
            ask(client, "/v1/messages", **fields, max_tokens=50, stop_sequences=["sunny"])
            ask(client, "/v1/responses", model="said", stream=stream, input=said, tools=[RESPONSES_TOOL])
            ask(client, COMPLETIONS, model="said", stream=stream, prompt=[said, "other"], n=2, echo=True)


def replay(running: Running, file: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> Any:
    """The exit code and the report of a replay; of requests without differences, only the verdicts."""
    capsys.readouterr()
    code = main(["replay", str(file), "--url", running.url, "--json", *flags])
    return code, json.loads(capsys.readouterr().out)


def differing(report: dict[str, Any]) -> list[Any]:
    entries = report["exchanges"]
    return [(at["path"], at["comparison"]) for at in entries if at["comparison"]["verdict"] != "same"]


def test_same_server_gives_the_same_replies(
    recording: tuple[Running, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = replay(*recording, capsys, "--exact", "--concurrency", "4")
    assert differing(report) == []
    assert (code, report["summary"]) == (0, {"same": len(report["exchanges"]), "skipped": 0})


def test_script_gives_the_same_replies(
    recording: tuple[Running, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], serving: Serving
) -> None:
    _, file = recording
    script = tmp_path / "script.yaml"
    assert main(["replay", str(file), "--to-script", str(script)]) == 0
    config = yaml.safe_load(script.read_text())
    with serving(tmp_path, config) as served:
        _, report = replay(served, file, capsys, "--exact")
    generated = [entry for entry in report["exchanges"] if entry["recorded"]["choices"]]
    assert len(generated) > 200
    assert {entry["path"] for entry in generated} == {CHAT, COMPLETIONS, "/v1/messages", "/v1/responses"}
    assert differing({"exchanges": generated}) == []
    # The script has the texts exactly as the configuration reads them, and the file is private.
    assert [spec.options["replies"] for spec in load_settings(str(script), Flags(), {}).models] == [
        model["replies"] for model in config["models"].values()
    ]
    assert script.stat().st_mode & 0o777 == 0o600
