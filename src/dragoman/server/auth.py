"""Who is asking: a key becomes a principal."""

import hashlib
import hmac
from collections.abc import Mapping, Sequence

from dragoman.errors import Unauthorized

ANONYMOUS = "anonymous"


class Keys:
    """Compares digests in constant time, all of them whatever the first ones say."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [(_digest(key.encode()), f"key:{at}") for at, key in enumerate(keys)]

    def principal(self, headers: Mapping[bytes, bytes]) -> str:
        if not self._digests:
            return ANONYMOUS
        given = _given(headers)
        digest = _digest(given)
        found = None
        for known, principal in self._digests:
            if hmac.compare_digest(digest, known):
                found = principal
        if found is None:
            raise Unauthorized("the API key is not valid here")
        return found


def _given(headers: Mapping[bytes, bytes]) -> bytes:
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    bearer = token.strip() if scheme.lower() == b"bearer" else b""
    header = headers.get(b"x-api-key", b"").strip()
    if bearer and header and not hmac.compare_digest(_digest(bearer), _digest(header)):
        raise Unauthorized("the Authorization and x-api-key headers carry different keys")
    if not (bearer or header):
        raise Unauthorized("an API key is needed: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'")
    return bearer or header


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
