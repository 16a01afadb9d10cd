"""The sources `static` and `dns`."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from router.membership.following import following

from trunkline.router.membership.dns_source import DnsSource
from trunkline.router.membership.member import Caution, Member
from trunkline.router.membership.static_source import StaticSource, read_members, write_members


def member(number: int) -> Member:
    return Member(str(number), f"tcp://127.0.0.1:{7400 + number}", f"tcp://127.0.0.1:{7500 + number}")


def test_a_file_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "members.json"

    async def scenario() -> None:
        async with following(StaticSource(path, check_seconds=0.005)) as follower:
            present = await follower.until(lambda present: "No such file" in present.problem)
            assert present.members == {}
            write_members(path, [member(0), member(1)])
            present = await follower.until_ids("0", "1")
            assert present.members["1"] == member(1)
            write_members(path, [member(1), member(2)])
            await follower.until_ids("1", "2")
            path.write_text('{"members": [')
            present = await follower.until(lambda present: bool(present.problem))
            assert sorted(present.members) == ["1", "2"], "a wrong file changes nothing"
            path.write_text(
                '{"members": [{"id": "1", "address": "tcp://x:1"}, {"id": "1", "address": "tcp://y:1"}]}'
            )
            present = await follower.until(lambda present: "two members have the id '1'" in present.problem)
            assert sorted(present.members) == ["1", "2"]
            path.unlink()
            present = await follower.until(lambda present: "No such file" in present.problem)
            assert sorted(present.members) == ["1", "2"]
            write_members(path, [])
            await follower.until_ids()
            path.write_text('{"members": [{"id": "7", "address": "ipc:///tmp/x", "role": "prefill", "later": 1}]}')
            present = await follower.until_ids("7")
            assert present.members["7"] == Member("7", "ipc:///tmp/x", role="prefill")

    asyncio.run(scenario())


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "members.json"
    write_members(path, [member(0)])
    with pytest.raises(ValueError, match="two members"):
        write_members(path, [member(1), member(1)])
    assert read_members(path) == {"0": member(0)}
    with pytest.raises(OSError, match="No such file"):
        write_members(tmp_path / "missing" / "members.json", [])
    path.unlink()
    path.mkdir()
    with pytest.raises(OSError, match="directory"):
        write_members(path, [member(0)])
    assert os.listdir(tmp_path) == ["members.json"], "nothing else is left behind"


class Names:
    """A resolver."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self.error: OSError | None = None
        self.asked: list[str] = []

    async def resolve(self, name: str) -> list[str]:
        self.asked.append(name)
        if self.error is not None:
            raise self.error
        return list(self.addresses)


def test_each_address_of_a_name_is_a_member() -> None:
    async def scenario() -> None:
        names = Names()
        names.addresses = ["10.0.0.2", "10.0.0.1", "10.0.0.2"]
        source = DnsSource(
            "groups", 7400, 7401, resolve=names.resolve, check_seconds=0.005, caution=Caution(hold_seconds=0.05)
        )
        async with following(source) as follower:
            present = await follower.until_ids("10.0.0.1:7400", "10.0.0.2:7400")
            assert present.members["10.0.0.1:7400"] == Member(
                "10.0.0.1:7400", "tcp://10.0.0.1:7400", "tcp://10.0.0.1:7401", host="10.0.0.1"
            )
            names.addresses = ["10.0.0.1", "fd00::1"]
            present = await follower.until_ids("10.0.0.1:7400", "[fd00::1]:7400")
            assert present.members["[fd00::1]:7400"].address == "tcp://[fd00::1]:7400"
            names.error = OSError("no name servers")
            present = await follower.until(lambda present: bool(present.problem))
            assert present.problem == "groups cannot be looked up: no name servers"
            assert len(present.members) == 2, "a look-up that fails changes nothing"
            names.error = None
            names.addresses = []
            present = await follower.until(lambda present: "2 of 2 members vanished" in present.problem)
            assert len(present.members) == 2
            await follower.until_ids()
        assert set(names.asked) == {"groups"}

    asyncio.run(scenario())


def test_names_are_looked_up_by_the_system() -> None:
    async def scenario() -> None:
        async with following(DnsSource("localhost", 7400, check_seconds=0.005)) as follower:
            present = await follower.until(lambda present: bool(present.members))
            assert {each.address for each in present.members.values()} <= {
                "tcp://127.0.0.1:7400",
                "tcp://[::1]:7400",
            }
        async with following(DnsSource("no-such-name.invalid", 7400, check_seconds=0.005)) as follower:
            present = await follower.until(lambda present: "cannot be looked up" in present.problem)
            assert not present.members

    asyncio.run(scenario())
