"""Streams while processes freeze, disks are slow or full, the clock jumps, and cables are cut: all end right.

What they are to say was said by the same cluster in peace. Where a fault is only noticed after a timeout, it lasts
until it is noticed, and the suite's clusters have shorter ones (`IMPATIENT`) than a user's, which the soak has.
"""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from cluster.chaos import View, flush, frozen
from cluster.crowd import Crowd, Script, compare, scripts
from cluster.faults import IMPATIENT, Network, Shim, launcher
from cluster.harness import Cluster, wait_for

from trunkline.runtime.wire_keys import PARTS, generate, write

pytestmark = pytest.mark.processes

CONCURRENCY = 10
BEGUN_MIN = 5
"""Streams that have begun when a fault comes."""
SMALL = ("--dtype", "float32", "--threads", "1", "--kv-memory", "16MiB", "--host-tier", "4MiB")
DAY_S = 86400


class Playing(threading.Thread):
    """Clients at work."""

    def __init__(self, cluster: Cluster, played: Sequence[Script]) -> None:
        super().__init__(daemon=True)
        self.crowd = Crowd(cluster.url)
        self._played = played
        self.start()

    def run(self) -> None:
        asyncio.run(self.crowd.all(self._played, CONCURRENCY))

    def wait_begun(self) -> None:
        """Until many are in the middle of an answer."""
        wait_for(lambda: len(self.crowd.between) >= BEGUN_MIN or not self.is_alive(), 60)
        assert self.is_alive(), "the answers are too short to be disturbed"

    def finish(self) -> Crowd:
        """Until all have their answers."""
        self.join(150)
        assert not self.is_alive(), f"{len(self.crowd.between)} streams still go on"
        return self.crowd


@dataclass
class Faulty:
    """A cluster, what it says in peace, and what can be done to it."""

    cluster: Cluster
    view: View
    played: list[Script]
    expected: Crowd

    @classmethod
    def begin(cls, cluster: Cluster, streams: int, tokens: int) -> Faulty:
        played = scripts(4, streams, tokens, ("greedy", "sampled", "several", "shared", "session"))
        playing = Playing(cluster, played)
        expected = playing.finish()
        return cls(cluster, View(cluster), played, expected)

    def disturb(self, fault: Callable[[], object], *, stores: bool = True) -> None:
        """Have the same asked again, with a fault in the middle of it, and compare.

        Args:
            stores: sessions, too, whose turns are refused while they cannot be stored.
        """
        flush(self.cluster)
        played = [script for script in self.played if stores or not script.is_session]
        playing = Playing(self.cluster, played)
        playing.wait_begun()
        fault()
        self.check(played, playing.finish())

    def check(self, played: Sequence[Script], got: Crowd) -> None:
        """All ended right, and nothing is left of it."""
        wrong = compare(played, self.expected, got)
        assert not wrong, "\n".join(wrong)
        wait_for(self.view.is_healthy, 60)
        self.view.wait_for_no_leaks()


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Shim:
    return Shim(tmp_path_factory.mktemp("shim"), "faulty-disk")


@pytest.fixture(scope="module")
def faulty(shim: Shim, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faulty]:
    """Two groups, with little memory and a disk tier below it."""
    folder = tmp_path_factory.mktemp("faulty-disk")
    changes = {
        role: {**IMPATIENT.get(role, {}), "environment": shim.environment} for role in ("worker", "controller")
    }
    changes["router"] = {**IMPATIENT["router"], "environment": shim.environment}
    options = (*SMALL, "--groups", "2", "--tp", "1", "--disk-tier", f"{folder}:512MiB", "--log-level", "info")
    with Cluster(*options, launcher=launcher(folder, changes)) as cluster:
        yield Faulty.begin(cluster, 24, 120)
        print(cluster.log)
        assert cluster.stop() == 0


def freeze(faulty: Faulty, victim: str, while_frozen: Callable[[], None]) -> None:
    pid = faulty.view.pid(victim)
    faulty.disturb(lambda: frozen([pid], while_frozen))


@pytest.mark.area("survival")
@pytest.mark.parametrize(
    ("victim", "sign", "times"),
    [
        ("worker-0.0", "the workers are lost", 1),  # its controller has lost patience
        # Both controllers have forgotten it. Before the next one: that leaves them a router that never comes back.
        ("router", "a router is gone", 2),
        ("controller-1", "controller_lost", 1),  # the router has taken it for dead
    ],
    ids=["worker", "router", "controller"],
)
def test_a_frozen_process(faulty: Faulty, victim: str, sign: str, times: int) -> None:
    """Until it is noticed; then another worker takes the place of this one, and what is no worker goes on."""
    pid, restarts, said = faulty.view.pid(victim), faulty.view.restarts(), faulty.cluster.log.count(sign)

    def is_noticed() -> bool:
        """Where workers freeze, by its controller: on a busy machine the other may lose patience, too."""
        is_gone = not victim.startswith("worker") or faulty.view.pid(victim) != pid
        return is_gone and faulty.cluster.log.count(sign) >= said + times

    freeze(faulty, victim, lambda: wait_for(is_noticed, 60))
    if victim.startswith("worker"):
        assert faulty.view.restarts() > restarts
    else:
        assert (faulty.view.pid(victim), faulty.view.restarts()) == (pid, restarts)
    if victim == "router":
        assert "messages were lost" in faulty.cluster.log  # controllers began anew with it


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_processes_are_frozen_for_long(tmp_path: Path) -> None:
    options = (*SMALL, "--groups", "2", "--tp", "2", "--disk-tier", f"{tmp_path}:512MiB")
    with Cluster(*options) as cluster:
        faulty = Faulty.begin(cluster, 60, 200)
        for victim in ("worker-0.1", "controller-1", "router"):
            freeze(faulty, victim, lambda: time.sleep(30.0))
        assert cluster.stop() == 0


@pytest.mark.area("survival")
def test_a_slow_disk(faulty: Faulty, shim: Shim) -> None:
    hits = shim.hits
    with shim.fault(delay_ms=150):
        faulty.disturb(lambda: None)
        wait_for(lambda: shim.hits > hits, 20)


def test_a_full_disk_is_reported_and_used_again_when_there_is_room(faulty: Faulty, shim: Shim) -> None:
    hits, failures = shim.hits, faulty.cluster.metric("tier_failures_total", tier="disk")
    with shim.fault(write_errno=errno.ENOSPC):
        faulty.disturb(lambda: None, stores=False)
        asked = {"messages": [{"role": "user", "content": "Keep this."}]}
        refused = httpx.post(f"{faulty.cluster.url}/v1/sessions", json=asked, timeout=60.0)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "records_unavailable")
        assert shim.hits > hits
        wait_for(lambda: faulty.cluster.metric("tier_failures_total", tier="disk") > failures, 20)
        wait_for(lambda: faulty.cluster.metric("tier_up", tier="disk") < 2, 20)
        faulty.cluster.wait_healthy()
        writes = faulty.cluster.metric("tier_writes_total", tier="disk")
    deadline = time.monotonic() + 90
    while faulty.cluster.metric("tier_up", tier="disk") < 2:  # who writes nothing does not notice that it can
        assert time.monotonic() < deadline
        faulty.disturb(lambda: None)
    wait_for(lambda: faulty.cluster.metric("tier_writes_total", tier="disk") > writes, 20)


@pytest.mark.area("survival")
def test_a_clock_that_jumps(faulty: Faulty, shim: Shim) -> None:
    def jump() -> None:
        for clock_s in (DAY_S, -DAY_S):
            with shim.fault(clock_s=clock_s):
                asked = {"prompt": "What time is it?", "max_tokens": 1}
                told = faulty.cluster.post("/v1/completions", asked)["created"]
                assert abs(told - time.time() - clock_s) < 3600  # it does jump
                time.sleep(1.5)

    restarts = faulty.view.restarts()
    faulty.disturb(jump)
    assert faulty.view.restarts() == restarts


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    network = Network(3)
    yield network
    network.close()


@pytest.fixture(scope="module")
def spread(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faulty]:
    """The router, the controller and its workers on hosts of their own: 0, 1, 2; each with its own wire keys."""
    folder = tmp_path_factory.mktemp("spread")
    keys = generate()
    for part, roles in PARTS.items():
        write(keys.part(roles), folder / f"{part}.keys")
    upper, lower = network.address(0, 1), network.address(1, 0)
    to_workers = {"plan_endpoint": f"tcp://{lower}:7001", "report_endpoint": f"tcp://{lower}:7002"}
    to_router = {"router_endpoint": f"tcp://{upper}:7003", "events_endpoint": f"tcp://{upper}:7004"}
    changes = {
        "router": {
            "prefix": network.prefix(0),
            "config": {
                **IMPATIENT["router"]["config"],
                "members": "",
                "controllers": [to_router["router_endpoint"]],
                "events": [to_router["events_endpoint"]],
                "wire_keys": str(folder / "router.keys"),
            },
        },
        "controller": {
            "prefix": network.prefix(1),
            "config": {
                **IMPATIENT["controller"]["config"],
                **to_workers,
                **to_router,
                "wire_keys": str(folder / "group.keys"),
            },
        },
        "worker": {
            "prefix": network.prefix(2),
            "config": {**to_workers, "wire_keys": str(folder / "workers.keys")},
        },
    }
    options = (*SMALL, "--groups", "1", "--tp", "2", "--disk-tier", f"{folder}:512MiB")
    with Cluster(*options, launcher=launcher(folder, changes)) as cluster:
        yield Faulty.begin(cluster, 20, 120)
        print(cluster.log)
        assert cluster.stop() == 0


@pytest.mark.area("survival")
@pytest.mark.parametrize("cable", [0, 1], ids=["router-controller", "controller-workers"])
def test_a_cable_is_cut(spread: Faulty, network: Network, cable: int) -> None:
    restarts, said = spread.view.restarts(), spread.cluster.log.count("controller_lost")

    def is_noticed() -> bool:
        if cable == 0:
            return spread.cluster.log.count("controller_lost") > said
        return spread.view.restarts() >= restarts + 2  # whom nobody could reach makes room for others

    def cut() -> None:
        with network.cut(cable):
            wait_for(is_noticed, 60)

    spread.disturb(cut)
    if cable == 0:
        assert spread.view.restarts() == restarts


@pytest.mark.area("survival")
def test_nothing_of_the_network_is_left(network: Network) -> None:
    names = list(network.names)
    network.close()
    assert not any(Path("/run/netns", name).exists() for name in names)
