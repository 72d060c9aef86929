"""Discovery of models in a directory: names, metadata, and lookups by name."""

import json
import os
import socket
import struct
from collections.abc import Collection
from pathlib import Path

import pytest

from dragoman.files import discovery as discovery_module
from dragoman.files.discovery import DiscoveredModel, Discovery, list_names
from dragoman.files.gguf import Value, read_metadata
from tests.support.gguf_files import gguf, header, pair, sparse, text


def model(architecture: str = "llama", file_type: int | None = None, size: int = 0) -> bytes:
    pairs = [pair("general.architecture", 8, text(architecture))]
    if file_type is not None:
        pairs.append(pair("general.file_type", 4, struct.pack("<I", file_type)))
    return gguf(*pairs) + bytes(size)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    (folder / "org/Split").mkdir(parents=True)
    (folder / "Tiny.gguf").write_bytes(model(file_type=15))
    (folder / "Big-Q4_K_M.gguf").write_bytes(model(size=10))
    (folder / "Big-Q8_0.gguf").write_bytes(model(size=20))
    (folder / "two words.gguf").write_bytes(model("qwen3"))
    for at in (1, 2, 3):
        (folder / f"org/Split/Split.Q6_K-0000{at}-of-00003.gguf").write_bytes(model("gemma3", size=at))
    (folder / "half-00001-of-00002.gguf").write_bytes(model())
    (folder / "mmproj.gguf").write_bytes(model("clip"))
    (folder / "broken.gguf").write_bytes(b"GGUF")
    (folder / "notes.txt").write_text("no model")
    (folder / "org/hf-model").mkdir()
    config = {"architectures": ["Qwen3ForCausalLM"], "torch_dtype": "bfloat16"}
    (folder / "org/hf-model/config.json").write_text(json.dumps(config))
    (folder / "org/hf-model/model.safetensors").write_bytes(bytes(100))
    (folder / "org/mistral").mkdir()
    (folder / "org/mistral/params.json").write_text('{"dim": 64}')
    (folder / "org/mistral/consolidated.safetensors").write_bytes(bytes(100))
    (tmp_path / "secret.gguf").write_bytes(model())
    (folder / "out.gguf").symlink_to(tmp_path / "secret.gguf")
    (folder / "away").symlink_to(tmp_path)
    (folder / "round").symlink_to("round")
    (folder / "linked.gguf").symlink_to("Tiny.gguf")
    return folder


@pytest.fixture
def discovery(folder: Path) -> Discovery:
    made = Discovery([folder, folder / "not there"])
    made.scan()
    return made


def test_found_models(folder: Path, discovery: Discovery) -> None:
    length = len(model("gemma3"))
    assert {found.name: (found.kind, found.architecture, found.quantization) for found in discovery.found.values()} == {
        "Tiny": ("gguf", "llama", "Q4_K_M"),
        "Big-Q4_K_M": ("gguf", "llama", "Q4_K_M"),
        "Big-Q8_0": ("gguf", "llama", "Q8_0"),
        "two-words": ("gguf", "qwen3", None),
        "org/Split/Split.Q6_K": ("gguf", "gemma3", "Q6_K"),
        "org/hf-model": ("folder", "Qwen3ForCausalLM", "bfloat16"),
        "org/mistral": ("folder", None, None),
    }
    split = discovery.found["org/split/split.q6_k"]
    assert split.size == 3 * length + 6
    assert split.path == str((folder / "org/Split/Split.Q6_K-00001-of-00003.gguf").resolve())
    assert discovery.found["org/hf-model"].size == 100


def test_ambiguous_last_part_matches_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a/same", "b/same", "b/same-Q8_0", "b/other-Q4_0", "b/other-Q8_0", "UPPER"):
        path = tmp_path / f"{name}.{'GGUF' if name.isupper() else 'gguf'}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(model(size=len(name)))
    (tmp_path / "half-00001-of-00002.gguf").write_bytes(model())
    discovery = Discovery([tmp_path])
    for _ in range(3):
        discovery.scan()
    assert caplog.text.count("is not complete") == 1
    assert discovery.resolve("same") is None
    assert [found.name for found in discovery.find_all("same")] == ["a/same", "b/same-Q8_0", "b/same"]
    names = {requested: found.name for requested in REQUESTED if (found := discovery.resolve(requested))}
    assert names == REQUESTED


REQUESTED = {
    "a/same": "a/same",
    "b/same": "b/same",
    "b/same:q8_0": "b/same-Q8_0",
    "same:q8_0": "b/same-Q8_0",
    "other": "b/other-Q4_0",
    "upper": "UPPER",
}


def test_names_without_opening_files(folder: Path) -> None:
    assert {"tiny", "broken", "org/hf-model", "org/split/split.q6_k"} <= list_names([folder])
    assert not {"out", "away/secret", "half"} & list_names([folder])


@pytest.mark.parametrize(
    ("requested", "name"),
    [
        ("tiny", "Tiny"),
        ("big-q8_0", "Big-Q8_0"),
        ("big", "Big-Q8_0"),
        ("big:q4_k_m", "Big-Q4_K_M"),
        ("big:latest", "Big-Q8_0"),
        ("big:7b", "Big-Q8_0"),
        ("big:q5_k_m", None),
        ("tiny:q4_k_m", "Tiny"),
        ("tiny:latest", "Tiny"),
        ("split", "org/Split/Split.Q6_K"),
        ("split.q6_k", "org/Split/Split.Q6_K"),
        ("split:q6_k", "org/Split/Split.Q6_K"),
        ("hf-model", "org/hf-model"),
        ("out", None),
        ("away/secret", None),
        ("../secret", None),
        ("/etc/passwd", None),
        ("tiny.gguf", None),
        ("tiny\0", None),
        ("", None),
        ("x" * 1_000_000, None),
        ("q8_0", None),
    ],
)
def test_resolve_name(discovery: Discovery, requested: str, name: str | None) -> None:
    found = discovery.resolve(requested)
    assert (found and found.name) == name


def sized(architecture: str, label: str | None) -> bytes:
    labels = [] if label is None else [pair("general.size_label", 8, text(label))]
    return gguf(pair("general.architecture", 8, text(architecture)), *labels)


@pytest.mark.parametrize(
    ("requested", "names"),
    [
        ("llama", ["Herd-8B", "Herd-70B-Q4_K_M", "Alpaca-8B"]),
        ("llama:70b", ["Herd-70B-Q4_K_M"]),
        ("llama:8b", ["Herd-8B", "Alpaca-8B"]),
        ("llama:q4_k_m", ["Herd-70B-Q4_K_M"]),
        ("llama:3b", []),
        ("gemma3", ["g"]),
        ("gemma3_text:1b", ["g"]),
        ("gemma3_text:latest", ["g"]),
        ("qwen3", ["q"]),
    ],
)
def test_models_by_architecture_and_size(tmp_path: Path, requested: str, names: list[str]) -> None:
    (tmp_path / "Herd-8B.gguf").write_bytes(sized("llama", "8B"))
    (tmp_path / "Herd-70B-Q4_K_M.gguf").write_bytes(sized("llama", "70B"))
    (tmp_path / "Alpaca-8B.gguf").write_bytes(sized("llama", None))
    (tmp_path / "g.gguf").write_bytes(sized("gemma3", "1B"))
    (tmp_path / "q").mkdir()
    (tmp_path / "q/config.json").write_text('{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}')
    (tmp_path / "q/model.safetensors").write_bytes(bytes(8))
    found = Discovery([tmp_path])
    found.scan()
    assert sorted(model.name for model in found.find_all(requested)) == sorted(names)
    resolved = found.resolve(requested)
    assert (None if resolved is None else resolved.name) == (names[0] if len(names) == 1 else None)


def test_second_scan_sees_new_and_removed_files(folder: Path, discovery: Discovery) -> None:
    (folder / "Tiny.gguf").write_bytes(model("phi3", file_type=7))
    (folder / "new.gguf").write_bytes(model())
    (folder / "Big-Q8_0.gguf").unlink()
    discovery.scan()
    tiny = discovery.found["tiny"]
    assert isinstance(tiny, DiscoveredModel)
    assert (tiny.architecture, tiny.quantization) == ("phi3", "Q8_0")
    assert "new" in discovery.found
    assert "big-q8_0" not in discovery.found


def names(folder: Path) -> list[str]:
    found = Discovery([folder])
    found.scan()
    return sorted(entry.name for entry in found.found.values())


def test_links_in_a_circle_list_each_model_once(tmp_path: Path) -> None:
    (tmp_path / "org/deep").mkdir(parents=True)
    (tmp_path / "org/deep/m.gguf").write_bytes(model())
    (tmp_path / "org/self").symlink_to(tmp_path / "org")
    (tmp_path / "up").symlink_to(tmp_path)
    (tmp_path / "a-link.gguf").symlink_to(tmp_path / "org/deep/m.gguf")
    (tmp_path / "hard.gguf").hardlink_to(tmp_path / "org/deep/m.gguf")
    assert names(tmp_path) == ["hard"]
    assert list_names([tmp_path, tmp_path / "org"]) == {"hard"}


def test_file_outside_of_the_listing_is_listed_under_its_link(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshots/one").mkdir(parents=True)
    for at in (1, 2):
        (tmp_path / f"blobs/{at}").write_bytes(model(size=at))
        (tmp_path / f"snapshots/one/m-0000{at}-of-00002.gguf").symlink_to(tmp_path / f"blobs/{at}")
    assert names(tmp_path) == ["snapshots/one/m"]


def test_special_files_do_not_hang_or_break_the_listing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "good.gguf").write_bytes(model())
    (tmp_path / "line\nfeed\x1b[2J.gguf").write_bytes(model(size=1))
    (tmp_path / os.fsdecode(b"not\xffutf8.gguf")).write_bytes(model(size=2))
    (tmp_path / "unreadable.gguf").write_bytes(b"GGUF")
    (tmp_path / "folder.gguf").mkdir()
    (tmp_path / "folder.gguf/inner.gguf").write_bytes(model(size=3))
    (tmp_path / "gone.gguf").symlink_to("nowhere")
    (tmp_path / "zero.gguf").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "weights").mkdir()
    os.mkfifo(tmp_path / "weights/config.json")
    (tmp_path / "weights/model.safetensors").write_bytes(b"x")
    with socket.socket(socket.AF_UNIX) as listener:
        monkeypatch.chdir(tmp_path)
        listener.bind("socket.gguf")
        assert names(tmp_path) == ["folder.gguf/inner", "good", "line-feed-[2J"]
    assert "its name is not UTF-8" in caplog.text


def test_sparse_files_are_refused_and_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "good.gguf").write_bytes(model())
    for at in range(3):
        sparse(tmp_path / f"huge{at}.gguf", header(1 << 40))
    opened: list[Path] = []

    def reading(path: Path, keys: Collection[str] | None = None) -> dict[str, Value]:
        opened.append(path)
        return read_metadata(path, keys)

    monkeypatch.setattr(discovery_module, "read_metadata", reading)
    discovery = Discovery([tmp_path])
    for _ in range(3):
        discovery.scan()
    assert list(discovery.found) == ["good"]
    assert len(opened) == 4
    replaced = tmp_path / "new"
    replaced.write_bytes((tmp_path / "good.gguf").read_bytes())
    before = (tmp_path / "good.gguf").stat()
    os.utime(replaced, ns=(before.st_atime_ns, before.st_mtime_ns))
    replaced.replace(tmp_path / "good.gguf")
    discovery.scan()
    assert len(opened) == 5


def test_slow_scan_leaves_new_files_to_the_next_scan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for at in range(3):
        (tmp_path / f"m{at}.gguf").write_bytes(model(size=at))
    monkeypatch.setattr(discovery_module, "MAX_SCAN_SECONDS", -1.0)
    discovery = Discovery([tmp_path])
    discovery.scan()
    assert discovery.found == {}
    monkeypatch.setattr(discovery_module, "MAX_SCAN_SECONDS", 60.0)
    discovery.scan()
    assert len(discovery.found) == 3


def test_oversized_and_malformed_descriptions_are_ignored(tmp_path: Path) -> None:
    for name, content in {"deep": b"[" * 100_000, "long": b" " * (17 << 20), "list": b"[]"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_bytes(content)
        (tmp_path / name / "model.safetensors").write_bytes(b"x")
    assert names(tmp_path) == []
