"""A router's index follows a controller process: what is computed, flushed, lost with workers, started again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq
from controller.service_harness import CHUNK, Ranks, Router, group_config, run_controller, start_ranks
from msgspec.structs import replace
from simulation.told import Mirror

from trunkline.controller.config import ControllerConfig
from trunkline.controller.engine_config import ConfigError
from trunkline.controller.messages import FlushCache
from trunkline.kvstore.chunks import chain, pack_int32, root_name
from trunkline.router.membership.member import Member
from trunkline.router.streams.kv_feed import EventFeeds
from trunkline.router.streams.link import ControllerLink

pytestmark = pytest.mark.processes


class Index:
    """A `ChunkMap` of one controller."""

    def __init__(self) -> None:
        self.mirror = Mirror()

    def apply(self, controller: int, names: bytes, tiers: bytes) -> None:
        self.mirror.apply(names, tiers)

    def begin_snapshot(self, controller: int) -> None:
        self.mirror.begin_snapshot()

    def add_snapshot(self, controller: int, names: bytes, tiers: bytes) -> None:
        self.mirror.add_snapshot(names, tiers)

    def end_snapshot(self, controller: int) -> None:
        self.mirror.end_snapshot()

    def forget(self, controller: int) -> None:
        self.mirror.forget()


@pytest.fixture
def config(tmp_path: Path) -> ControllerConfig:
    own = {"events_endpoint": f"ipc://{tmp_path}/events", "model_fingerprint": "abcd"}
    return replace(group_config(tmp_path), **own)


@contextmanager
def group(config: ControllerConfig, folder: Path) -> Iterator[tuple[Router, Ranks]]:
    """A controller process with its ranks, and a router by hand that has seen them ready."""
    with run_controller(config, folder) as (_, router):
        ranks = start_ranks(config)
        router.wait_state("ready")
        yield router, ranks


def compute(router: Router, request: int, prompt: list[int]) -> list[int]:
    """The prompt and what was answered, as far as its KV is kept."""
    router.submit(request, prompt, 7)
    router.wait_finished(request)
    return (prompt + router.tokens[request])[:-1]


async def until(condition: Callable[[], bool]) -> None:
    deadline = asyncio.get_running_loop().time() + 60
    while not condition():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.02)


async def follow(config: ControllerConfig, folder: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    index, loads = Index(), list[tuple[int, int]]()
    link = ControllerLink(0, Member("0", config.router_endpoint), context, 600.0)
    feeds = EventFeeds(context, index, lambda _, *load: loads.append((load[0], load[1])))

    def knows(*sequences: list[int]) -> bool:
        """Whether exactly the full chunks of these are known, all of them on the device."""
        assert link.state is not None
        root = root_name(link.state.fingerprint, link.state.dtype, link.state.chunk_size)
        names: set[bytes] = set()
        for tokens in sequences:
            full = len(tokens) - len(tokens) % CHUNK
            names.update(chain(root, pack_int32(tokens[:full]), CHUNK))
        return index.mirror.tiers == dict.fromkeys(names, 1)

    with group(config, folder) as (router, ranks):
        first = await asyncio.to_thread(compute, router, 1, list(range(20)))
        link.open()
        feeds.open()
        feeds.add(0, config.events_endpoint, link)
        await until(lambda: link.ready and feeds.status(0) == "current")
        assert link.state is not None
        assert (link.state.fingerprint, link.state.requests) == (b"\xab\xcd", 0)
        await until(lambda: knows(first))
        second = await asyncio.to_thread(compute, router, 2, [5] * 30)
        await until(lambda: knows(first, second))
        assert max(requests for requests, _ in loads) == 1
        router.send(FlushCache(3))
        await until(lambda: knows())
        third = await asyncio.to_thread(compute, router, 3, [6] * 30)
        await until(lambda: knows(third))
        ranks.leave.set()
        await until(lambda: not index.mirror.tiers)
    with group(config, folder) as (router, _):
        fourth = await asyncio.to_thread(compute, router, 1, [7] * 25)
        await until(lambda: link.ready and knows(fourth))
        assert feeds.status(0) == "current"
    feeds.close()
    link.close()
    context.term()


def test_an_index_follows_a_controller(config: ControllerConfig, tmp_path: Path) -> None:
    asyncio.run(follow(config, tmp_path))


def test_endpoints_that_cannot_be_are_refused(config: ControllerConfig) -> None:
    config.validate()
    replace(config, events_endpoint="").validate()
    with pytest.raises(ConfigError, match="'nowhere' is neither"):
        replace(config, events_endpoint="nowhere").validate()
    with pytest.raises(ConfigError, match="must differ"):
        replace(config, events_endpoint=config.router_endpoint).validate()
