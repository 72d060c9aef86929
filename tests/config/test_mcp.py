"""Settings of MCP servers: mistakes have their line, secrets stay out of messages."""

from pathlib import Path

import pytest

from dragoman.cli import main
from dragoman.config.loading import Flags, load_settings
from dragoman.config.mcp import ToolServerSpec
from dragoman.server.telemetry.recorder import without_secrets

MODEL = "models: {echo: {engine: scripted}}\n"


def checked(tmp_path: Path, text: str, capfd: pytest.CaptureFixture[str]) -> list[str]:
    """The problems of a configuration after its first line, without the name of the file."""
    file = tmp_path / "dragoman.yaml"
    file.write_text(MODEL + text)
    main(["check", "--config", str(file)])
    lines = "".join(capfd.readouterr()).splitlines()
    return [line.partition("dragoman.yaml:")[2] for line in lines if "dragoman.yaml:" in line]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "mcp_servers:\n  a: {command: [sh], url: 'https://x'}",
            "3: mcp_servers.a.command: give either command or url",
        ),
        ("mcp_servers:\n  a: {env: {A: b}}", "3: mcp_servers.a.command: give either command or url"),
        ("mcp_servers:\n  a: {command: sh}", "3: mcp_servers.a.command: expected list"),
        ("mcp_servers:\n  a: {command: [sh], headers: {A: b}}", "3: mcp_servers.a.headers: only with url"),
        ("mcp_servers:\n  a: {url: 'https://x/', env: {A: b}}", "3: mcp_servers.a.env: only with command"),
        ("mcp_servers:\n  a b: {command: [sh]}", "3: mcp_servers.a b: a name may contain only"),
        ("mcp_servers:\n  a: {url: 'https://me:canary@x/'}", "3: mcp_servers.a.url: expected an address"),
        (
            "mcp_servers:\n  a: {url: 'https://x/', headers: {Host: canary}}",
            "3: mcp_servers.a.headers.Host: this header",
        ),
        (
            "mcp_servers:\n  a: {url: 'https://x/', headers: {A: \"canary\\n\"}}",
            "3: mcp_servers.a.headers.A: the value must be printable ASCII",
        ),
        ("mcp_servers:\n  a: {program: sh}", "3: mcp_servers.a.program: unknown key"),
        ("mcp_servers:\n  a: {command: [/nonexistent]}", "3: mcp_servers.a.command: there is no program /nonexistent"),
        (
            "mcp_servers:\n  a: {command: [sh], env: {A: '${NOT_SET}'}}",
            "3: mcp_servers.a: the environment variable NOT_SET is not set",
        ),
        ("mcp:\n  allow: ['https://*', '*']", "3: mcp.allow[1]: '*': expected a pattern"),
        ("mcp:\n  allow_addresses: [10.0.0.0/8, x]", "3: mcp.allow_addresses[1]: 'x': expected an address"),
        ("mcp: {call_seconds: 0}", "2: mcp.call_seconds: expected"),
        ("mcp: {tools: 5000}", "2: mcp.tools: expected"),
    ],
)
def test_mistakes_have_a_line(tmp_path: Path, text: str, problem: str, capfd: pytest.CaptureFixture[str]) -> None:
    problems = checked(tmp_path, text, capfd)
    assert [line for line in problems if line.startswith(problem)], problems
    assert "canary" not in str(problems)


def test_valid_settings_load_and_hide_their_secrets(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "canary-of-the-environment")
    text = """mcp_servers:
  files: {command: [sh, -c, "exit"], env: {KEY: canary-key}, tools: [read]}
  docs: {url: "https://docs.example/mcp", headers: {Authorization: "Bearer ${TOKEN}"}}
mcp: {allow: ["https://*.example/mcp"], allow_addresses: [10.0.0.0/8], call_seconds: 5, result_bytes: 100}
"""
    assert checked(tmp_path, text, capfd) == []
    settings = load_settings(str(tmp_path / "dragoman.yaml"), Flags(), {})
    docs = settings.mcp_servers["docs"]
    # The variable is read when the connection is opened.
    assert docs.headers == {"Authorization": "Bearer ${TOKEN}"}
    assert "canary-of-the-environment" in docs.secrets
    shown = str(without_secrets(settings))
    assert "canary" not in shown
    assert "docs.example" in shown


def test_short_values_are_no_secrets() -> None:
    assert ToolServerSpec(command=("x",), env={"MODE": "fast", "KEY": "a-long-secret"}).secrets == ("a-long-secret",)
