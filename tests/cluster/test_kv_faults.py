"""A group pulls KV from another one that dies, freezes, leaves, lies, or is behind a bad cable: the text is that
of a group that has computed everything, and nothing is held afterwards. Texts are compared in float32."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cluster.faults import IMPATIENT, Network, launcher
from cluster.harness import Cluster, soon, wait_for
from cluster.kv_pair import OPTIONS, Pair, pulled, text_of

from trunkline.runtime.wire_keys import generate, write

pytestmark = [pytest.mark.processes, pytest.mark.area("survival"), pytest.mark.timeout(300)]

SLOW_BITS = 400_000
"""A tenth of a chunk takes a second."""
TRIES_SECONDS = 120.0
"""On a busy machine computing may seem quicker than a pull, so that none begins, though not every time."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    changes = launcher(tmp_path_factory.mktemp("kv-faults"), IMPATIENT)
    with Cluster(*OPTIONS, launcher=changes) as cluster:
        yield Pair(cluster)
        print(cluster.log)
        assert cluster.stop() == 0


def test_a_conversation_that_moves_is_pulled(pair: Pair) -> None:
    def is_pulled() -> bool:
        prompt = pair.prompt()
        told = pair.computed_at(0, prompt)
        longer = f"{prompt}{told} And what is the price of item 7?"
        moved = pair.ask_at(1, longer)
        pair.check()
        assert text_of(moved) == pair.computed_at(0, longer)
        pair.check()
        return pulled(moved) > 0

    wait_for(is_pulled, 60)  # on a busy machine computing may be quicker, though not every time


def dies(pair: Pair) -> None:
    os.kill(pair.view.pid("worker-0.0"), signal.SIGKILL)


def controller_dies(pair: Pair) -> None:
    os.kill(pair.view.pid("controller-0"), signal.SIGKILL)


def stays_silent(pair: Pair) -> None:
    """Longer than it is waited for."""
    before = pair.given_up("gone")
    soon(lambda: pair.given_up("gone") > before, 20)


def is_drained(pair: Pair) -> None:
    pair.cluster.command("drain", "0")
    pair.cluster.command("undrain", "0")


@pytest.mark.parametrize(
    ("then", "reasons"),
    [
        (stays_silent, ("gone",)),
        (dies, ("slow", "gone")),
        (controller_dies, ("slow", "gone")),
        (is_drained, ("slow", "gone")),
    ],
)
def test_a_peer_that_freezes_in_the_middle_of_a_pull(
    pair: Pair, then: Callable[[Pair], None], reasons: tuple[str, ...]
) -> None:
    def is_given_up() -> bool:
        prompt = pair.prompt()
        text = pair.computed_at(0, prompt)
        pair.turn_to(1)
        before, given_up = pair.served(), pair.given_up(*reasons)
        pid = pair.view.pid("worker-0.0")
        os.kill(pid, signal.SIGSTOP)
        try:
            with ThreadPoolExecutor(1) as pool:
                asking = pool.submit(pair.ask, prompt)
                wait_for(lambda: pair.served()[1] > before[1], 10)
                then(pair)
                answer = asking.result()
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        assert text_of(answer) == text
        assert not pulled(answer)
        noticed = soon(lambda: pair.given_up(*reasons) > given_up, 5)
        pair.check()
        return noticed

    wait_for(is_given_up, TRIES_SECONDS)
    pair.pulls_again()
    pair.check()


def test_bytes_that_changed_in_a_peers_memory_are_not_believed(pair: Pair) -> None:
    def is_noticed() -> bool:
        prompt = pair.prompt()
        text = pair.computed_at(0, prompt)
        if not pulled(pair.ask_at(1, prompt)):
            return False  # computing was quicker, and so there is no checksum of what is there
        lost = pair.given_up("lost")
        with pair.flipped("worker-0.0"):
            victim = pair.view.pid("worker-1.0")
            os.kill(victim, signal.SIGKILL)
            pair.view.wait_replaced("worker-1.0", victim)
            answer = pair.ask_at(1, prompt)
            noticed = soon(lambda: pair.given_up("lost") > lost, 5)
        assert text_of(answer) == text
        assert not pulled(answer)
        pair.check()
        return noticed

    wait_for(is_noticed, 60)
    pair.pulls_again()
    pair.check()


@pytest.mark.parametrize("role", ["worker", "controller"])
def test_a_part_that_knows_nothing_of_peers(role: str, tmp_path: Path) -> None:
    unaware: dict[str, dict[str, Any]] = {
        "worker": {"worker": {"config": {"export": "", "exchange_fingerprint": ""}}},
        "controller": {"controller": {"config": {"peers": False}}},
    }
    with Cluster(*OPTIONS, launcher=launcher(tmp_path, unaware[role])) as cluster:
        pair = Pair(cluster)
        prompt = pair.prompt()
        text = pair.computed_at(0, prompt)
        answer = pair.ask_at(1, prompt)
        assert text_of(answer) == text
        assert not pulled(answer)
        assert cluster.metric("routing_expected_tokens_total", kv="peer") == 0
        pair.check()
        assert cluster.stop() == 0


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    network = Network(2)
    yield network
    network.close()


@pytest.fixture(scope="module")
def apart(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The ranks of the two groups on two hosts, each with process ids of its own, so that KV travels by TCP."""
    folder = tmp_path_factory.mktemp("kv-apart")
    keys = folder / "keys"
    write(generate(), keys)
    changes: dict[str, dict[str, Any]] = {
        role: {"config": {**IMPATIENT.get(role, {}).get("config", {}), "wire_keys": str(keys)}}
        for role in ("router", "controller")
    }
    for group in range(2):
        config = {
            "wire_keys": str(keys),
            "export": f"tcp://{Network.address(0, group)}:*",
            "parent_pid": 0,
        }
        prefix = [*network.prefix(group), "unshare", "--pid", "--fork", "--kill-child"]
        changes[f"worker-{group}.0"] = {"prefix": prefix, "config": config}
    with Cluster(*OPTIONS, launcher=launcher(folder, changes)) as cluster:
        yield Pair(cluster)
        print(cluster.log)
        assert cluster.stop() == 0


def test_a_conversation_moves_to_another_host(apart: Pair) -> None:
    apart.pulls_again()
    apart.check()


@pytest.mark.parametrize("fault", ["slow", "deaf"])
def test_a_bad_cable(apart: Pair, network: Network, fault: str) -> None:
    def is_given_up() -> bool:
        prompt = apart.prompt()
        text = apart.computed_at(0, prompt)
        apart.turn_to(1)
        given_up = apart.given_up("slow", "gone")
        began = time.monotonic()
        with network.slow(0, SLOW_BITS) if fault == "slow" else network.deaf(0):
            answer = apart.ask(prompt)
            print(f"{fault}: answered after {time.monotonic() - began:.2f} s")
            noticed = soon(lambda: apart.given_up("slow", "gone") > given_up, 5)
        assert text_of(answer) == text
        apart.check()
        return noticed

    wait_for(is_given_up, TRIES_SECONDS)
    apart.pulls_again()
    apart.check()
