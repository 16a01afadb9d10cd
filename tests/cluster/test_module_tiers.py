"""Modules below the device, against real processes: they sink, come back, outlive the cluster, and stay pinned.

One rank whose device holds one context and whose host pool holds half of that; everything is compared with two
ranks that have all of it on their devices.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from cluster.harness import Cluster, soon, wait_for
from cluster.module_calls import (
    ask,
    ask_plain,
    details_of,
    look,
    module_text,
    post,
    prompt_source,
    same,
    schema_source,
    tiers_of,
)

pytestmark = pytest.mark.processes

OPTIONS = (
    "--tp",
    "1",
    "--dtype",
    "float32",
    "--threads",
    "1",
    "--kv-memory",
    "16MiB",
    "--host-tier",
    "8MiB",
    "--tier-policy",
    "look-ahead",
)
DISK_BYTES = 512 << 20
CHUNK_BYTES = 512 << 10
"""Of a chunk's KV."""
NAMES = ("harbour", "village")
SELECTIONS = ("abc", "ac", "ab")
FILLERS = 6
TRIES = 5
"""A busy machine's disk may be so late that computing is faster; then the modules are pushed out once more."""
REPEATS = 3
"""Modules of two chunks: all that a prompt imports fits into half of the host pool, and comes together."""


def small_cluster(folder: Path, *options: str) -> Cluster:
    return Cluster(*OPTIONS, "--disk-tier", f"{folder}:{DISK_BYTES}", *options)


def ask_all(cluster: Cluster) -> list[dict[str, Any]]:
    return [ask(cluster, prompt_source(name, modules)) for name in NAMES for modules in SELECTIONS]


def push_out(cluster: Cluster) -> None:
    """Prompts that leave no room for anything else on the device, nor in host memory."""
    for index in range(FILLERS):
        ask_plain(cluster, module_text(f"filler {index}", 60), max_tokens=1)


def from_tier(answer: dict[str, Any], tier: str) -> int:
    found: int = answer["cache"]["tiers"].get(tier, 0)
    return found


@pytest.fixture(scope="module")
def expected(cluster: Cluster) -> list[dict[str, Any]]:
    for name in NAMES:
        post(cluster, schema_source(name, repeats=REPEATS))
    return ask_all(cluster)


class Killed:
    """The disk tier of a cluster that was killed, after its modules had been everywhere."""

    def __init__(self, folder: Path, expected: list[dict[str, Any]]) -> None:
        self.folder = folder
        with small_cluster(folder) as cluster:
            pinned, other = NAMES
            post(cluster, schema_source(pinned, repeats=REPEATS), pin=True)
            post(cluster, schema_source(other, repeats=REPEATS))
            assert all(map(same, ask_all(cluster), expected))
            # So small a host pool may lose what the disk does not have yet.
            chunks = sum(look(cluster, name)["usage"]["bytes"] for name in NAMES) // CHUNK_BYTES
            soon(lambda: cluster.metric("tier_slots_used", tier="disk") >= chunks, 10)
            for _ in range(TRIES):
                push_out(cluster)
                is_sunk = soon(lambda: tiers_of(cluster, pinned) | tiers_of(cluster, other) == {"disk"}, 10)
                cluster.refresh()
                before = cluster.gauge("texts_encoded_total")
                self.sunk = ask_all(cluster)
                cluster.refresh()
                self.encoded = cluster.gauge("texts_encoded_total") - before
                if is_sunk and not self.encoded:
                    break
            self.pinned = cluster.gauge("chunks_pinned")
            assert self.pinned > 0
            cluster.kill()


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, expected: list[dict[str, Any]]) -> Killed:
    return Killed(tmp_path_factory.mktemp("killed"), expected)


def test_modules_come_back_from_disk(killed: Killed, expected: list[dict[str, Any]]) -> None:
    """Nothing is computed again, and everything is said as from the device (theorem 5)."""
    assert all(map(same, killed.sunk, expected))
    cached, modules = details_of(killed.sunk[0])
    assert from_tier(killed.sunk[0], "disk") == cached >= modules > 200
    assert killed.encoded == 0


def test_a_killed_cluster_finds_its_schemas_and_modules(
    killed: Killed, expected: list[dict[str, Any]], tmp_path: Path
) -> None:
    shutil.copytree(killed.folder, tmp_path, dirs_exist_ok=True)
    pinned, other = NAMES
    with small_cluster(tmp_path) as cluster:
        found = look(cluster, pinned)
        assert (found["status"], found["pin"], found["version"]) == ("ready", True, 1)
        assert tiers_of(cluster, pinned) | tiers_of(cluster, other) == {"disk"}
        first = ask_all(cluster)
        assert all(map(same, first, expected))
        # Of how many short texts it says that to compute them is faster depends on what it has measured so far.
        assert any(from_tier(answer, "disk") for answer in first[:: len(SELECTIONS)])
        # The pin was in memory; the first use has set it again.
        wait_for(lambda: cluster.gauge("chunks_pinned") == killed.pinned, 10)
        assert cluster.metric("tier_failures_total") == 0
        assert post(cluster, schema_source(other, repeats=REPEATS))["usage"]["computed_tokens"] == 0
        assert cluster.stop() == 0
