"""The coding agents: their settings, how they are asked, and which of their tools the model calls.

The settings are those of docs/agents.md.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from clients.client import ANSWER, COMMAND, KEY, PROMPT, PROOF, URL, Client, Reply, answer, call, script, tool_call

API = f"{URL}/v1"
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}


def agents() -> Iterator[Client]:
    yield from claude_code()
    yield from codex()
    yield from opencode()
    yield from copilot()
    yield from qwen_code()
    yield from kimi_code()
    yield cline()
    yield continue_cli()
    yield goose()
    yield pi()
    yield mistral_vibe()
    yield openhands()
    yield mini_swe_agent()
    yield aider()


def claude_code() -> Iterator[Client]:
    quiet = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"}
    by_alias = quiet | {"ANTHROPIC_BASE_URL": URL, "ANTHROPIC_API_KEY": KEY}
    by_name = quiet | {
        "ANTHROPIC_BASE_URL": URL,
        "ANTHROPIC_AUTH_TOKEN": KEY,
        "ANTHROPIC_MODEL": "for-claude-code",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "for-claude-code",
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "200000",
    }
    command = ("claude", "--print", PROMPT, "--allowedTools", "Bash")
    for name, environment in (("claude-code", by_alias), ("claude-code-model", by_name)):
        yield Client(
            name=name,
            package="@anthropic-ai/claude-code",
            api="messages",
            model="for-claude-code",
            command=command,
            environment=environment,
            replies=_described("Bash"),
        )


def codex() -> Iterator[Client]:
    command = ("codex", "exec", "--skip-git-repo-check", "--sandbox", "workspace-write")
    # Its own provider tries a WebSocket first, and hands over its tools in an item of the input.
    built_in = ("--config", f'openai_base_url="{API}"')
    replies = script("exec_command", {"cmd": COMMAND})
    common = ("@openai/codex", "responses", "for-codex")
    files = {".codex/config.toml": "codex.toml"}
    yield Client("codex", *common, (*command, PROMPT), replies, {"DRAGOMAN_API_KEY": KEY}, files)
    yield Client("codex-built-in", *common, (*command, *built_in, PROMPT), replies, {"CODEX_API_KEY": KEY})


def opencode() -> Iterator[Client]:
    for api in ("chat", "messages", "responses"):
        yield Client(
            name=f"opencode-{api}",
            package="opencode-ai",
            api=api,
            model="for-opencode",
            command=("opencode", "run", "--auto", "--title", "proof", "--model", f"{api}/for-opencode", PROMPT),
            environment={
                "DRAGOMAN_API_KEY": KEY,
                "OPENCODE_DISABLE_MODELS_FETCH": "1",
                "OPENCODE_DISABLE_AUTOUPDATE": "1",
            },
            files={".config/opencode/opencode.json": "opencode.json"},
            replies=_described("bash"),
        )


def copilot() -> Iterator[Client]:
    variables: dict[str, Mapping[str, str]] = {
        "chat": {"COPILOT_PROVIDER_BASE_URL": API},
        "responses": {"COPILOT_PROVIDER_BASE_URL": API, "COPILOT_PROVIDER_WIRE_API": "responses"},
        "messages": {"COPILOT_PROVIDER_BASE_URL": URL, "COPILOT_PROVIDER_TYPE": "anthropic"},
    }
    for api, chosen in variables.items():
        yield Client(
            name=f"copilot-{api}",
            package="@github/copilot",
            api=api,
            model="for-copilot",
            command=("copilot", "--prompt", PROMPT, "--allow-all-tools"),
            environment={
                "COPILOT_PROVIDER_API_KEY": KEY,
                "COPILOT_MODEL": "for-copilot",
                "COPILOT_PROVIDER_MAX_PROMPT_TOKENS": "150000",
                "COPILOT_PROVIDER_MAX_OUTPUT_TOKENS": "32000",
                "COPILOT_OFFLINE": "true",
                **chosen,
            },
            replies=_described("bash"),
        )


def qwen_code() -> Iterator[Client]:
    variables = {
        "chat": ("openai", "OPENAI", API),
        "responses": ("openai-responses", "OPENAI", API),
        "messages": ("anthropic", "ANTHROPIC", URL),
    }
    for api, (kind, vendor, base) in variables.items():
        yield Client(
            name=f"qwen-{api}",
            package="@qwen-code/qwen-code",
            api=api,
            model="for-qwen",
            command=("qwen", "--auth-type", kind, "--yolo", PROMPT),
            environment={f"{vendor}_BASE_URL": base, f"{vendor}_API_KEY": KEY, f"{vendor}_MODEL": "for-qwen"},
            replies=_described("run_shell_command", is_background=False),
        )


def kimi_code() -> Iterator[Client]:
    for api in ("messages", "responses"):
        yield Client(
            name=f"kimi-{api}",
            package="@moonshot-ai/kimi-code",
            api=api,
            model="for-kimi",
            command=("kimi", "--model", api, "--prompt", PROMPT),
            files={".kimi-code/config.toml": "kimi.toml"},
            environment={"DRAGOMAN_API_KEY": KEY},
            replies=script("Bash", {"command": COMMAND}),
        )


def cline() -> Client:
    return Client(
        name="cline",
        package="cline",
        api="chat",
        model="for-cline",
        command=("cline", "--auto-approve", "true", PROMPT),
        files={".cline/data/settings/providers.json": "cline.json"},
        # Otherwise it leaves a process behind.
        environment={"CLINE_SESSION_BACKEND_MODE": "local"},
        replies=script("run_commands", {"commands": [COMMAND]}),
    )


def continue_cli() -> Client:
    return Client(
        name="continue",
        package="@continuedev/cli",
        api="chat",
        model="for-continue",
        command=("cn", "--auto", "--print", PROMPT),
        files={".continue/config.yaml": "continue.yaml"},
        environment={"CONTINUE_TELEMETRY_ENABLED": "0"},
        replies=script("Bash", {"command": COMMAND}),
    )


def goose() -> Client:
    return Client(
        name="goose",
        package="@aaif/goose-acp",
        api="chat",
        model="for-goose",
        command=("goose", "run", "--no-session", "--text", PROMPT),
        environment={
            "GOOSE_PROVIDER": "openai",
            "GOOSE_MODEL": "for-goose",
            "OPENAI_HOST": URL,
            "OPENAI_API_KEY": KEY,
            "GOOSE_MODE": "auto",
            "GOOSE_DISABLE_KEYRING": "1",
        },
        replies=script("shell", {"command": COMMAND}),
    )


def pi() -> Client:
    return Client(
        name="pi",
        package="@earendil-works/pi-coding-agent",
        api="chat",
        model="for-pi",
        command=("pi", "--provider", "dragoman", "--model", "for-pi", "--print", PROMPT),
        files={".pi/agent/models.json": "pi.json"},
        environment={"DRAGOMAN_API_KEY": KEY, "PI_OFFLINE": "1"},
        replies=script("bash", {"command": COMMAND}),
    )


def mistral_vibe() -> Client:
    return Client(
        name="vibe",
        package="mistral-vibe",
        api="chat",
        model="for-vibe",
        command=("vibe", "--auto-approve", "--trust", "--prompt", PROMPT),
        files={".vibe/config.toml": "vibe.toml"},
        environment={"DRAGOMAN_API_KEY": KEY},
        replies=script("bash", {"command": COMMAND}),
    )


def openhands() -> Client:
    return Client(
        name="openhands",
        package="openhands",
        api="chat",
        model="for-openhands",
        command=("openhands", "--headless", "--override-with-envs", "--exit-without-confirmation", "--task", PROMPT),
        environment=OFFLINE | {"LLM_BASE_URL": API, "LLM_API_KEY": KEY, "LLM_MODEL": "openai/for-openhands"},
        replies=script("terminal", {"command": COMMAND, "summary": "Write the proof", "security_risk": "LOW"}),
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
        environment=OFFLINE
        | {
            "OPENAI_BASE_URL": API,
            "OPENAI_API_KEY": KEY,
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
        },
        replies=[answer(end), call("bash", {"command": COMMAND})],
    )


def aider() -> Client:
    # It has no tools: it writes the files that the reply contains.
    file = f"\n\nproof.txt\n```\n<<<<<<< SEARCH\n=======\n{PROOF}\n>>>>>>> REPLACE\n```\n"
    return Client(
        name="aider",
        package="aider-chat",
        api="chat",
        model="for-aider",
        command=(
            *("aider", "--model", "openai/for-aider", "--edit-format", "diff", "--no-git", "--yes-always"),
            *("--no-check-update", "--no-show-model-warnings", "--message", PROMPT),
        ),
        environment=OFFLINE | {"OPENAI_API_BASE": API, "OPENAI_API_KEY": KEY},
        replies=[{"output": f"<think>I edit the file.</think>{ANSWER}{file}"}],
    )


def _described(tool: str, **more: Any) -> Sequence[Reply]:
    """The script for a shell tool that wants a description."""
    return script(tool, {"command": COMMAND, "description": "Write the proof", **more})
