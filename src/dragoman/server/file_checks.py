"""What is wrong with the files and folders that the server itself needs, found without starting it."""

import os
from collections.abc import Iterator
from pathlib import Path

from dragoman.config.diagnostics import Mistake
from dragoman.config.sections import Keys, Tls
from dragoman.config.settings import Settings
from dragoman.core.errors import ConfigError
from dragoman.server.auth.jwt import KEY_FILE, Signed
from dragoman.server.http.server import tls_context
from dragoman.storage.keys import KeyStore, store_path


def unusable_files(settings: Settings) -> list[Mistake]:
    found = [*_of_keys(settings.keys)]
    if settings.tls is not None:
        found += _of_tls(settings.tls)
    if settings.event_log is not None:
        found += _of_event_log(Path(settings.event_log))
    if settings.socket is not None and not Path(settings.socket).parent.is_dir():
        found.append(Mistake("socket", f"there is no folder {Path(settings.socket).parent}"))
    return found


def _of_tls(tls: Tls) -> Iterator[Mistake]:
    gone = [
        (key, path) for key, path in (("certificate", tls.certificate), ("key", tls.key)) if not Path(path).is_file()
    ]
    for key, path in gone:
        yield Mistake(f"tls.{key}", f"there is no file {path}")
    if not gone:
        try:
            tls_context(tls)
        except ConfigError as error:
            yield Mistake("tls", str(error).removeprefix("tls: "))


def _of_keys(keys: Keys) -> Iterator[Mistake]:
    if keys.jwt is not None:
        try:
            Signed(keys.jwt, keys.limits)
        except ConfigError as error:
            yield Mistake(KEY_FILE, str(error).removeprefix(f"{KEY_FILE}: "))
    place = store_path(keys)
    if keys.store is not None and not place.parent.is_dir():
        yield Mistake("keys.store", f"there is no folder {place.parent}; `dragoman keys create NAME` makes it")
        return
    try:
        KeyStore(place).all()
    except ConfigError as error:
        yield Mistake("keys.store", str(error))


def _of_event_log(path: Path) -> Iterator[Mistake]:
    if path.is_dir():
        yield Mistake("event_log", f"{path} is a folder; expected a file")
    elif not path.parent.is_dir():
        yield Mistake("event_log", f"there is no folder {path.parent}")
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        yield Mistake("event_log", f"{path} cannot be written: permission denied")
