"""What messages and results are made of: texts, images, files.

content := text | part*
part    := input_text | output_text | text | summary_text | reasoning_text | refusal
         | input_image | input_file | input_audio
"""

from typing import Any

import msgspec

from dragoman.core.request import Asked, Image, Text


class TextPart(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class InputText(TextPart, frozen=True, tag="input_text"):
    pass


class OutputText(TextPart, frozen=True, tag="output_text"):
    pass


class SummaryText(TextPart, frozen=True, tag="summary_text"):
    pass


class ReasoningText(TextPart, frozen=True, tag="reasoning_text"):
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
    TextPart | InputText | OutputText | SummaryText | ReasoningText | Refusal | InputImage | InputFile | InputAudio
)
Content = str | list[ContentPart] | None


def decode(content: Content, path: str, asked: list[Asked]) -> tuple[Text | Image, ...]:
    if content is None:
        return ()
    if isinstance(content, str):
        return (Text(content),)
    return tuple(_part(part, f"{path}[{at}]", asked) for at, part in enumerate(content))


def _part(part: ContentPart, path: str, asked: list[Asked]) -> Text | Image:
    if isinstance(part, TextPart):
        return Text(part.text)
    if isinstance(part, Refusal):
        return Text(part.refusal)
    if isinstance(part, InputImage) and part.image_url is not None:
        asked.append(Asked("images", path))
        return Image(url=part.image_url)
    # No value carries audio or files: the request is refused before anybody looks at the empty text.
    asked.append(Asked("audio" if isinstance(part, InputAudio) else "files", path))
    return Text("")
