"""Files of wire keys: who may read them, what is in them, how they change, and keys made of a secret text."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import zmq

from trunkline.controller.config import ControllerConfig
from trunkline.controller.engine_config import ConfigError
from trunkline.runtime import wire_keys
from trunkline.runtime.wire_keys import (
    GENERATIONS_MAX,
    PARTS,
    Role,
    WireKeys,
    WireKeysError,
    generate,
    load,
    problem_of,
    write,
)

TCP = "tcp://10.0.0.1:7400"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.keys"
    write(generate(), path)
    return path


def test_a_file_is_its_owners_and_comes_back_as_it_was(tmp_path: Path) -> None:
    keys, path = generate(), tmp_path / "keys"
    umask = os.umask(0)
    try:
        write(keys, path)
    finally:
        os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load(path) == keys
    assert len({keys.generations[0].of(role).public for role in Role}) == 3
    for role in Role:
        pair = keys.generations[0].of(role)
        assert zmq.curve_public(pair.secret.encode()).decode() == pair.public
        assert pair.secret not in repr(keys)


def test_a_file_that_is_there_is_never_overwritten(path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(WireKeysError, match="exists already"):
        write(generate(), path)
    assert path.read_bytes() == before
    write(load(path).rotated(), path, overwrite=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_a_file_that_others_may_read_or_change_is_refused(path: Path) -> None:
    for mode in (0o640, 0o604, 0o620, 0o602, 0o666):
        path.chmod(mode)
        with pytest.raises(WireKeysError, match="chmod 600"):
            load(path)
    path.chmod(0o400)
    load(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file away")
def test_a_group_may_read_what_belongs_to_another_user(path: Path) -> None:
    """So are volumes of secrets: root's, and of a group that the process is in."""
    os.chown(path, 12345, -1)
    path.chmod(0o440)
    load(path)
    for mode in (0o444, 0o460):
        path.chmod(mode)
        with pytest.raises(WireKeysError, match="chmod 600"):
            load(path)


def altered(path: Path, change: Any) -> Path:
    content = json.loads(path.read_bytes())
    change(content)
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(format=2), "format is 2; this version reads 1"),
        (lambda c: c.update(generations=[]), "0 generations"),
        (lambda c: c.update(generations=c["generations"] * 5), "5 generations"),
        (lambda c: c.update(more=1), "no file of wire keys"),
        (lambda c: c["generations"][0].pop("worker"), "no file of wire keys"),
        (lambda c: c["generations"][0]["worker"].update(public="x" * 40), "no right key pair for worker"),
        (lambda c: c["generations"][0]["router"].update(public="é" * 40), "no right key pair for router"),
        (lambda c: c["generations"][0]["router"].update(public="short"), "no right key pair for router"),
        (lambda c: c["generations"][0]["router"].update(secret="s" * 40), "no right key pair for router"),
        (lambda c: c["generations"][0]["router"].update(secret="short"), "no right key pair for router"),
        (lambda c: c["generations"][0]["router"].update(secret=7), "no file of wire keys"),
    ],
)
def test_a_file_that_is_not_right_is_refused(path: Path, change: Any, message: str) -> None:
    secrets = [pair["secret"] for pair in json.loads(path.read_bytes())["generations"][0].values()]
    with pytest.raises(WireKeysError, match=message) as caught:
        load(altered(path, change))
    assert not any(secret in str(caught.value) for secret in secrets)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[" * 100_000, b" " * 100_000, b"{}", b"null"])
def test_what_is_no_file_of_keys_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(WireKeysError, match="no file of wire keys"):
        load(path)


def test_places_without_a_file(tmp_path: Path) -> None:
    with pytest.raises(WireKeysError, match="trunkline key wire FILE"):
        load(tmp_path / "nothing")
    with pytest.raises(WireKeysError, match="cannot be read"):
        load(tmp_path)
    with pytest.raises(WireKeysError, match="cannot be written"):
        write(generate(), tmp_path / "no" / "folder")


def test_generations_come_and_go(path: Path) -> None:
    first = load(path)
    second = first.rotated()
    assert second.generations[1:] == first.generations
    assert second.generations[0] != first.generations[0]
    for role in (Role.ROUTER, Role.WORKER):
        both = {generation.of(role).public for generation in second.generations}
        assert both < second.lets_in(role)
        assert not any(g.of(Role.WORKER).public in second.lets_in(Role.ROUTER) for g in second.generations)
    assert second.retired().generations == second.generations[:1]
    keys = first
    for _ in range(GENERATIONS_MAX - 1):
        keys = keys.rotated()
    with pytest.raises(WireKeysError, match="--retire"):
        keys.rotated()


@pytest.mark.parametrize("name", PARTS)
def test_a_part_has_its_secrets_only(path: Path, name: str, tmp_path: Path) -> None:
    whole = load(path)
    write(whole.part(PARTS[name]), tmp_path / name)
    part: WireKeys = load(tmp_path / name)
    for role in Role:
        pair = part.generations[0].of(role)
        assert pair.public == whole.generations[0].of(role).public
        assert bool(pair.secret) == (role in PARTS[name])
        problem = problem_of([TCP], str(tmp_path / name), role, plain_tcp=False)
        assert ("no secret key" in problem) == (role not in PARTS[name])


def test_endpoints_on_the_network_need_keys(path: Path) -> None:
    assert "--wire-keys" in problem_of(["ipc:///run/x", TCP], "", Role.ROUTER, plain_tcp=False)
    assert not problem_of(["ipc:///run/x", "inproc://x"], "", Role.ROUTER, plain_tcp=False)
    assert not problem_of([TCP], "", Role.ROUTER, plain_tcp=True)
    assert not problem_of([TCP], str(path), Role.ROUTER, plain_tcp=False)
    assert "nothing: the wire keys" in problem_of([TCP], "nothing", Role.ROUTER, plain_tcp=True)
    config = ControllerConfig(plan_endpoint=TCP, report_endpoint="ipc://a", router_endpoint="ipc://b")
    with pytest.raises(ConfigError, match="no wire keys"):
        config.validate()


# -- keys that are made of a text

OLD = "a" * 16 + "7Qx" * 10
NEW = "b" * 16 + "9Zk" * 10


def test_the_same_seed_makes_the_same_keys_and_another_others() -> None:
    assert wire_keys.keys_from_seed(OLD) == wire_keys.keys_from_seed(f"  {OLD}\n")
    assert wire_keys.keys_from_seed(OLD).names != wire_keys.keys_from_seed(NEW).names


def test_roles_have_different_keys() -> None:
    generation = wire_keys.keys_from_seed(OLD).generations[0]
    assert len({generation.of(role).secret for role in Role}) == len(Role)


def test_each_part_gets_a_file_that_loads_with_its_own_secrets_only(tmp_path: Path) -> None:
    seed = tmp_path / "seed"
    seed.write_text(OLD)
    for part, roles in PARTS.items():
        target = tmp_path / f"{part}.keys"
        for _ in range(2):  # a pod's init containers may run again
            wire_keys.main(["--part", part, str(seed), str(target)])
        generation = load(target).generations[0]
        assert {role for role in Role if generation.of(role).secret} == set(roles)
        assert stat.S_IMODE(target.stat().st_mode) == 0o600


def test_parts_know_each_other_while_seeds_change() -> None:
    before, between = wire_keys.keys_from_seed(OLD), wire_keys.keys_from_seed(f"{NEW}\n{OLD}")
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
        wire_keys.main(["--part", "router", str(seed), str(tmp_path / "keys")])
    assert OLD not in str(refused.value)
    assert not (tmp_path / "keys").exists()


def test_a_seed_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(WireKeysError, match="nowhere: the seed cannot be read"):
        wire_keys.read_seed(tmp_path / "nowhere")
