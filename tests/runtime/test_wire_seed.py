"""Keys that are made of a text: the same everywhere, and no more of them than a part needs."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from trunkline.runtime import wire_keys, wire_seed
from trunkline.runtime.wire_keys import PARTS, Role, WireKeysError

OLD = "a" * 16 + "7Qx" * 10
NEW = "b" * 16 + "9Zk" * 10


def test_the_same_seed_makes_the_same_keys_and_another_others() -> None:
    assert wire_seed.keys_of(OLD) == wire_seed.keys_of(f"  {OLD}\n")
    assert wire_seed.keys_of(OLD).names != wire_seed.keys_of(NEW).names


def test_roles_have_different_keys() -> None:
    generation = wire_seed.keys_of(OLD).generations[0]
    assert len({generation.of(role).secret for role in Role}) == len(Role)


def test_each_part_gets_a_file_that_loads_with_its_own_secrets_only(tmp_path: Path) -> None:
    seed = tmp_path / "seed"
    seed.write_text(OLD)
    for part, roles in PARTS.items():
        target = tmp_path / f"{part}.keys"
        for _ in range(2):  # a pod's init containers may run again
            wire_seed.main(["--part", part, str(seed), str(target)])
        generation = wire_keys.load(target).generations[0]
        assert {role for role in Role if generation.of(role).secret} == set(roles)
        assert stat.S_IMODE(target.stat().st_mode) == 0o600


def test_parts_know_each_other_while_seeds_change() -> None:
    before, between = wire_seed.keys_of(OLD), wire_seed.keys_of(f"{NEW}\n{OLD}")
    assert between.generations[1] == before.generations[0]
    assert before.lets_in(Role.ROUTER) < between.lets_in(Role.ROUTER)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "0 lines"),
        (b"short", "5 characters"),
        (f"{OLD}\nshort".encode(), "line 2"),
        ("\n".join([OLD] * 5).encode(), "5 lines"),
        (b"\xff" * 40, "no text"),
        (b"x" * 5000, "no seed"),
    ],
)
def test_what_is_no_seed_is_refused_and_not_shown(tmp_path: Path, text: bytes, says: str) -> None:
    seed = tmp_path / "seed"
    seed.write_bytes(text)
    with pytest.raises(SystemExit, match=says) as refused:
        wire_seed.main(["--part", "router", str(seed), str(tmp_path / "keys")])
    assert OLD not in str(refused.value)
    assert not (tmp_path / "keys").exists()


def test_a_seed_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(WireKeysError, match="nowhere: the seed cannot be read"):
        wire_seed.read_seed(tmp_path / "nowhere")
