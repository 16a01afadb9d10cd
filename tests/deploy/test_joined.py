"""A group that registers itself: it is found in the store while it runs, and has left when it stops."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from deploy.waiting import wait_for

from trunkline.deploy.config.node_settings import Kind, NodePlan, NodeSettings, parse_address
from trunkline.deploy.config.settings import ServeSettings
from trunkline.deploy.errors import UserError
from trunkline.deploy.node.joined import Joined, joined, member_of, warning_of
from trunkline.deploy.supervisor.members import CommandError
from trunkline.kvstore.records import open_records
from trunkline.router.membership.records_source import Registration, registrations

Found = Callable[[], dict[str, Registration]]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a group waits for its last words for as long as a busy disk may take."""
    monkeypatch.setattr("trunkline.deploy.node.joined._LEAVE_S", 60.0)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:{tmp_path / 'records.sqlite'}"


@pytest.fixture
def found(url: str) -> Found:
    """Reads the registrations as a router does."""

    async def read() -> dict[str, Registration]:
        store = open_records(url)
        try:
            return await registrations(store)
        finally:
            await store.close()

    return lambda: asyncio.run(read())


def node(url: str, listen: str = "10.0.0.1:7400") -> NodePlan:
    return NodePlan(ranks=range(1), listen=parse_address(listen, "--listen"), join=url)


@pytest.mark.parametrize(
    ("listen", "store", "is_warned"),
    [
        ("127.0.0.1:7400", "redis://store.example:6379/0", True),
        ("127.0.0.1:7400", "redis://127.0.0.1:6379/0", False),
        ("127.0.0.1:7400", "redis://localhost/0", False),
        ("127.0.0.1:7400", "unix:///run/redis.sock?db=0", False),
        ("127.0.0.1:7400", "sqlite:/srv/records.sqlite", False),
        ("10.0.0.1:7400", "redis://:secret@store.example:6379/0", False),
    ],
)
def test_an_address_that_no_other_host_reaches_is_told(listen: str, store: str, is_warned: bool) -> None:
    warning = warning_of(node(store, listen))
    assert ("registers as 127.0.0.1:7400, where only this machine" in warning) == is_warned
    assert bool(warning) == is_warned
    assert warning_of(replace(node(store, listen), join="")) == ""


def test_a_name_that_no_other_host_reaches_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, is_warned in (("localhost", True), ("localhost.localdomain", True), ("h1.example", False)):
        monkeypatch.setattr(socket, "getfqdn", lambda name=name: name)
        assert bool(warning_of(node("redis://store.example/0", "0.0.0.0:7400"))) == is_warned


def test_a_group_is_registered_until_it_leaves(url: str, found: Found) -> None:
    with joined(node(url), "demo", "ab" * 16) as membership:
        wait_for(found)
        [(name, registration)] = found().items()
        member = registration.member
        assert (name, member.address, member.events) == (
            "10.0.0.1:7400",
            "tcp://10.0.0.1:7400",
            "tcp://10.0.0.1:7401",
        )
        assert (member.model, member.fingerprint, registration.left) == ("demo", "ab" * 16, False)
        with pytest.raises(CommandError, match="cannot be changed here"):
            membership.grow(2, [1])
        membership.leave()
        membership.leave()
        wait_for(lambda: found()["10.0.0.1:7400"].left)
    assert found()["10.0.0.1:7400"].left


def test_the_end_of_the_block_leaves_too(url: str, found: Found) -> None:
    with joined(node(url), "demo", ""):
        wait_for(found)
    assert found()["10.0.0.1:7400"].left


def test_a_store_that_is_away_keeps_no_group_from_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trunkline.deploy.node.joined._LEAVE_S", 0.1)
    with joined(node("redis://127.0.0.1:1/0"), "demo", "") as membership:
        assert isinstance(membership, Joined)


@pytest.mark.parametrize("role", ["both", "prefill", "decode"])
def test_a_group_registers_with_its_role(url: str, found: Found, role: str) -> None:
    with joined(node(url), "demo", "", role):
        wait_for(found)
        assert found()["10.0.0.1:7400"].member.role == role


def test_each_start_is_another_one_under_the_same_name() -> None:
    first, second = (member_of(node("records", "10.0.0.1:7500"), "demo", "") for _ in range(2))
    assert first.id == second.id
    assert first.epoch != second.epoch
    anywhere = member_of(node("records", "0.0.0.0:7500"), "demo", "")
    assert "0.0.0.0" not in anywhere.address


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (Kind.ROUTER, {"members": "files"}, "--members: members are 'files'; it must be one of static:PATH"),
        (Kind.ROUTER, {"members": "records", "controllers": "a:7400"}, "--controllers and --members exclude"),
        (Kind.GROUP, {"join": "http://x"}, "--join is 'http://x'"),
    ],
)
def test_what_is_no_membership(kind: Kind, given: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        NodeSettings(plain_tcp=True, **given).validate(kind)  # type: ignore[arg-type]


def test_a_file_of_members_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = NodeSettings(plain_tcp=True, members="static:members.json")
    _, plan = settings.plan(Kind.ROUTER, ServeSettings(port=0))
    assert plan.members == f"static:{tmp_path}/members.json"
    assert plan.is_router
