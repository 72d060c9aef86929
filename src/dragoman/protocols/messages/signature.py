"""What is written under a thought, so that it is known again when it comes back.

    signature := "dgm1." base64(blake2b(text))

It tells a thought that has been changed on the way from one that has not. It is no secret who wrote it: the key is the
same everywhere, so that a conversation can go on at another server.
"""

import base64
import hashlib

PREFIX = "dgm1."
_KEY = b"dragoman thought signature 1"


def sign(thought: str) -> str:
    digest = hashlib.blake2b(thought.encode(), key=_KEY, digest_size=24).digest()
    return PREFIX + base64.b64encode(digest).decode()


def fits(signature: str, thought: str) -> bool:
    """Whether it can stay: only one of ours that belongs to another thought cannot."""
    return not signature.startswith(PREFIX) or signature == sign(thought)
