"""JSON Web Tokens, valid and forged."""

import base64
import hashlib
import hmac
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from dragoman.config.sections import Jwt, KeyLimits, Keys
from dragoman.config.settings import Settings
from dragoman.core.errors import ConfigError, PermissionDenied, Unauthorized
from dragoman.core.types import Priority
from dragoman.server.auth.access import Authenticator
from dragoman.server.auth.callers import Caller
from tests.support.requests import CHAT, ask, talking
from tests.support.server_process import Running, Serving

SECRET = "a secret of more than thirty-two bytes, and of more than sixty-four as well"


@pytest.fixture(scope="module")
def private() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


def public_pem(private: rsa.RSAPrivateKey) -> bytes:
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return private.public_key().public_bytes(serialization.Encoding.PEM, form)


def claims(**others: Any) -> dict[str, Any]:
    usual = {"sub": "user:anna", "exp": int(time.time()) + 60, "aud": "dragoman", "iss": "https://id.example"}
    return {name: value for name, value in (usual | others).items() if value is not None}


Take = Callable[[str], Caller]


def accessing(folder: Path, key: bytes, algorithm: Any = "HS256", **fields: Any) -> Take:
    file = folder / "jwt.key"
    file.write_bytes(key)
    usual = {"audience": "dragoman", "issuer": "https://id.example"}
    signed = Jwt(algorithm=algorithm, key_file=str(file), **(usual | fields))
    authenticator = Authenticator(Settings(keys=Keys(store=str(folder / "none.db"), jwt=signed)))
    return lambda token: authenticator.authenticate({b"authorization": b"Bearer " + token.encode()})


@pytest.fixture
def take(tmp_path: Path) -> Take:
    return accessing(tmp_path, SECRET.encode())


def token(secret: Any = SECRET, algorithm: str = "HS256", headers: dict[str, Any] | None = None, **others: Any) -> str:
    return jwt.encode(claims(**others), secret, algorithm, headers=headers)


def test_valid_token(take: Take) -> None:
    good = token(routes=["chat"], models=["smol*"])
    for _ in range(2):
        caller = take(good)
        assert caller.principal == "jwt:user:anna"
        assert caller.routes == {"chat", "models"}
        assert caller.models == ("smol*",)
    assert take(token(sub="agent:coder/anna")).principal == "jwt:agent:coder/anna"
    assert take(token(sub="berta")).principal == "jwt:berta"
    assert "admin" not in take(token()).routes


def part(value: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


def unsigned(alg: str) -> str:
    return f"{part({'alg': alg, 'typ': 'JWT'})}.{part(claims())}."


def with_other_claims() -> str:
    head, _, signature = token().split(".")
    return f"{head}.{part(claims(sub='user:root'))}.{signature}"


HOSTILE: dict[str, Callable[[], str]] = {
    "alg none": lambda: unsigned("none"),
    "alg None": lambda: unsigned("None"),
    "alg NONE with the signature of another": lambda: unsigned("NONE") + token().rpartition(".")[2],
    "no signature": lambda: token().rpartition(".")[0] + ".",
    "another secret": lambda: token("b" * 40),
    "another algorithm": lambda: token(algorithm="HS512"),
    "expired": lambda: token(exp=int(time.time()) - 1),
    "not yet": lambda: token(nbf=int(time.time()) + 60),
    "no end": lambda: token(exp=None),
    "another audience": lambda: token(aud="another-audience"),
    "no audience": lambda: token(aud=None),
    "another issuer": lambda: token(iss="https://evil.example"),
    "no issuer": lambda: token(iss=None),
    "no subject": lambda: token(sub=None),
    "a subject that is no name": lambda: token(sub="user:anna\nadmin"),
    "a subject of another kind": lambda: token(sub="root:anna"),
    "routes that there are not": lambda: token(routes=["everything"]),
    "models that are no list": lambda: token(models="*"),
    "other claims": with_other_claims,
    "a subject of a static key": lambda: token(sub="key:0"),
    "a critical header": lambda: token(headers={"crit": ["x"], "x": 1}),
    "too long": lambda: token(filler="x" * 10_000),
    "three dots": lambda: "a.b.c",
    "nothing": lambda: "..",
    "not even text": lambda: "\xff.\xfe.\xfd",
}


@pytest.mark.parametrize("make", HOSTILE.values(), ids=HOSTILE)
def test_hostile_tokens(take: Take, make: Callable[[], str]) -> None:
    with pytest.raises(Unauthorized):
        take(make())


def test_rs256(tmp_path: Path, private: rsa.RSAPrivateKey) -> None:
    take = accessing(tmp_path, public_pem(private), "RS256")
    assert take(token(private, "RS256")).principal == "jwt:user:anna"
    other = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    own_key = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(other.public_key()))
    for headers in ({}, {"jwk": own_key, "kid": "../jwt.key"}):
        with pytest.raises(Unauthorized):
            take(token(other, "RS256", headers=headers))


def test_public_key_is_not_accepted_as_secret(tmp_path: Path, private: rsa.RSAPrivateKey) -> None:
    take = accessing(tmp_path, public_pem(private), "RS256")
    for key in (public_pem(private), public_pem(private).strip()):
        signing = f"{part({'alg': 'HS256', 'typ': 'JWT'})}.{part(claims())}"
        signature = hmac.new(key, signing.encode(), hashlib.sha256).digest()
        with pytest.raises(Unauthorized):
            take(f"{signing}.{base64.urlsafe_b64encode(signature).rstrip(b'=').decode()}")


def test_cached_token_expires(tmp_path: Path) -> None:
    take = accessing(tmp_path, SECRET.encode())
    short = token(exp=int(time.time()) + 2)
    take(short)
    time.sleep(2.1)
    with pytest.raises(Unauthorized, match="expired"):
        take(short)


def test_token_only_restricts(tmp_path: Path) -> None:
    take = accessing(tmp_path, SECRET.encode(), models=("smol*", "mine"), routes=("chat", "messages"))
    assert take(token()).models == ("smol*", "mine")
    assert take(token(routes=["admin", "chat"])).routes == {"chat", "models"}
    asked = ("smollm2", "smollm3", "mine", "other", "yours")
    for models, may in {
        ("smollm2", "mine", "other"): ("smollm2", "mine"),
        ("*",): ("smollm2", "smollm3", "mine"),
        ("s*",): ("smollm2", "smollm3"),
        ("SMOLLM?",): ("smollm2", "smollm3"),
        ("*m*2", "yours"): ("smollm2",),
        (): (),
    }.items():
        caller = take(token(models=list(models)))
        assert tuple(name for name in asked if caller.may_use(name)) == may, models


def test_empty_list_allows_nothing(tmp_path: Path) -> None:
    take = accessing(tmp_path, SECRET.encode())
    assert not take(token(models=[])).may_use("mine")
    assert take(token(routes=[])).routes == frozenset()
    with pytest.raises(PermissionDenied, match="it allows: none"):
        take(token(routes=[])).check_route("chat")
    with pytest.raises(PermissionDenied, match="it allows: none"):
        take(token(models=[])).check_model("mine")


def test_log_says_why_a_token_was_refused(take: Take, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "dragoman.auth")
    with pytest.raises(Unauthorized, match="invalid token"):
        take(token(aud="others"))
    assert "invalid token: Audience doesn't match" in caplog.text
    bad = token(secret="another secret that is as long as the one before")
    with pytest.raises(Unauthorized, match="invalid token"):
        take(bad)
    assert "Signature verification failed" in caplog.text
    assert bad.rpartition(".")[2] not in caplog.text


def test_limits_apply_per_subject(tmp_path: Path) -> None:
    take = accessing(tmp_path, SECRET.encode(), limits=KeyLimits(requests_per_minute=5))
    assert take(token()).quota is take(token(jti="another")).quota is not None
    assert take(token(sub="user:berta")).quota is not take(token()).quota


@pytest.mark.parametrize("priority", ["interactive", "batch"])
def test_tokens_have_the_priority_of_the_limits(tmp_path: Path, priority: Priority) -> None:
    take = accessing(tmp_path, SECRET.encode(), limits=KeyLimits(priority=priority))
    assert take(token()).priority == priority


def test_evicted_subject_has_one_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dragoman.server.auth.jwt.CACHE_SIZE", 3)
    take = accessing(tmp_path, SECRET.encode(), limits=KeyLimits(requests_per_minute=5))
    anna = token()
    for name in ("berta", "carla"):
        take(token(sub=f"user:{name}"))
    before = take(anna).quota
    take(token(sub="user:dora"))
    assert take(anna).quota is take(token(jti="another")).quota is not before


@pytest.mark.parametrize(
    ("algorithm", "key", "words"),
    [
        ("HS256", b"short", "at least 32 bytes"),
        ("HS256", b"-----BEGIN PUBLIC KEY-----\n" + b"x" * 40, "not a PEM key"),
        ("RS256", SECRET.encode(), "public key"),
        ("RS256", b"-----BEGIN PRIVATE KEY-----", "public key"),
    ],
)
def test_invalid_key_files(tmp_path: Path, algorithm: str, key: bytes, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        accessing(tmp_path, key, algorithm)


def test_claim_lists_restrict_over_http(tmp_path: Path, serving: Serving) -> None:
    (tmp_path / "secret").write_text(SECRET)
    signed = {"algorithm": "HS256", "key_file": "secret", "audience": "dragoman", "models": ["fa*"]}
    names = ("fast", "far", "slow")
    config = {
        "models": {name: {"engine": "scripted"} for name in names},
        "keys": {"store": "none.db", "jwt": signed},
    }

    def statuses(running: Running, **claimed: Any) -> list[int]:
        with talking(running, {"authorization": f"Bearer {token(**claimed)}"}) as client:
            return [ask(client, CHAT, model=name).status_code for name in names]

    with serving(tmp_path, config) as running:
        assert statuses(running) == [200, 200, 403]
        assert statuses(running, models=["*"]) == [200, 200, 403]
        assert statuses(running, models=["f*s*", "slow"]) == [200, 403, 403]
        assert statuses(running, models=[]) == [403, 403, 403]
        assert statuses(running, routes=[]) == [403, 403, 403]
