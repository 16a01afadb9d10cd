"""A model's fingerprint is that of every byte, and is computed once."""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from pathlib import Path

import pytest

from trunkline.deploy.config import models
from trunkline.deploy.config.models import digest_files
from trunkline.deploy.errors import UserError


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "PIECE_BYTES", 1000)
    monkeypatch.setattr(models, "_READ_BYTES", 300)


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute from now, so that files written just now count as settled."""
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() + 60 * 10**9)


@pytest.mark.usefixtures("small_pieces")
def test_every_byte_and_its_place_counts(tmp_path: Path) -> None:
    path = tmp_path / "file"
    content = bytearray(os.urandom(4321))
    seen = {digest_files([written(path, bytes(content))])[0]}
    for position in (0, 299, 300, 999, 1000, 1001, 2500, 4320):
        content[position] ^= 1
        seen.add(digest_files([written(path, bytes(content))])[0])
    swapped = bytes(content[1000:2000] + content[:1000] + content[2000:])
    for other in (swapped, bytes(content) + b"\0", bytes(content[:-1]), b"", b"\0"):
        seen.add(digest_files([written(path, other)])[0])
    assert len(seen) == 1 + 8 + 5


@pytest.mark.usefixtures("later")
def test_a_file_is_read_once(tmp_path: Path, cache_home: Path) -> None:
    paths = [written(tmp_path / name, name.encode() * 5000) for name in ("a", "b")]
    read: list[int] = []
    first = digest_files(paths, read.append)
    assert digest_files(paths, read.append) == first
    assert read == [10_000]
    written(paths[0], b"c" * 5000)
    assert digest_files(paths, read.append) != first
    assert read == [10_000, 5000]
    notes = cache_home / "trunkline" / "digests.json"
    assert stat.S_IMODE(notes.stat().st_mode) == 0o600
    assert len(json.loads(notes.read_text())["files"]) == 2


def test_a_file_that_may_still_change_is_not_noted(tmp_path: Path) -> None:
    path = written(tmp_path / "file", b"content")
    read: list[int] = []
    for _ in range(2):
        digest_files([path], read.append)
    assert read == [7, 7]


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize(
    "notes", ["", "{", "[]", '{"version": 1, "files": 3}', '{"version": 0, "files": {}}', "[" * 10**5]
)
def test_damaged_notes_cost_time_only(tmp_path: Path, cache_home: Path, notes: str) -> None:
    path = written(tmp_path / "file", b"content")
    expected = digest_files([path])
    (cache_home / "trunkline" / "digests.json").write_text(notes)
    read: list[int] = []
    assert digest_files([path], read.append) == expected
    assert digest_files([path], read.append) == expected
    assert read == [7]


@pytest.mark.usefixtures("later")
def test_a_note_that_does_not_fit_is_passed_over(tmp_path: Path, cache_home: Path) -> None:
    path = written(tmp_path / "file", b"content")
    expected = digest_files([path])
    notes = cache_home / "trunkline" / "digests.json"
    good = json.loads(notes.read_text())["files"][str(path)]
    for note in (3, [], [7], [*good[:4], "00"], [*good[:4], 5], [7, 0, 0, 0, "00"], None):
        notes.write_text(json.dumps({"version": 1, "files": {str(path): note}}))
        assert digest_files([path]) == expected


@pytest.mark.usefixtures("later")
def test_notes_that_cannot_be_written_are_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "no-folder").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no-folder"))
    path = written(tmp_path / "file", b"content")
    assert digest_files([path]) == digest_files([path])


@pytest.mark.usefixtures("later")
def test_servers_that_start_together_leave_whole_notes(tmp_path: Path, cache_home: Path) -> None:
    paths = [written(tmp_path / str(i), b"%d" % i * 100) for i in range(8)]
    threads = [threading.Thread(target=digest_files, args=([path],)) for path in paths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    folder = cache_home / "trunkline"
    assert json.loads((folder / "digests.json").read_text())["files"]
    assert [entry.name for entry in folder.iterdir()] == ["digests.json"]


def test_a_fingerprint_names_configuration_weights_and_their_rounding(tmp_path: Path) -> None:
    seen = set()
    for config, weights in (("{}", b"a" * 9000), ("{ }", b"a" * 9000), ("{}", b"a" * 4500 + b"b" + b"a" * 4499)):
        (tmp_path / "config.json").write_text(config)
        (tmp_path / "model.safetensors").write_bytes(weights)
        for quantization in ("none", "int8"):
            digest = models.fingerprint(models.weights_digest(tmp_path), quantization)
            assert digest == models.fingerprint(models.weights_digest(tmp_path), quantization)
            assert len(bytes.fromhex(digest)) == 16
            seen.add(digest)
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    seen.add(models.fingerprint(models.weights_digest(tmp_path)))
    assert len(seen) == 7


def test_weights_that_cannot_be_read_are_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(UserError, match=r"(model\.safetensors|gone) cannot be read: No such file"):
        models.weights_digest(tmp_path)
