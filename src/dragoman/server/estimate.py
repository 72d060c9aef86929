"""What a request may come to in tokens, before anybody has counted: for the limits of its key.

Too much rather than too little: what was too much is given back when the request has ended.
"""

from dragoman.conversation import GenerationRequest

BYTES_PER_TOKEN = 3
IMAGE_TOKENS = 1000
REPLY_TOKENS = 1024
"""Where the caller sets no limit to the reply."""


def estimated(request: GenerationRequest, weight: int) -> int:
    """`weight` is the size of the body, and of what it refers to."""
    reply = REPLY_TOKENS if request.max_tokens is None else request.max_tokens
    choices = max(request.choices, request.best_of) * max(1, len(request.prompts))
    return estimated_prompt(request, weight) + reply * choices


def estimated_prompt(request: GenerationRequest, weight: int) -> int:
    images = [image for message in request.messages for image in message.images]
    text = weight - sum(len(image.data) * 4 // 3 for image in images if image.data is not None)
    return estimated_text(max(0, text)) + IMAGE_TOKENS * len(images)


def estimated_text(size: int) -> int:
    return -(-size // BYTES_PER_TOKEN)
