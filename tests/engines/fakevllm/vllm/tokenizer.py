"""Bytes as tokens, and the two control tokens of ChatML; what Hugging Face's tokenizers say of themselves."""

import json
import re
from typing import Any

IM_START, IM_END = 256, 257
NAMES = {"<|im_start|>": IM_START, "<|im_end|>": IM_END}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def letters() -> list[str]:
    """The character that stands for each byte."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


class Encoding:
    def __init__(self, ids: list[int]) -> None:
        self.ids = ids


class Backend:
    encode_special_tokens = False

    @classmethod
    def from_str(cls, text: str) -> "Backend":
        json.loads(text)
        return cls()

    def to_str(self) -> str:
        return json.dumps(
            {
                "model": {"type": "BPE", "vocab": {letter: byte for byte, letter in enumerate(letters())}},
                "decoder": {"type": "ByteLevel"},
                "added_tokens": [{"id": token, "content": name, "special": True} for name, token in NAMES.items()],
            }
        )

    def no_truncation(self) -> None: ...

    def no_padding(self) -> None: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> Encoding:
        if self.encode_special_tokens:
            return Encoding([*text.encode()])
        parts = re.split(r"(<\|im_start\|>|<\|im_end\|>)", text)
        return Encoding([token for part in parts for token in ([NAMES[part]] if part in NAMES else part.encode())])


class Tokenizer:
    bos_token_id = None
    eos_token_id = IM_END
    chat_template = TEMPLATE
    backend_tokenizer = Backend()

    def decode(self, tokens: list[int], **options: Any) -> str:
        return bytes(token for token in tokens if token < 256).decode("utf-8", "replace")
