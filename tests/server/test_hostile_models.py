"""Hostile files in a models folder: the listing stays fast, loads end, and other models answer."""

import os
import shutil
import struct
from pathlib import Path

from dragoman.files.gguf import read_outline
from tests.files.test_gguf import header, sparse
from tests.support.requests import CHAT, ask, refused, talking, text_of
from tests.support.server_process import serving

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def with_template(original: Path, target: Path, template: str) -> None:
    """Copy a model and replace its chat template by a shorter one."""
    shutil.copyfile(original, target)
    place = read_outline(original).places["tokenizer.chat_template"]
    with target.open("r+b") as file:
        file.seek(place)
        (length,) = struct.unpack("<Q", file.read(8))
        file.write(template.encode().ljust(length))


def test_endless_template_fails_only_its_own_model(tmp_path: Path, smollm2_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    with_template(smollm2_path, folder / "endless.gguf", ENDLESS)
    sparse(folder / "sparse.gguf", header(1 << 40))
    os.mkfifo(folder / "pipe.gguf")
    (folder / "again").symlink_to(folder)
    config = {
        "models": {"echo": {"engine": "scripted"}},
        "models_dir": str(folder),
        "layout": "as-is",
        "limits": {"load_seconds": 120},
    }
    with serving(tmp_path, config) as running, talking(running) as client:
        listed = [model["id"] for model in client.get("/v1/models").json()["data"]]
        assert listed == ["echo", "endless"]
        reply = client.post(
            CHAT, json={"model": "endless", "messages": [{"role": "user", "content": "x"}]}, timeout=120
        )
        refused(reply, 503, code="model_failed")
        assert text_of(ask(client, CHAT, model="echo")) == "hello"
        told = {model["id"]: model for model in client.get("/admin/models").json()["data"]}
        assert told["endless"]["state"] == "failed"
        assert "the chat template exceeds a limit" in told["endless"]["failure"]
        assert running.workers() == []
