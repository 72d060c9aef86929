"""The servers that are fuzzed: their configuration, and the models and keys that requests use."""

import sys
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from dragoman.config.sections import KeyLimits
from dragoman.storage.keys import KeyStore

KEYS = ("fuzz-key-of-the-first-tenant", "fuzz-key-of-the-second-tenant")
BODY_BYTES = 256 * 1024
HEADER_BYTES = 16 * 1024
FILE_BYTES = 32 * 1024

CALLS = (
    "<think>They want the weather.</think>I will look.\n"
    '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
    '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
)
HARMONY = (
    "<|channel|>analysis<|message|>They want the weather.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>'
)
SERVER_CALLS = (
    'I ask the server.\n<tool_call>{"name": "fuzz__repeat", "arguments": {"text": "a"}}</tool_call>'
    '<tool_call>{"name": "fuzz__repeat", "arguments": {"text": "fail"}}</tool_call>'
)
SCRIPTED: Mapping[str, Any] = {
    "echo": {"engine": "scripted", "chunk": 16, "burst": 4, "context": 4096},
    "poet": {"engine": "scripted", "replies": [{"output": "Roses are red, violets are blue."}]},
    "caller": {"engine": "scripted", "format": "hermes", "chunk": 8, "replies": [{"output": CALLS}]},
    "delegate": {
        "engine": "scripted",
        "format": "hermes",
        "chunk": 8,
        "replies": [{"match": "repeated|not run", "output": "That is all."}, {"output": SERVER_CALLS}],
    },
    "harmony": {"engine": "scripted", "format": "harmony", "chunk": 16, "replies": [{"output": HARMONY}]},
    "xml": {"engine": "scripted", "format": "qwen_xml", "chunk": 3, "context": 4096, "burst": 8},
    "short": {"engine": "scripted", "context": 20},
    "org/nested": {"engine": "scripted", "chunk": 32, "context": 4096},
    "spare": {"engine": "scripted", "replies": [{"output": "spare"}]},
    "slow": {"engine": "scripted", "tokens_per_second": 400, "replies": [{"output": "tick " * 20}], "slots": 2},
    "failing": {"engine": "scripted", "fail_after": 2, "replies": [{"output": "one two three four"}]},
    "failing-at-once": {"engine": "scripted", "fail_after": 0, "replies": [{"output": "one"}]},
}
COMMON: Mapping[str, Any] = {
    "api_keys": list(KEYS),
    "storage": {"file_bytes": FILE_BYTES},
    "mcp_servers": {"fuzz": {"command": [sys.executable, str(Path(__file__).with_name("mcp_server.py"))]}},
    "telemetry": {"log_format": "json", "log_level": "warning"},
    "limits": {
        "body_bytes": BODY_BYTES,
        "header_bytes": HEADER_BYTES,
        "body_seconds": 20,
        "queue": 8,
        "choices": 4,
        "kept_responses": 100,
        "kept_bytes": 4 * 2**20,
    },
}


class Profile(NamedTuple):
    """An engine as requests see it."""

    name: str
    models: Mapping[str, int]
    """With how often each is asked for."""
    failing: frozenset[str]
    full: frozenset[str]
    """Models whose queue may be full."""
    most_tokens: int | None
    """Replies longer than this are cut by a disconnect."""
    seconds: float
    """The longest time a reply may take."""

    def model(self, random: Random) -> str:
        return random.choices(list(self.models), list(self.models.values()))[0]


_WEIGHTS = """
    echo=30 poet=20 caller=10 delegate=8 harmony=6 xml=6 short=3 org/nested=4 gpt-4o=6 claude-x=6 ECHO:latest=2 slow=1
    failing=3 failing-at-once=2 =3 missing=2
"""
SCRIPTED_WEIGHTS = {name: int(weight) for name, _, weight in (entry.partition("=") for entry in _WEIGHTS.split())}
"""An empty name: the request names no model."""
PROFILES = {
    "scripted": Profile(
        "scripted",
        SCRIPTED_WEIGHTS,
        frozenset({"failing", "failing-at-once"}),
        frozenset({"slow"}),
        None,
        20.0,
    ),
    "smollm2": Profile(
        "smollm2",
        {"smollm2": 90, "gpt-4o": 4, "claude-x": 4, "": 2, "missing": 1},
        frozenset(),
        frozenset(),
        4,
        120.0,
    ),
}


def scripted_config() -> dict[str, Any]:
    return {**COMMON, "models": SCRIPTED, "default": "echo", "aliases": {"gpt-*": "poet", "claude-*": "caller"}}


def smollm2_config(model: Path) -> dict[str, Any]:
    # One thread: several wait for each other at every step where the fuzzer has a core.
    options = {"context": 256, "slots": 4, "layout": "as-is", "threads": 1, "sampling": {"max_tokens": 4}}
    entry = {"source": str(model), **options}
    aliases = {"gpt-*": "smollm2", "claude-*": "smollm2"}
    limits = {**COMMON["limits"], "queue": 64}
    return {**COMMON, "models": {"smollm2": entry}, "default": "smollm2", "aliases": aliases, "limits": limits}


class StoredKeys(NamedTuple):
    """Keys that may not do everything: for one model and one route, and with few requests per minute."""

    scoped: str
    limited: str


def store_keys(file: Path) -> StoredKeys:
    store = KeyStore(file)
    scoped, _ = store.create("scoped", models=("poet", "smollm2"), routes=("chat",))
    limited, _ = store.create("limited", limits=KeyLimits(requests_per_minute=5))
    return StoredKeys(scoped, limited)
