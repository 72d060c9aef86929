"""Every kind of credential that a caller may present, with the scopes that it must grant.

The expectations do not use the server's code: a credential grants a set of scopes, or None if it is not valid.
"""

import base64
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from dragoman.core.types import RouteScope
from dragoman.storage.keys import KeyStore

STATIC = "sk-static-5d1f0c7ab3"
ISSUER, AUDIENCE = "https://id.example", "dragoman"
SCOPES = frozenset(get_args(RouteScope))
OPERATOR = frozenset({"stats", "admin"})
"""Scopes that a key has only if it was created with them."""
USUAL = SCOPES - OPERATOR


@dataclass(frozen=True)
class Credential:
    name: str
    headers: tuple[tuple[str, bytes], ...] = ()
    scopes: frozenset[str] | None = None
    """None: it is not valid."""
    query: bytes = b""
    secret: bytes = b""
    """Text that must never appear in an answer."""


class Authority:
    """Makes the keys and tokens of one server."""

    def __init__(self, folder: Path) -> None:
        self._store = KeyStore(folder / "keys.db")
        self._private = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        form = serialization.PublicFormat.SubjectPublicKeyInfo
        public_pem = self._private.public_key().public_bytes(serialization.Encoding.PEM, form)
        (folder / "jwt.pem").write_bytes(public_pem)

    @property
    def config(self) -> dict[str, Any]:
        signed = {"algorithm": "RS256", "key_file": "jwt.pem", "issuer": ISSUER, "audience": AUDIENCE}
        return {"api_keys": [STATIC], "keys": {"store": "keys.db", "jwt": signed}}

    def stored(self, principal: str, *routes: str, expires: float | None = None, models: tuple[str, ...] = ()) -> str:
        secret, _ = self._store.create(principal, routes=routes, expires=expires, models=models)  # type: ignore[arg-type]
        return secret

    def revoked(self) -> str:
        secret, key = self._store.create("former")
        assert self._store.revoke(key.id)
        return secret

    def claims(self, **others: Any) -> dict[str, Any]:
        usual = {"sub": "user:token", "exp": int(time.time()) + 3600, "iss": ISSUER, "aud": AUDIENCE}
        return {name: value for name, value in (usual | others).items() if value is not None}

    def token(self, **others: Any) -> str:
        return jwt.encode(self.claims(**others), self._private, "RS256")


def other_last_byte(key: str) -> str:
    return key[:-1] + ("0" if key[-1] != "0" else "1")


def bearer(name: str, key: str, scopes: frozenset[str] | None = None) -> Credential:
    return Credential(name, (("Authorization", b"Bearer " + key.encode()),), scopes, secret=key.encode())


def api_key(name: str, key: str, scopes: frozenset[str] | None = None) -> Credential:
    return Credential(name, (("x-api-key", key.encode()),), scopes, secret=key.encode())


def valid_credentials(authority: Authority) -> list[Credential]:
    scoped = [
        bearer(f"stored for {scope}", authority.stored(f"only-{scope}", scope), frozenset({scope, "models"}))
        for scope in sorted(SCOPES)
    ]
    usual = authority.stored("usual")
    return [
        bearer("static", STATIC, SCOPES),
        api_key("static as x-api-key", STATIC, SCOPES),
        bearer("stored", usual, USUAL),
        api_key("stored as x-api-key", usual, USUAL),
        *scoped,
        bearer("token", authority.token(), USUAL),
        bearer("token for chat", authority.token(sub="user:chatty", routes=["chat"]), frozenset({"chat", "models"})),
        bearer("token that asks for admin", authority.token(sub="user:eve", routes=["admin"]), frozenset({"models"})),
        bearer("token for nothing", authority.token(sub="user:none", routes=[]), frozenset()),
        Credential(
            "the same key twice", (("Authorization", b"bEaReR " + usual.encode()), ("x-api-key", usual.encode())), USUAL
        ),
    ]


def invalid_credentials(authority: Authority) -> list[Credential]:
    usual, past = authority.stored("usual"), time.time() - 3600
    expired = authority.stored("late", expires=past)
    basic = base64.b64encode(f"user:{STATIC}".encode())
    secret = STATIC.encode()
    return [
        Credential("none"),
        bearer("wrong", "sk-wrong"),
        bearer("static, wrong in the last byte", other_last_byte(STATIC)),
        bearer("static, cut", STATIC[:-1]),
        bearer("static, in upper case", STATIC.upper()),
        api_key("stored, wrong in the last byte", other_last_byte(usual)),
        bearer("SQL", "' OR 1=1 --"),
        bearer("empty", ""),
        api_key("empty x-api-key", ""),
        bearer("revoked", authority.revoked()),
        bearer("expired", expired),
        Credential("without a scheme", (("Authorization", secret),), secret=secret),
        Credential("another scheme", (("Authorization", b"Basic " + basic),), secret=secret),
        Credential(
            "another header", (("Proxy-Authorization", b"Bearer " + secret), ("api-key", secret)), secret=secret
        ),
        Credential("cookie", (("Cookie", b"api_key=%b; Authorization=%b" % (secret, secret)),), secret=secret),
        Credential(
            "headers that disagree",
            (("Authorization", b"Bearer " + secret), ("x-api-key", usual.encode())),
            secret=secret,
        ),
        Credential(
            "a valid header beside a wrong one", (("Authorization", b"Bearer x"), ("x-api-key", secret)), secret=secret
        ),
        Credential("query", query=b"api_key=%b&key=%b&access_token=%b&token=%b" % ((secret,) * 4), secret=secret),
        bearer("expired token", authority.token(exp=past)),
        bearer("token of another issuer", authority.token(iss="https://evil.example")),
    ]
