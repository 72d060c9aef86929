"""The coding agents: their settings, how they are asked, and which of their tools the model calls.

Agents that `dragoman launch` knows are started by it. The other settings are those of docs/agents.md.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from clients.client import (
    ANSWER,
    COMMAND,
    KEY,
    PROMPT,
    PROOF,
    URL,
    Client,
    Reply,
    answer,
    call,
    launch,
    script,
    tool_call,
)

API = f"{URL}/v1"
LITELLM_OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}


def agents() -> Iterator[Client]:
    yield from claude_code()
    yield from codex()
    yield from opencode()
    yield from copilot()
    yield from qwen_code()
    yield from kimi_code()
    yield from launched()
    yield mistral_vibe()
    yield openhands()
    yield mini_swe_agent()


def claude_code() -> Iterator[Client]:
    arguments = ("--print", PROMPT, "--allowedTools", "Bash")
    by_alias = {
        "ANTHROPIC_BASE_URL": URL,
        "ANTHROPIC_API_KEY": KEY,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    common = ("@anthropic-ai/claude-code", "messages", "for-claude-code")
    replies = _described("Bash")
    yield Client("claude-code", *common, launch("claude", "for-claude-code", *arguments), replies)
    yield Client("claude-code-alias", *common, ("claude", *arguments), replies, by_alias)


def codex() -> Iterator[Client]:
    arguments = ("exec", "--skip-git-repo-check", "--sandbox", "workspace-write", PROMPT)
    # Its own provider uses a WebSocket, and hands over its tools in an item of the input.
    built_in = ("codex", "--config", f'openai_base_url="{API}"', *arguments)
    common = ("@openai/codex", "responses", "for-codex")
    replies = script("exec_command", {"cmd": COMMAND})
    yield Client("codex", *common, launch("codex", "for-codex", *arguments), replies)
    yield Client("codex-built-in", *common, built_in, replies, {"CODEX_API_KEY": KEY}, uses_websocket=True)


def opencode() -> Iterator[Client]:
    arguments = ("run", "--auto", "--title", "proof")
    quiet = {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"}
    own = quiet | {"DRAGOMAN_API_KEY": KEY}
    files = {".config/opencode/opencode.json": "opencode.json"}
    replies = _described("bash")
    command = launch("opencode", "for-opencode", *arguments, PROMPT)
    yield Client("opencode-chat", "opencode-ai", "chat", "for-opencode", command, replies, quiet)
    for api in ("messages", "responses"):
        command = ("opencode", *arguments, "--model", f"{api}/for-opencode", PROMPT)
        yield Client(f"opencode-{api}", "opencode-ai", api, "for-opencode", command, replies, own, files)


def copilot() -> Iterator[Client]:
    arguments = ("--prompt", PROMPT, "--allow-all-tools")
    offline = {"COPILOT_OFFLINE": "true"}
    own = offline | {"COPILOT_PROVIDER_API_KEY": KEY, "COPILOT_MODEL": "for-copilot"}
    responses = own | {"COPILOT_PROVIDER_BASE_URL": API, "COPILOT_PROVIDER_WIRE_API": "responses"}
    variables: Mapping[str, tuple[str, Mapping[str, str]]] = {
        "copilot-responses": ("responses", responses),
        "copilot-websocket": ("responses", responses | {"COPILOT_PROVIDER_TRANSPORT": "websockets"}),
        "copilot-messages": (
            "messages",
            own | {"COPILOT_PROVIDER_BASE_URL": URL, "COPILOT_PROVIDER_TYPE": "anthropic"},
        ),
    }
    replies = _described("bash")
    command = launch("copilot", "for-copilot", *arguments)
    yield Client("copilot-chat", "@github/copilot", "chat", "for-copilot", command, replies, offline)
    for name, (api, environment) in variables.items():
        yield Client(
            name=name,
            package="@github/copilot",
            api=api,
            model="for-copilot",
            command=("copilot", *arguments),
            replies=replies,
            environment=environment,
            uses_websocket=name == "copilot-websocket",
        )


def qwen_code() -> Iterator[Client]:
    arguments = ("--yolo", PROMPT)
    replies = _described("run_shell_command", is_background=False)
    common = ("for-qwen", launch("qwen", "for-qwen", *arguments), replies)
    yield Client("qwen-chat", "@qwen-code/qwen-code", "chat", *common)
    variables = {"responses": ("openai-responses", "OPENAI", API), "messages": ("anthropic", "ANTHROPIC", URL)}
    for api, (kind, vendor, base) in variables.items():
        yield Client(
            name=f"qwen-{api}",
            package="@qwen-code/qwen-code",
            api=api,
            model="for-qwen",
            command=("qwen", "--auth-type", kind, *arguments),
            replies=replies,
            environment={f"{vendor}_BASE_URL": base, f"{vendor}_API_KEY": KEY, f"{vendor}_MODEL": "for-qwen"},
        )


def kimi_code() -> Iterator[Client]:
    for api in ("messages", "responses"):
        yield Client(
            name=f"kimi-{api}",
            package="@moonshot-ai/kimi-code",
            api=api,
            model="for-kimi",
            command=("kimi", "--model", api, "--prompt", PROMPT),
            replies=script("Bash", {"command": COMMAND}),
            environment={"DRAGOMAN_API_KEY": KEY},
            files={".kimi-code/config.toml": "kimi.toml"},
        )


def launched() -> Iterator[Client]:
    """Agents that only need their arguments."""
    shell = {"command": COMMAND}
    # aider has no tools: it writes the files that the reply contains.
    file = f"\n\nproof.txt\n```\n<<<<<<< SEARCH\n=======\n{PROOF}\n>>>>>>> REPLACE\n```\n"
    edit = [{"output": f"<think>I edit the file.</think>{ANSWER}{file}"}]
    arguments = ("--edit-format", "diff", "--no-git", "--yes-always", "--no-check-update", "--message", PROMPT)
    offline = {"PI_OFFLINE": "1"}

    yield _launched("cline", "cline", script("run_commands", {"commands": [COMMAND]}), "--auto-approve", "true", PROMPT)
    yield _launched("cn", "@continuedev/cli", script("Bash", shell), "--auto", "--print", PROMPT)
    yield _launched("goose", "@aaif/goose-acp", script("shell", shell), "run", "--no-session", "--text", PROMPT)
    yield _launched("pi", "@earendil-works/pi-coding-agent", script("bash", shell), "--print", PROMPT, **offline)
    yield _launched("aider", "aider-chat", edit, *arguments, **LITELLM_OFFLINE)


def _launched(name: str, package: str, replies: Sequence[Reply], *arguments: str, **environment: str) -> Client:
    model = f"for-{name}"
    return Client(name, package, "chat", model, launch(name, model, *arguments), replies, environment)


def mistral_vibe() -> Client:
    return Client(
        name="vibe",
        package="mistral-vibe",
        api="chat",
        model="for-vibe",
        command=("vibe", "--auto-approve", "--trust", "--prompt", PROMPT),
        replies=script("bash", {"command": COMMAND}),
        environment={"DRAGOMAN_API_KEY": KEY},
        files={".vibe/config.toml": "vibe.toml"},
    )


def openhands() -> Client:
    return Client(
        name="openhands",
        package="openhands",
        api="chat",
        model="for-openhands",
        command=("openhands", "--headless", "--override-with-envs", "--exit-without-confirmation", "--task", PROMPT),
        replies=script("terminal", {"command": COMMAND, "summary": "Write the proof", "security_risk": "LOW"}),
        environment={
            "LLM_BASE_URL": API,
            "LLM_API_KEY": KEY,
            "LLM_MODEL": "openai/for-openhands",
            **LITELLM_OFFLINE,
        },
    )


def mini_swe_agent() -> Client:
    # It ends when this command is called.
    end = tool_call("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})
    return Client(
        name="mini-swe-agent",
        package="mini-swe-agent",
        api="chat",
        model="for-mini-swe-agent",
        command=("mini", "--yolo", "--exit-immediately", "--model", "openai/for-mini-swe-agent", "--task", PROMPT),
        replies=[answer(end), call("bash", {"command": COMMAND})],
        environment={
            "OPENAI_BASE_URL": API,
            "OPENAI_API_KEY": KEY,
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            **LITELLM_OFFLINE,
        },
    )


def _described(tool: str, **more: Any) -> Sequence[Reply]:
    """The script for a shell tool that wants a description."""
    return script(tool, {"command": COMMAND, "description": "Write the proof", **more})
