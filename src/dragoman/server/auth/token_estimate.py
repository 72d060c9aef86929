"""What a request may come to in tokens, before anybody has counted: for the limits of its key.

Too much rather than too little: what was too much is given back when the request has ended.
"""

import msgspec

from dragoman.core.request import GenerationRequest

BYTES_PER_TOKEN = 3
IMAGE_TOKENS = 1000
REPLY_TOKENS = 1024
"""Where nobody sets a limit to the reply."""


class Estimate(msgspec.Struct, frozen=True, array_like=True):
    """`reply` None: the caller sets no limit to a reply, and there are so many choices of it."""

    prompt: int
    choices: int
    reply: int | None

    def total(self, most: int | None) -> int:
        """`most` is the limit of a reply where the caller sets none."""
        reply = most if self.reply is None else self.reply
        return self.prompt + (REPLY_TOKENS if reply is None else reply) * self.choices


def estimated(request: GenerationRequest, weight: int) -> Estimate:
    """`weight` is the size of the body, and of what it refers to."""
    choices = max(request.choices, request.best_of) * max(1, len(request.prompts))
    return Estimate(estimated_prompt(request, weight), choices, request.max_tokens)


def estimated_prompt(request: GenerationRequest, weight: int) -> int:
    images = [image for message in request.messages for image in message.images]
    text = weight - sum(len(image.data) * 4 // 3 for image in images if image.data is not None)
    return estimated_text(max(0, text)) + IMAGE_TOKENS * len(images)


def estimated_text(size: int) -> int:
    return -(-size // BYTES_PER_TOKEN)
