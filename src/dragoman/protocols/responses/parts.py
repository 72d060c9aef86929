"""Decodes the content parts of messages and outputs, and encodes encrypted reasoning.

content           := text | part*
part              := input_text | output_text | text | summary_text | reasoning_text | refusal
                   | input_image | input_file | input_audio
encrypted_content := "dgm1." base64(blake2b(text) text)

Encrypted reasoning is for clients that store the conversation but do not show the reasoning. It is not secret: the key
is the same on all servers, so that a conversation can continue on another server. The digest detects changes and
content of other origin.
"""

import base64
import binascii
import hashlib
from typing import Any

import msgspec

from dragoman.core.request import Asked, Image, Text

PREFIX = "dgm1."
_KEY = b"dragoman sealed thought 1"
_DIGEST_SIZE = 24


class ResponseTextPart(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class InputText(ResponseTextPart, frozen=True, tag="input_text"):
    pass


class OutputText(ResponseTextPart, frozen=True, tag="output_text"):
    pass


class SummaryText(ResponseTextPart, frozen=True, tag="summary_text"):
    pass


class ReasoningText(ResponseTextPart, frozen=True, tag="reasoning_text"):
    pass


class Refusal(msgspec.Struct, frozen=True, tag_field="type", tag="refusal"):
    refusal: str


class InputImage(msgspec.Struct, frozen=True, tag_field="type", tag="input_image"):
    image_url: str | None = None
    file_id: str | None = None


class InputFile(msgspec.Struct, frozen=True, tag_field="type", tag="input_file"):
    filename: str | None = None


class InputAudio(msgspec.Struct, frozen=True, tag_field="type", tag="input_audio"):
    input_audio: Any = None


ContentPart = (
    ResponseTextPart
    | InputText
    | OutputText
    | SummaryText
    | ReasoningText
    | Refusal
    | InputImage
    | InputFile
    | InputAudio
)
Content = str | list[ContentPart] | None


def decode(content: Content, path: str, asked: list[Asked]) -> tuple[Text | Image, ...]:
    if content is None:
        return ()
    if isinstance(content, str):
        return (Text(content),)
    return tuple(_part(part, f"{path}[{at}]", asked) for at, part in enumerate(content))


def _part(part: ContentPart, path: str, asked: list[Asked]) -> Text | Image:
    if isinstance(part, ResponseTextPart):
        return Text(part.text)
    if isinstance(part, Refusal):
        return Text(part.refusal)
    if isinstance(part, InputImage) and part.image_url is not None:
        asked.append(Asked("images", path))
        return Image(url=part.image_url)
    # Audio and files are not supported: the request is rejected before the empty text is used.
    asked.append(Asked("audio" if isinstance(part, InputAudio) else "files", path))
    return Text("")


def seal(reasoning: str) -> str:
    text = reasoning.encode()
    return PREFIX + base64.b64encode(_digest(text) + text).decode()


def unseal(content: str) -> str | None:
    """Return the reasoning; None for content that `seal` did not produce."""
    if not content.startswith(PREFIX):
        return None
    try:
        opened = base64.b64decode(content.removeprefix(PREFIX), validate=True)
        digest, text = opened[:_DIGEST_SIZE], opened[_DIGEST_SIZE:]
        return text.decode() if digest == _digest(text) else None
    except (binascii.Error, ValueError):
        return None


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, key=_KEY, digest_size=_DIGEST_SIZE).digest()
