"""Headers of checkpoints: whatever the files hold, it is read or refused with one clear error."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, Final

import pytest
from seeds import seeds

from trunkline.worker.errors import CheckpointError
from trunkline.worker.model.tensor_index import INDEX_FILE, SINGLE_FILE, read_tensor_index

HEADER: Final[dict[str, Any]] = {
    "__metadata__": {"format": "pt"},
    "model.embed.weight": {"dtype": "F32", "shape": [4, 2], "data_offsets": [0, 32]},
    "model.norm.weight": {"dtype": "BF16", "shape": [2], "data_offsets": [32, 36]},
    "lm_head.weight": {"dtype": "F16", "shape": [3, 2], "data_offsets": [36, 48]},
}
INDEX: Final[dict[str, Any]] = {
    "metadata": {"total_size": 48},
    "weight_map": dict.fromkeys(("model.embed.weight", "model.norm.weight"), "a.safetensors")
    | {"b": "b.safetensors"},
}
DATA_BYTES: Final = 48


def write(path: Path, header: bytes, data: bytes = bytes(DATA_BYTES), length: int | None = None) -> None:
    path.write_bytes((len(header) if length is None else length).to_bytes(8, "little") + header + data)


def encoded(header: Any) -> bytes:
    return json.dumps(header).encode()


def changed(**change: Any) -> bytes:
    """A header with other properties of one tensor."""
    return encoded(HEADER | {"lm_head.weight": HEADER["lm_head.weight"] | change})


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' * 100_000, "nested too deeply"),
        (b"nonsense", "no JSON"),
        (b"\xff\xfe", "no JSON"),
        (b"[" + b"9" * 5000 + b"]", "no JSON"),
        (b"[]", r"it is \[\], not an object"),
        (b"17", "it is 17, not an object"),
        (encoded({"a": 3}), "tensor 'a' is 3, not an object"),
        (encoded({"a": {}}), "`dtype` of 'a' is None"),
        (changed(dtype=["F16"]), r"`dtype` of 'lm_head\.weight' is \['F16'\]"),
        (changed(shape=[-3, -2]), r"`shape` of 'lm_head\.weight' is \[-3, -2\], not a list of sizes"),
        (changed(shape=[3.0, 2]), "`shape` of"),
        (changed(shape=[True, 2]), "`shape` of"),
        (changed(shape=6), "`shape` of 'lm_head.weight' is 6"),
        (changed(shape=None), "`shape` of"),
        (changed(shape=[1 << 70]), "`shape` of"),
        (changed(shape=[1] * 17), "`shape` of"),
        (changed(shape=[4, 2]), r"of shape \[4, 2\] and type F16 takes 16 bytes, but `data_offsets` gives it 12"),
        (changed(data_offsets=[]), r"`data_offsets` of 'lm_head\.weight' is \[\]"),
        (changed(data_offsets=[36]), "`data_offsets` of"),
        (changed(data_offsets=[48, 36]), "`data_offsets` of"),
        (changed(data_offsets=[-12, 0]), "`data_offsets` of"),
        (changed(data_offsets="36,48"), "`data_offsets` of"),
        (changed(data_offsets={"1": 2}), "`data_offsets` of"),
    ],
)
def test_a_malformed_header_is_one_clear_error(tmp_path: Path, header: bytes, message: str) -> None:
    path = tmp_path / SINGLE_FILE
    write(path, header)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_tensor_index(tmp_path)
    assert str(caught.value).startswith(f"{path} has a malformed header: ")
    assert len(str(caught.value)) < len(str(path)) + 400


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (b"[" * 100_000, "is malformed: it is nested too deeply"),
        (b"[]", "is malformed: there is no object `weight_map`"),
        (b"{}", "there is no object `weight_map`"),
        (encoded({"weight_map": {}}), "`weight_map` has no tensors"),
        (encoded({"weight_map": {"a": None}}), "tensor 'a' is in None, which is no file's name"),
        (encoded({"weight_map": {"a": ["b"]}}), r"is in \['b'\], which is no file's name"),
        (encoded({"weight_map": {"a": "../secret/model.safetensors"}}), "which is no file in this folder"),
        (encoded({"weight_map": {"a": "x/../../secret"}}), "which is no file in this folder"),
        (encoded({"weight_map": {"a": "/etc/passwd"}}), "which is no file in this folder"),
        (encoded({"weight_map": {"a": "a\0b"}}), r"is in 'a\\x00b', which is no file in this folder"),
        (encoded({"weight_map": {"a": "\ud800"}}), r"is in '\\ud800', which is no file in this folder"),
        (encoded({"weight_map": {"a": "\x1b[2J"}}), "which is no file in this folder"),
        (encoded({"weight_map": {"a": ""}}), "which is no file in this folder"),
        (encoded({"weight_map": {"a": "."}}), "which is no file in this folder"),
        (encoded({"weight_map": {"a": "x" * 5000}}), "cannot be read: File name too long"),
        (encoded({"weight_map": {"a": "folder"}}), "1 of 1 weight files are missing: folder"),
    ],
)
def test_a_malformed_index_is_one_clear_error(tmp_path: Path, index: bytes, message: str) -> None:
    (tmp_path / "checkpoint" / "folder").mkdir(parents=True)
    (tmp_path / "secret").mkdir()
    write(tmp_path / "secret" / "model.safetensors", encoded(HEADER))
    (tmp_path / "checkpoint" / INDEX_FILE).write_bytes(index)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_tensor_index(tmp_path / "checkpoint")
    assert str(caught.value).startswith(str(tmp_path / "checkpoint"))


def test_a_file_that_cannot_be_read_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / SINGLE_FILE
    write(path, encoded(HEADER))

    def failing(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", failing)
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read: Permission denied"):
        read_tensor_index(tmp_path)
    monkeypatch.undo()
    path.unlink()
    path.symlink_to(path)  # a loop
    with pytest.raises(CheckpointError, match=r"has neither|cannot be read"):
        read_tensor_index(tmp_path)


def test_links_to_files_elsewhere_are_followed(tmp_path: Path) -> None:
    """As in the caches of model hubs."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    write(tmp_path / "blobs" / "17", encoded(HEADER))
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / "snapshot" / name).symlink_to(Path("../blobs/17"))
    (tmp_path / "snapshot" / INDEX_FILE).write_bytes(encoded(INDEX))
    found = read_tensor_index(tmp_path / "snapshot")
    assert {name: entry.shape for name, entry in found.items()} == {
        "model.embed.weight": (4, 2),
        "model.norm.weight": (2,),
        "lm_head.weight": (3, 2),
    }


STRANGE: Final[tuple[Any, ...]] = (
    *(None, True, -1, 0, 1.5, 1e400, 1 << 80, float("nan"), "", "..", "F32", "\ud800", "\0"),
    *([], {}, [[]], [1, 2], [-1, 5], [0, 1 << 63], {"dtype": "F32"}),
)


def mutate(rng: random.Random, value: Any) -> Any:
    """A copy of a JSON value with something in it replaced, removed, renamed or repeated."""
    if rng.random() < 0.25 or not isinstance(value, dict | list) or not value:
        return rng.choice(STRANGE)
    key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
    copy = value.copy()
    match rng.randrange(4):
        case 0:
            del copy[key]
        case 1 if isinstance(copy, dict):
            copy[str(rng.choice(STRANGE))] = copy.pop(key)
        case 1 if isinstance(copy, list):
            copy.insert(key, rng.choice(STRANGE))
        case _:
            copy[key] = mutate(rng, value[key])
    return copy


PIECES: Final = (b"[", b"{", b'"', b"\\", b"-", b"9" * 30, b"\xff", b",", b"]" * 3)


def scramble(rng: random.Random, data: bytes) -> bytes:
    """Bytes flipped, cut out, repeated or put in."""
    result = bytearray(data)
    for _ in range(rng.choice((0, 0, 0, 1, 3, 20))):
        place = rng.randrange(len(result) + 1)
        match rng.randrange(4):
            case 0 if place < len(result):
                result[place] ^= 1 << rng.randrange(8)
            case 1:
                del result[place : place + rng.randrange(30)]
            case 2:
                result[place:place] = result[place : place + rng.randrange(30)]
            case _:
                result[place:place] = rng.choice(PIECES)
    return bytes(result)


@pytest.mark.parametrize("seed", seeds(1))
def test_no_mutation_of_a_checkpoint_is_another_error(tmp_path: Path, seed: int) -> None:
    """Headers and indexes, altered as values and as bytes: read, or refused by the one error that may be."""
    rng = random.Random(seed)
    read = refused = 0
    said: set[bool] = set()
    for number in range(1000):
        folder = tmp_path / str(number % 2)
        folder.mkdir(exist_ok=True)
        header: Any = HEADER
        index: Any = INDEX
        for _ in range(rng.randrange(3)):
            header, index = mutate(rng, header), mutate(rng, index)
        data = bytes(rng.choice((DATA_BYTES, DATA_BYTES, 0, 20)))
        content = scramble(rng, encoded(header))
        length = rng.choice((None, None, None, None, None, rng.randrange(1 << 20), (1 << 64) - 1, 0))
        is_single = number % 2 == 0
        for name in (SINGLE_FILE,) if is_single else ("a.safetensors", "b.safetensors"):
            write(folder / name, content, data, length)
        if not is_single:
            (folder / INDEX_FILE).write_bytes(scramble(rng, encoded(index)))
        try:
            found = read_tensor_index(folder)
        except CheckpointError as error:
            refused += 1
            said.add(str(folder) in str(error))
        else:
            read += 1
            for entry in found.values():
                assert entry.file.parent == folder
                assert all(type(size) is int and size >= 0 for size in entry.shape)
    assert read > 30
    assert refused > 500
    assert said == {True}  # each error names what it is about
