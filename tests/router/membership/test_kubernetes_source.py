"""The source `kubernetes` against an API server over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from router.membership.fake_kubernetes import FakeKubernetes, slice_of
from router.membership.following import Follower, eventually, following

from trunkline.router.membership.kubernetes_api import SlicesApi
from trunkline.router.membership.kubernetes_source import KubernetesSource
from trunkline.router.membership.member import Member


@asynccontextmanager
async def cluster(folder: Path, resync_seconds: float = 600.0) -> AsyncIterator[tuple[FakeKubernetes, Follower]]:
    (folder / "token").write_text("first\n")
    async with FakeKubernetes("first") as server:
        await server.put(slice_of("a", "group-0=10.0.0.1", "group-1=10.0.0.2"))
        api = SlicesApi("models", "groups", server=server.url, credentials=folder)
        source = KubernetesSource(api, "requests", "events", resync_seconds=resync_seconds, wait_seconds=0.01)
        async with following(source) as follower:
            yield server, follower


def test_pods_come_and_go(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path) as (server, follower):
            present = await follower.until_ids("group-0", "group-1")
            assert present.members["group-1"] == Member(
                "group-1", "tcp://10.0.0.2:7400", "tcp://10.0.0.2:7401", host="node of group-1"
            )
            await server.put(slice_of("b", "group-2=10.0.0.3"))
            await follower.until_ids("group-0", "group-1", "group-2")
            await server.put(slice_of("a", "group-1=10.0.0.9"))
            present = await follower.until_ids("group-1", "group-2")
            assert present.members["group-1"].address == "tcp://10.0.0.9:7400"
            await server.delete("b")
            await follower.until_ids("group-1")
            await server.delete("a")
            await follower.until_ids()
            assert (server.lists, len(server.watches)) == (1, 1)
            assert not any(present.problem for present in follower.told)

    asyncio.run(scenario())


def test_which_endpoints_are_members(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path) as (server, follower):
            ending = slice_of("a", "group-0=10.0.0.1", "group-1=10.0.0.2", "group-2=10.0.0.3")
            ending["endpoints"][0]["conditions"]["terminating"] = True
            ending["endpoints"][1]["conditions"] = {"ready": False}
            ending["endpoints"][2] |= {"targetRef": None, "hostname": "group-2", "conditions": None}
            await server.put(ending)
            await follower.until_ids("group-1", "group-2")
            both = slice_of("b", "group-1=fd00::1", "group-6=fd00::6", addressType="IPv6")
            await server.put(both)
            present = await follower.until_ids("group-1", "group-2", "group-6")
            assert present.members["group-1"].address == "tcp://10.0.0.2:7400"
            assert present.members["group-6"].address == "tcp://[fd00::6]:7400"
            await server.put(slice_of("c", "other=10.0.0.8", ports=[{"name": "http", "port": 80}]))
            await server.put(slice_of("d", "named=example.org", addressType="FQDN"))
            await server.put(slice_of("e", endpoints=None, ports=None))
            await server.put(slice_of("f", "group-7=10.0.0.7", ports=[{"name": "requests", "port": 1}]))
            present = await follower.until_ids("group-1", "group-2", "group-6", "group-7")
            assert present.members["group-7"].events == ""

    asyncio.run(scenario())


def test_a_list_may_have_many_pages(tmp_path: Path) -> None:
    async def scenario() -> None:
        (tmp_path / "token").write_text("first")
        async with FakeKubernetes("first") as server:
            for number in range(9):
                await server.put(slice_of(f"slice-{number}", f"group-{number}=10.0.0.{number}"))
            api = SlicesApi("models", "groups", server=server.url, credentials=tmp_path)
            async with following(KubernetesSource(api, "requests")) as follower:
                present = await follower.until_ids(*(f"group-{number}" for number in range(9)))
                assert present.members["group-8"].events == ""
                assert len(follower.told) == 1, "a part of a list is no set of members"

    asyncio.run(scenario())


def test_a_watch_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path) as (server, follower):
            await follower.until_ids("group-0", "group-1")
            await eventually(lambda: len(server.watches) == 1)
            version = await server.bookmark()
            await server.end_watches()
            await eventually(lambda: len(server.watches) == 2)
            assert server.watches[1] == version
            await server.put(slice_of("b", "group-2=10.0.0.3"))
            await follower.until_ids("group-0", "group-1", "group-2")
            assert server.lists == 1

    asyncio.run(scenario())


def test_what_is_too_old_is_listed_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path) as (server, follower):
            await follower.until_ids("group-0", "group-1")
            for lists, is_status in ((2, False), (3, True)):
                server.gone_as_status = is_status
                await server.put(slice_of("b", f"group-{lists}=10.0.0.3"))
                await follower.until(lambda present, new=f"group-{lists}": new in present.members)  # type: ignore[misc]
                await server.silently(slice_of("c", f"group-1{lists}=10.0.0.4"))
                server.compact()
                await server.end_watches()
                await follower.until_ids("group-0", "group-1", f"group-{lists}", f"group-1{lists}")
                assert server.lists == lists
            assert not any(present.problem for present in follower.told)

    asyncio.run(scenario())


def test_everything_is_listed_again_from_time_to_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path, resync_seconds=0.0) as (server, follower):
            await follower.until_ids("group-0", "group-1")
            await eventually(lambda: len(server.watches) == 1)
            await server.silently(slice_of("b", "group-2=10.0.0.3"))
            await server.end_watches()
            await follower.until_ids("group-0", "group-1", "group-2")
            assert server.lists > 1

    asyncio.run(scenario())


def test_a_lost_server_takes_no_member_away(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path) as (server, follower):
            await follower.until_ids("group-0", "group-1")
            await eventually(lambda: len(server.watches) == 1)
            server.is_away = True
            server.drop()
            present = await follower.until(lambda present: bool(present.problem))
            assert sorted(present.members) == ["group-0", "group-1"]
            assert "the Kubernetes API cannot be used" in present.problem
            server.is_away = False
            await server.delete("a")
            await server.put(slice_of("b", "group-2=10.0.0.3"))
            await follower.until_ids("group-2")
            assert server.lists == 1, "the watch tells what has happened meanwhile"

    asyncio.run(scenario())


def test_connections_that_break_again_and_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path) as (server, follower):
            await follower.until_ids("group-0", "group-1")
            for number in range(10):
                await server.put(slice_of("b", f"group-{number + 2}=10.0.0.3"))
                server.drop()
                await follower.until_ids("group-0", "group-1", f"group-{number + 2}")

    asyncio.run(scenario())


def test_the_token_is_read_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path) as (server, follower):
            await follower.until_ids("group-0", "group-1")
            await eventually(lambda: len(server.watches) == 1)
            server.tokens = {"second"}
            await server.end_watches()
            present = await follower.until(lambda present: bool(present.problem))
            assert present.problem.endswith("the API server answers 401: Unauthorized")
            assert len(present.members) == 2
            (tmp_path / "token").write_text("second")
            await follower.until_ids("group-0", "group-1")
            (tmp_path / "token").unlink()
            await server.end_watches()
            present = await follower.until(lambda present: bool(present.problem))
            assert "token" in present.problem
            assert len(present.members) == 2

    asyncio.run(scenario())


def test_a_server_that_refuses_at_first(tmp_path: Path) -> None:
    async def scenario() -> None:
        (tmp_path / "token").write_text("x")
        async with FakeKubernetes("first") as server:
            await server.put(slice_of("a", "group-0=10.0.0.1"))
            source = KubernetesSource(
                SlicesApi("models", "groups", server=server.url, credentials=tmp_path),
                "requests",
                wait_seconds=0.01,
            )
            async with following(source) as follower:
                await follower.until(lambda present: "401" in present.problem)
                await eventually(lambda: server.refused >= 3)
                assert len(follower.told) == 1, "the same problem is told once"
                server.tokens.add("x")
                await follower.until_ids("group-0")

    asyncio.run(scenario())
