"""Declares the SDKs: each runs a program of clients/sdks, which has a tool of its own."""

from collections.abc import Iterator

from clients.client import KEY, URL, Client, script

MODEL = "for-sdks"


def sdks() -> Iterator[Client]:
    yield _program("openai-chat", "openai", "chat", "openai.mjs", "chat")
    yield _program("openai-responses", "openai", "responses", "openai.mjs", "responses")
    # Its tool runner asks for a thread that the server keeps, is told 400, and sends everything itself.
    yield _program("anthropic-sdk", "@anthropic-ai/sdk", "messages", "anthropic.mjs", refused=frozenset({400}))
    yield _program("ai-chat", "@ai-sdk/openai", "chat", "aisdk.mjs", "chat")
    yield _program("ai-responses", "@ai-sdk/openai", "responses", "aisdk.mjs", "responses")
    yield _program("ai-messages", "@ai-sdk/anthropic", "messages", "aisdk.mjs", "messages")
    yield _program("ai-compatible", "@ai-sdk/openai-compatible", "chat", "aisdk.mjs", "compatible")


def _program(name: str, package: str, api: str, *command: str, refused: frozenset[int] = frozenset()) -> Client:
    return Client(
        name,
        package,
        api,
        MODEL,
        ("node", *command),
        script("write_proof", {"number": 4711}),
        {"DRAGOMAN_URL": URL, "DRAGOMAN_API_KEY": KEY},
        answers=2,
        refused=refused,
    )
