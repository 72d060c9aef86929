"""The coding agents that `dragoman launch` can start.

    Agent   := name, title, program, install, protocol, context, environment, arguments, files
    value   := text | object | list, with placeholders in its texts

    $root_url           the address of the server, without /v1
    $api_url            the address of its API, with /v1
    $key                a key of the server
    $model              the name of the model
    $context            the context of the model
    $max_output_tokens  how much of it one reply may use
    $prompt             the rest of the context
    $dir                the folder of `files`, which lives as long as the agent

Rules
1. The settings override those of the user, and leave the files of the user as they are.
2. A text that is only `$context`, `$max_output_tokens` or `$prompt` becomes a number in an object. What needs an
   unknown value is left out: the variable, the argument, or the key of the object.
3. A variable that is None is removed from the environment. An object is written as JSON; JSON is YAML too.
4. A file is an object, or a list of texts and objects that are joined.

To add an agent, add an entry here and a section to docs/agents.md, which must show the same settings.
"""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec


class Agent(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    title: str
    program: str
    install: str
    """The command that installs the agent."""
    protocol: Literal["chat", "messages", "responses"]
    context: int
    """The smallest useful context of a model: the first prompt of the agent, and room to work."""
    environment: Mapping[str, str | Mapping[str, Any] | None]
    arguments: tuple[str, ...] = ()
    files: Mapping[str, Mapping[str, Any] | tuple[Any, ...]] = {}


CLAUDE = Agent(
    name="claude",
    title="Claude Code",
    program="claude",
    install="npm install -g @anthropic-ai/claude-code",
    protocol="messages",
    context=65_536,
    environment={
        "ANTHROPIC_BASE_URL": "$root_url",
        "ANTHROPIC_AUTH_TOKEN": "$key",
        "ANTHROPIC_MODEL": "$model",
        "ANTHROPIC_DEFAULT_FABLE_MODEL": "$model",
        "ANTHROPIC_DEFAULT_OPUS_MODEL": "$model",
        "ANTHROPIC_DEFAULT_SONNET_MODEL": "$model",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "$model",
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "$context",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "$max_output_tokens",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        # Claude Code then ignores the servers, keys and models in settings files.
        "CLAUDE_CODE_PROVIDER_MANAGED_BY_HOST": "1",
        # It would be sent beside the token.
        "ANTHROPIC_API_KEY": None,
        "CLAUDE_CODE_USE_BEDROCK": None,
        "CLAUDE_CODE_USE_FOUNDRY": None,
        "CLAUDE_CODE_USE_VERTEX": None,
    },
    arguments=("--settings", '{"apiKeyHelper": ""}'),
)

CODEX = Agent(
    name="codex",
    title="Codex",
    program="codex",
    install="npm install -g @openai/codex",
    protocol="responses",
    context=32_768,
    environment={"DRAGOMAN_API_KEY": "$key"},
    arguments=(
        '--config=model="$model"',
        '--config=model_provider="dragoman"',
        "--config=model_context_window=$context",
        '--config=model_providers.dragoman.name="Dragoman"',
        '--config=model_providers.dragoman.base_url="$api_url"',
        '--config=model_providers.dragoman.env_key="DRAGOMAN_API_KEY"',
        '--config=model_providers.dragoman.wire_api="responses"',
    ),
)

OPENCODE = Agent(
    name="opencode",
    title="opencode",
    program="opencode",
    install="npm install -g opencode-ai",
    protocol="chat",
    context=32_768,
    environment={
        "DRAGOMAN_API_KEY": "$key",
        "OPENCODE_CONFIG_CONTENT": {
            "model": "dragoman/$model",
            "small_model": "dragoman/$model",
            "provider": {
                "dragoman": {
                    "npm": "@ai-sdk/openai-compatible",
                    "name": "Dragoman",
                    "options": {"baseURL": "$api_url", "apiKey": "{env:DRAGOMAN_API_KEY}"},
                    "models": {
                        "$model": {
                            "tool_call": True,
                            "reasoning": True,
                            "limit": {"context": "$context", "output": "$max_output_tokens"},
                        }
                    },
                }
            },
        },
    },
)

QWEN = Agent(
    name="qwen",
    title="Qwen Code",
    program="qwen",
    install="npm install -g @qwen-code/qwen-code",
    protocol="chat",
    context=32_768,
    environment={
        "OPENAI_BASE_URL": "$api_url",
        "OPENAI_API_KEY": "$key",
        "QWEN_CODE_MAX_OUTPUT_TOKENS": "$max_output_tokens",
        "QWEN_CODE_SYSTEM_SETTINGS_PATH": "$dir/settings.json",
    },
    files={
        "settings.json": {
            "security": {"auth": {"selectedType": "openai"}},
            "model": {"name": "$model", "generationConfig": {"contextWindowSize": "$context"}},
        }
    },
)

COPILOT = Agent(
    name="copilot",
    title="GitHub Copilot CLI",
    program="copilot",
    install="npm install -g @github/copilot",
    protocol="chat",
    context=32_768,
    environment={
        "COPILOT_PROVIDER_BASE_URL": "$api_url",
        "COPILOT_PROVIDER_API_KEY": "$key",
        "COPILOT_PROVIDER_TYPE": "openai",
        "COPILOT_PROVIDER_WIRE_API": "completions",
        "COPILOT_MODEL": "$model",
        "COPILOT_PROVIDER_MAX_PROMPT_TOKENS": "$prompt",
        "COPILOT_PROVIDER_MAX_OUTPUT_TOKENS": "$max_output_tokens",
        "COPILOT_PROVIDER_BEARER_TOKEN": None,
        "COPILOT_PROVIDER_MODEL_ID": None,
        "COPILOT_PROVIDER_WIRE_MODEL": None,
    },
)

GOOSE = Agent(
    name="goose",
    title="goose",
    program="goose",
    install="see https://goose-docs.ai",
    protocol="chat",
    context=16_384,
    environment={
        "GOOSE_PROVIDER": "openai",
        "GOOSE_MODEL": "$model",
        "OPENAI_HOST": "$root_url",
        "OPENAI_BASE_PATH": "v1/chat/completions",
        "OPENAI_API_KEY": "$key",
        "GOOSE_CONTEXT_LIMIT": "$context",
        "GOOSE_MAX_TOKENS": "$max_output_tokens",
    },
)

AIDER = Agent(
    name="aider",
    title="aider",
    program="aider",
    install="pip install aider-chat",
    protocol="chat",
    context=8_192,
    environment={"AIDER_OPENAI_API_KEY": "$key"},
    arguments=(
        "--openai-api-base=$api_url",
        "--model=openai/$model",
        "--weak-model=openai/$model",
        "--editor-model=openai/$model",
        "--model-metadata-file=$dir/models.json",
    ),
    files={
        "models.json": {
            "openai/$model": {
                "litellm_provider": "openai",
                "mode": "chat",
                "max_input_tokens": "$context",
                "max_output_tokens": "$max_output_tokens",
                "max_tokens": "$max_output_tokens",
                "input_cost_per_token": 0,
                "output_cost_per_token": 0,
            }
        }
    },
)

CONTINUE = Agent(
    name="cn",
    title="Continue CLI",
    program="cn",
    install="npm install -g @continuedev/cli",
    protocol="chat",
    context=16_384,
    environment={},
    arguments=("--config", "$dir/config.yaml"),
    files={
        "config.yaml": {
            "name": "Dragoman",
            "version": "1.0.0",
            "schema": "v1",
            "models": [
                {
                    "name": "$model",
                    "provider": "openai",
                    "model": "$model",
                    "apiBase": "$api_url",
                    "apiKey": "$key",
                    "roles": ["chat", "edit", "apply"],
                    "capabilities": ["tool_use"],
                    "defaultCompletionOptions": {"contextLength": "$context", "maxTokens": "$max_output_tokens"},
                }
            ],
        }
    },
)

CLINE = Agent(
    name="cline",
    title="Cline CLI",
    program="cline",
    install="npm install -g cline",
    protocol="chat",
    context=32_768,
    environment={},
    arguments=("--data-dir", "$dir"),
    files={
        "settings/providers.json": {
            "version": 1,
            "lastUsedProvider": "openai-compatible",
            "modes": {},
            "providers": {
                "openai-compatible": {
                    "settings": {
                        "provider": "openai-compatible",
                        "apiKey": "$key",
                        "model": "$model",
                        "baseUrl": "$api_url",
                    },
                    "updatedAt": "2026-01-01T00:00:00.000Z",
                    "tokenSource": "manual",
                }
            },
        }
    },
)

PI = Agent(
    name="pi",
    title="pi",
    program="pi",
    install="npm install -g @earendil-works/pi-coding-agent",
    protocol="chat",
    context=16_384,
    environment={},
    arguments=("--extension", "$dir/dragoman.mjs", "--provider", "dragoman", "--model", "$model"),
    files={
        "dragoman.mjs": (
            'export default (pi) => pi.registerProvider("dragoman", ',
            {
                "name": "Dragoman",
                "baseUrl": "$api_url",
                "apiKey": "$key",
                "api": "openai-completions",
                "models": [
                    {
                        "id": "$model",
                        "name": "$model",
                        "reasoning": True,
                        "input": ["text"],
                        "contextWindow": "$context",
                        "maxTokens": "$max_output_tokens",
                        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
                    }
                ],
            },
            ");",
        )
    },
)

AGENTS = {agent.name: agent for agent in (CLAUDE, CODEX, OPENCODE, QWEN, COPILOT, GOOSE, AIDER, CONTINUE, CLINE, PI)}
