"""A thought in a form that only we read, for callers who keep the conversation and are not to look into it.

    encrypted_content := "dgm1." base64(blake2b(text) text)

Nothing about it is secret but to the eye: the key is the same everywhere, so that a conversation can go on at another
server. The digest tells what was changed on the way, and what somebody else wrote.
"""

import base64
import binascii
import hashlib

PREFIX = "dgm1."
_KEY = b"dragoman sealed thought 1"
_DIGEST = 24


def seal(thought: str) -> str:
    text = thought.encode()
    return PREFIX + base64.b64encode(_digest(text) + text).decode()


def unseal(content: str) -> str | None:
    """The thought; None where it is not one of ours."""
    if not content.startswith(PREFIX):
        return None
    try:
        opened = base64.b64decode(content.removeprefix(PREFIX), validate=True)
        digest, text = opened[:_DIGEST], opened[_DIGEST:]
        return text.decode() if digest == _digest(text) else None
    except (binascii.Error, ValueError):
        return None


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, key=_KEY, digest_size=_DIGEST).digest()
