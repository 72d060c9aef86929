"""Paths as a file of the configuration gives them: relative ones start from its folder."""

from pathlib import Path

import msgspec

from dragoman.config.sections import Keys, Tls


def located(path: str, folder: Path) -> str:
    """A path that a file in this folder gave."""
    return str(folder / Path(path).expanduser())


def keys_located(keys: Keys, folder: Path) -> Keys:
    store = None if keys.store is None else located(keys.store, folder)
    jwt = keys.jwt
    if jwt is not None:
        jwt = msgspec.structs.replace(jwt, key_file=located(jwt.key_file, folder))
    return msgspec.structs.replace(keys, store=store, jwt=jwt)


def tls_located(tls: Tls | None, folder: Path) -> Tls | None:
    return None if tls is None else Tls(located(tls.certificate, folder), located(tls.key, folder))
