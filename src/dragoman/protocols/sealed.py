"""Values that a client keeps and sends back unchanged: sealed text, and signatures of text that it can read.

    sealed    := "dgm" VERSION "." base64(digest text)
    signature := "dgm" VERSION "." base64(digest)
    digest    := blake2b(text, key of the seal)       24 bytes
    VERSION   := 1

Rules
1. Each use has a seal of its own, so content that was sealed for one is refused by the others.
2. A digest detects every change and content of other origin. It is neither secret nor a proof: the text is base64, and
   the keys are below. They are the same on all servers, so that a conversation can continue on another server, and
   after a restart.
"""

import base64
import hashlib
import re
from enum import Enum

VERSION = 1
PREFIX = f"dgm{VERSION}."
_ANY_VERSION = re.compile(r"dgm[0-9]+\.")
_DIGEST_SIZE = 24


class Seal(Enum):
    """The values are the keys of the digests."""

    REASONING = b"dragoman sealed thought 1"
    THINKING_SIGNATURE = b"dragoman thought signature 1"
    COMPACTION = b"dragoman sealed compaction 1"
    COMPACTION_SIGNATURE = b"dragoman compaction signature 1"

    def _digest(self, text: bytes) -> bytes:
        return hashlib.blake2b(text, key=self.value, digest_size=_DIGEST_SIZE).digest()

    def seal(self, text: str) -> str:
        encoded = text.encode()
        return PREFIX + base64.b64encode(self._digest(encoded) + encoded).decode()

    def open(self, sealed: str) -> str | None:
        """Return the text; None for content that `seal` did not return."""
        if not sealed.startswith(PREFIX):
            return None
        try:
            decoded = base64.b64decode(sealed.removeprefix(PREFIX), validate=True)
            digest, text = decoded[:_DIGEST_SIZE], decoded[_DIGEST_SIZE:]
            # Base64 of some lengths has spare bits, which the digest does not cover.
            is_sealed = digest == self._digest(text) and base64.b64encode(decoded).decode() == sealed[len(PREFIX) :]
            return text.decode() if is_sealed else None
        except ValueError:
            return None

    def sign(self, text: str) -> str:
        return PREFIX + base64.b64encode(self._digest(text.encode())).decode()

    def is_broken(self, signature: str, text: str) -> bool:
        """Whether a signature of Dragoman does not match the text. Those of other servers cannot be checked."""
        return is_own(signature) and signature != self.sign(text)


def is_own(value: str) -> bool:
    """Whether some version of Dragoman has sealed or signed the value."""
    return _ANY_VERSION.match(value) is not None
