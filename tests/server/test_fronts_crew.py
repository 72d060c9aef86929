"""Front ends begin, adopt a new configuration and end as their server wants, whatever has happened to them before."""

import json
import os
import signal
from pathlib import Path
from typing import Any

from tests.server.talking import CHAT, ask, eventually, refused, talking, text_of
from tests.server.test_jwt import SECRET, token
from tests.server.test_workers import each
from tests.serving import Running, serving

MODELS: dict[str, Any] = {"echo": {"engine": "scripted"}}


def another_came(running: Running, victim: int) -> bool:
    return eventually(lambda: len(running.fronts()) == 2 and victim not in running.fronts(), 10)


def signed_with(folder: Path, secret: str) -> dict[str, Any]:
    """The configuration, and the file that it names."""
    file = folder / f"{len(secret)}.key"
    file.write_text(secret)
    return {"models_dir": [], "models": MODELS, "keys": {"jwt": {"algorithm": "HS256", "key_file": str(file)}}}


def test_one_that_dies_after_the_key_file_has_moved_comes_back(tmp_path: Path) -> None:
    later = SECRET[::-1] + "!"
    old, new = ({"authorization": f"Bearer {token(secret, aud=None)}"} for secret in (SECRET, later))
    with serving(tmp_path, signed_with(tmp_path, SECRET), "--workers", "2") as running:
        changed = signed_with(tmp_path, later)
        (tmp_path / "dragoman.json").write_text(json.dumps(changed))
        running.process.send_signal(signal.SIGHUP)
        assert eventually(lambda: "read again" in running.log.read_text(), 5)
        (tmp_path / f"{len(SECRET)}.key").unlink()
        victim = running.fronts()[0]
        os.kill(victim, signal.SIGKILL)
        assert another_came(running, victim)
        with each(running, new) as clients:
            assert [text_of(ask(client, CHAT)) for client in clients] == ["hello", "hello"]
        with talking(running, old) as client:
            refused(ask(client, CHAT), 401)
        assert running.log.read_text().count("a front end died") == 1
