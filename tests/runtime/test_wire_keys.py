"""Files of wire keys: who may read them, what is in them, how they change; and what the command says."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import typer
import zmq
from typer.testing import CliRunner

from trunkline.controller.config import ConfigError, ControllerConfig
from trunkline.deploy.cli import wire_cli
from trunkline.runtime.rare_log import RareLog
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
    assert {pair.public for pair in (keys.generations[0].of(role) for role in Role)}.__len__() == 3
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


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o666])
def test_a_file_that_others_may_read_or_change_is_refused(path: Path, mode: int) -> None:
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


# -- the command

cli = typer.Typer()
wire_cli.add_to(cli)


@cli.command()
def other() -> None:
    """With two commands the first has its name."""


def say(*words: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["wire", *map(str, words)])
    return result.exit_code, result.output


def test_the_command_makes_changes_and_divides_keys(tmp_path: Path) -> None:
    file, part = tmp_path / "cluster.keys", tmp_path / "router.keys"
    code, text = say(file)
    assert code == 0
    assert load(file).generations[0].name in text
    assert not any(load(file).generations[0].of(role).secret in text for role in Role)
    code, text = say(file)
    assert (code, "exists already" in text) == (2, True)
    assert say(part, "--part", "router", "--of", file)[0] == 0
    assert load(part) == load(file).part(PARTS["router"])
    assert say(file, "--rotate")[0] == 0
    assert len(load(file).generations) == 2
    assert say(file, "--retire")[0] == 0
    assert len(load(file).generations) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rotate", "--retire"], "exclude each other"),
        (["--part", "router"], "--of"),
        (["--of", "x"], "--part"),
        (["--part", "cook", "--of", "x"], "allowed are group"),
        (["--rotate"], "cannot be read"),
        (["--part", "router", "--of", "nothing"], "cannot be read"),
    ],
)
def test_the_command_says_what_is_wrong(tmp_path: Path, words: list[str], message: str) -> None:
    code, text = say(tmp_path / "keys", *words)
    assert code == 2
    assert message in " ".join(text.split())
    assert not (tmp_path / "keys").exists()


def test_rare_lines_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    rare = RareLog("test", 10.0)
    for second in range(25):
        rare.warning("noise", float(second), peer="a")
    rare.warning("other noise", 0.0)
    written = [line for line in capsys.readouterr().out.splitlines() if "noise" in line]
    assert len([line for line in written if "other" not in line]) == 3
    assert "not_logged=9" in written[1] or '"not_logged": 9' in written[1]
    assert rare.counts == {"noise": 25, "other noise": 1}
    for kind in range(1000):
        rare.warning(f"kind {kind}", 0.0)
    assert len(rare.counts) <= 65
