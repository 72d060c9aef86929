"""The prompt of a chat, shown instead of answered: its text, its tokens, and the format its reply would be read in."""

from collections.abc import Sequence
from typing import Any


def encode_prompt(model: str, text: str, tokens: Sequence[int], format_name: str) -> dict[str, Any]:
    return {
        "object": "chat.completion.prompt",
        "model": model,
        "prompt": text,
        "tokens": tokens,
        "token_count": len(tokens),
        "format": format_name,
    }
