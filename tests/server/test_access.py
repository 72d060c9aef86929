"""Access by keys and tokens, without a server: principals, quotas, an unreadable store."""

import hmac
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jwt
import msgspec
import pytest

from dragoman.cli import main
from dragoman.config.sections import Jwt, KeyLimits, Keys
from dragoman.config.settings import Settings
from dragoman.core.errors import ConfigError, PermissionDenied, StorageUnavailable, Unauthorized
from dragoman.core.types import Priority
from dragoman.server.auth.access import Authenticator, principal_of
from dragoman.server.auth.callers import UNRESTRICTED, SavedCaller
from dragoman.server.preflight_checks import check_exposure
from dragoman.storage.keys import KeyStore

STATIC, SECOND = "sk-static-0123456789", "sk-second-0123456789"
SECRET = "s" * 40
UNKNOWN = "dgm_" + "0" * 12 + "_" + "0" * 48
RECHECK_SECONDS = 1.05
"""The store is read again after a second."""

Open = Callable[..., Authenticator]


@pytest.fixture
def store(tmp_path: Path) -> KeyStore:
    return KeyStore(tmp_path / "keys.db")


@pytest.fixture
def open_authenticator(store: KeyStore) -> Iterator[Open]:
    opened: list[Authenticator] = []

    def open_authenticator(*api_keys: str, **keys: Any) -> Authenticator:
        opened.append(Authenticator(Settings(api_keys=api_keys, keys=Keys(store=str(store.path), **keys))))
        return opened[-1]

    yield open_authenticator
    for authenticator in opened:
        authenticator.close()


def given(key: str) -> dict[bytes, bytes]:
    return {b"authorization": b"Bearer " + key.encode()}


def test_number_of_comparisons_is_constant(
    store: KeyStore, open_authenticator: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret, _ = store.create("anna")
    authenticator = open_authenticator("one", "two", "three")
    compared: list[int] = []
    compare = hmac.compare_digest

    def counting(one: bytes, other: bytes) -> bool:
        compared.append(len(one))
        assert len(one) == len(other) == 32
        return compare(one, other)

    monkeypatch.setattr(hmac, "compare_digest", counting)
    counts: dict[bool, set[int]] = {False: set(), True: set()}
    changed = secret[:-1] + ("0" if secret[-1] != "0" else "1")
    for key in (secret, "one", "three", "x" + secret[1:], "x", changed, UNKNOWN):
        compared.clear()
        try:
            authenticator.authenticate(given(key))
        except Unauthorized:
            pass
        counts[key in (changed, UNKNOWN)].add(len(compared))
    # The store is read again for keys that may be new.
    assert counts == {False: {5}, True: {7}}


def test_rotated_key_works_immediately_and_the_old_secret_for_a_while(
    store: KeyStore, open_authenticator: Open
) -> None:
    old, key = store.create("anna")
    authenticator = open_authenticator(limits=KeyLimits(requests_per_minute=5))
    caller = authenticator.authenticate(given(old))
    new = store.rotate(key.id, time.time() + RECHECK_SECONDS)
    assert authenticator.authenticate(given(new)).quota is caller.quota
    assert authenticator.authenticate(given(old)).principal == "user:anna"
    time.sleep(RECHECK_SECONDS)
    with pytest.raises(Unauthorized):
        authenticator.authenticate(given(old))
    newest = store.rotate(key.id, 0.0)
    assert authenticator.authenticate(given(newest)).key == key.id
    with pytest.raises(Unauthorized):
        authenticator.authenticate(given(new))
    store.revoke(key.id)
    time.sleep(RECHECK_SECONDS)
    with pytest.raises(Unauthorized):
        authenticator.authenticate(given(newest))


def test_keys_are_required_once_one_has_existed(store: KeyStore, open_authenticator: Open) -> None:
    authenticator = open_authenticator()
    assert authenticator.authenticate({}).principal == "anonymous"
    assert authenticator.authenticate(given("none")).routes >= {"admin"}
    secret, key = store.create("anna")
    time.sleep(RECHECK_SECONDS)
    with pytest.raises(Unauthorized):
        authenticator.authenticate({})
    assert authenticator.authenticate(given(secret)).principal == "user:anna"
    store.revoke(key.id)
    time.sleep(RECHECK_SECONDS)
    for headers in ({}, given(secret)):
        with pytest.raises(Unauthorized):
            authenticator.authenticate(headers)
    authenticator.close()
    with pytest.raises(Unauthorized):
        open_authenticator().authenticate({})


def test_first_key_works_immediately(store: KeyStore, open_authenticator: Open) -> None:
    authenticator = open_authenticator()
    assert authenticator.authenticate({}).principal == "anonymous"
    secret, _ = store.create("anna", routes=["chat"])
    for headers in (given(secret), {b"x-api-key": secret.encode()}):
        caller = authenticator.authenticate(headers)
        assert caller.principal == "user:anna"
        assert caller.routes == {"chat", "models"}
    with pytest.raises(Unauthorized):
        authenticator.authenticate({})


def test_anonymous_callers(store: KeyStore, open_authenticator: Open) -> None:
    secret, _ = store.create("anna", routes=["admin"])
    authenticator = open_authenticator(anonymous=True, limits=KeyLimits(concurrency=1))
    anonymous = authenticator.authenticate({})
    assert anonymous.principal == "anonymous"
    assert anonymous.quota is not None
    assert not anonymous.routes & {"admin", "stats"}
    with pytest.raises(
        PermissionDenied, match=r"^admin routes need a key; without one this server allows: batches, chat, "
    ):
        anonymous.check_route("admin")
    assert authenticator.authenticate(given("none")) is anonymous
    assert "admin" in authenticator.authenticate(given(secret)).routes


def test_unreadable_store(store: KeyStore, open_authenticator: Open, caplog: pytest.LogCaptureFixture) -> None:
    secret, _ = store.create("anna")
    authenticator = open_authenticator()
    before = store.path.read_bytes()
    store.path.unlink()
    store.path.write_bytes(b"x" * 4096)
    time.sleep(RECHECK_SECONDS)
    assert authenticator.authenticate(given(secret)).principal == "user:anna"
    with pytest.raises(StorageUnavailable):
        authenticator.authenticate(given(UNKNOWN))
    assert len(caplog.records) == 1
    store.path.unlink()
    store.path.write_bytes(before)
    time.sleep(RECHECK_SECONDS)
    with pytest.raises(Unauthorized):
        authenticator.authenticate(given(UNKNOWN))
    assert authenticator.authenticate(given(secret)).principal == "user:anna"
    authenticator.close()
    store.path.write_bytes(b"x" * 4096)
    with pytest.raises(ConfigError, match=r"keys\.db cannot be read"):
        open_authenticator()


def test_public_address_needs_keys_or_anonymous(store: KeyStore) -> None:
    exposed = Settings(host="0.0.0.0", keys=Keys(store=str(store.path)))
    with pytest.raises(ConfigError, match="dragoman keys create"):
        check_exposure(exposed)
    changes: list[dict[str, Any]] = [{"api_keys": ("x",)}, {"keys": Keys(anonymous=True)}, {"socket": "/run/d.sock"}]
    for change in changes:
        check_exposure(msgspec.structs.replace(exposed, **change))
    store.create("anna")
    check_exposure(exposed)


def test_principal_of_a_static_key_depends_on_the_key_alone(open_authenticator: Open) -> None:
    both, one = open_authenticator(STATIC, SECOND, STATIC), open_authenticator(SECOND)
    assert (
        both.authenticate(given(SECOND)).principal == one.authenticate(given(SECOND)).principal == principal_of(SECOND)
    )
    assert both.authenticate(given(STATIC)).principal != principal_of(SECOND)
    assert principal_of(SECOND).startswith("key:")
    assert len(principal_of(SECOND)) == len("key:") + 12


def test_static_key_keeps_its_quota_when_its_position_changes(open_authenticator: Open) -> None:
    limits = KeyLimits(requests_per_minute=5)
    before = open_authenticator(STATIC, SECOND, limits=limits)
    used = before.authenticate(given(SECOND)).quota
    after = open_authenticator(SECOND, limits=limits)
    after.inherit_quotas(before)
    assert after.authenticate(given(SECOND)).quota is used is not None


def test_principal_of_a_token_differs_from_that_of_a_stored_key(
    tmp_path: Path, store: KeyStore, open_authenticator: Open
) -> None:
    (tmp_path / "secret").write_text(SECRET)
    stored, _ = store.create("anna")
    authenticator = open_authenticator(STATIC, jwt=Jwt(algorithm="HS256", key_file=str(tmp_path / "secret")))
    claims = [{"sub": subject, "exp": int(time.time()) + 60} for subject in ("anna", "user:anna")]
    keys = [stored, *(jwt.encode(claim, SECRET, "HS256") for claim in claims)]
    principals = [authenticator.authenticate(given(key)).principal for key in keys]
    assert principals == ["user:anna", "jwt:anna", "jwt:user:anna"]


def test_creating_another_key_for_a_name_prints_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DRAGOMAN_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(["keys", "create", "anna"]) == 0
    assert "had a key before" not in capsys.readouterr().err
    (key,) = KeyStore(tmp_path / "keys.db").all()
    assert main(["keys", "revoke", key.id]) == 0
    assert main(["keys", "create", "anna"]) == 0
    assert "user:anna had a key before" in capsys.readouterr().err


def test_a_saved_caller_keeps_its_rights_until_its_key_is_revoked(store: KeyStore, open_authenticator: Open) -> None:
    secret, key = store.create("anna", models=["small*"], limits=KeyLimits(requests_per_minute=1))
    authenticator = open_authenticator()
    saved = SavedCaller.of(authenticator.authenticate(given(secret)))
    restored = authenticator.restore(msgspec.json.decode(msgspec.json.encode(saved), type=SavedCaller))
    assert restored.principal == "user:anna"
    assert restored.quota is None
    with pytest.raises(PermissionDenied):
        restored.check_model("large")
    store.revoke(key.id)
    time.sleep(RECHECK_SECONDS)
    with pytest.raises(Unauthorized, match="no longer valid"):
        authenticator.restore(saved)


@pytest.mark.parametrize(
    ("own", "default", "priority"),
    [
        (None, None, "interactive"),
        (None, "batch", "batch"),
        ("batch", None, "batch"),
        ("interactive", "batch", "interactive"),
    ],
)
def test_priority_of_a_key(
    store: KeyStore, open_authenticator: Open, own: Priority | None, default: Priority | None, priority: Priority
) -> None:
    secret, _ = store.create("anna", limits=KeyLimits(priority=own))
    authenticator = open_authenticator(limits=KeyLimits(priority=default))
    caller = authenticator.authenticate(given(secret))
    assert caller.priority == priority
    assert authenticator.restore(SavedCaller.of(caller)).priority == priority


def test_a_saved_caller_without_a_key_is_refused_once_keys_are_required(open_authenticator: Open) -> None:
    saved = SavedCaller.of(UNRESTRICTED)
    assert open_authenticator().restore(saved).principal == "anonymous"
    with pytest.raises(Unauthorized):
        open_authenticator(STATIC).restore(saved)
