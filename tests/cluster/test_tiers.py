"""KV below the device, against real processes: it sinks, comes back, outlives the cluster, and is never wrong.

The device holds one context, the host pool eight chunks: what a prompt computes must leave both for the next. All
texts are compared with a server that has no prefix cache, in float32.
"""

from __future__ import annotations

import random
import shutil
import threading
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from cluster.harness import Cluster, soon, wait_for
from worker.redis_server import RedisServer

pytestmark = pytest.mark.processes

MODEL = "trunkline-demo"
CHUNK = 64
OPTIONS = (
    "--tp",
    "2",
    "--dtype",
    "float32",
    "--threads",
    "1",
    "--kv-memory",
    "8MiB",
    "--host-tier",
    "2MiB",
    "--tier-policy",
    "look-ahead",
)
DISK_BYTES = 512 << 20
DEVICE_CHUNKS, HOST_CHUNKS = 32, 8
TOKENS = 12
SENTENCE = "The following functions are part of the standard library and are described here in turn. "
ROUNDS = 10  # at most
SUNK = 3
"""Prompts that have left the device and the host pool when all were asked."""
PROMPTS = [f"Chapter {index}. {SENTENCE * 18} Function number {index} returns" for index in range(10)]


def small_cluster(folder: Path, *options: str) -> Cluster:
    return Cluster(*OPTIONS, "--disk-tier", f"{folder}:{DISK_BYTES}", *options)


def ask(cluster: Cluster, prompt: str) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    return cluster.post("/v1/completions", body)


def say(cluster: Cluster, session: str, question: str) -> dict[str, Any]:
    body = {"model": MODEL, "session_id": session, "max_tokens": TOKENS, "temperature": 0}
    return cluster.post("/v1/chat/completions", body | {"messages": [{"role": "user", "content": question}]})


def text_of(answer: dict[str, Any]) -> str:
    choice = answer["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def chunks_of(answer: dict[str, Any]) -> int:
    """Whole chunks of its prompt."""
    return int(answer["usage"]["prompt_tokens"]) // CHUNK


def chunks_from(answer: dict[str, Any], *tiers: str) -> int:
    """Whole chunks that came from these tiers."""
    return sum(int(answer["cache"]["tiers"].get(tier, 0)) for tier in tiers) // CHUNK


def chunks_found(answer: dict[str, Any], *tiers: str) -> int:
    """Whole chunks in `tiers` (host and disk), with those for which it did not wait as computing was quicker."""
    is_slow = answer["cache"]["reason"] == "slow"
    return chunks_of(answer) if is_slow else chunks_from(answer, *(tiers or ("host", "disk")))


@pytest.fixture(scope="module")
def expected(plain: Cluster) -> list[str]:
    """What each prompt is to be answered, and the two turns of a session behind them."""
    session = begin(plain)
    return [text_of(ask(plain, p)) for p in PROMPTS] + [text_of(say(plain, session, q)) for q in "AB"]


def begin(cluster: Cluster) -> str:
    messages = [{"role": "system", "content": f"Sessions outlive clusters. {SENTENCE * 10}"}]
    return str(cluster.post("/v1/sessions", {"messages": messages})["id"])


def sink(cluster: Cluster, chunks: int) -> int:
    """Wait until the disk has all of these chunks, or nearly all; return how many. So small a host pool may lose
    some before the disk has them: a prompt that is asked again brings its own back, a session's turn does not."""
    for _ in range(ROUNDS):
        if soon(lambda: cluster.metric("tier_slots_used", tier="disk") >= chunks, 5):
            return chunks
        for prompt in PROMPTS:
            ask(cluster, prompt)
    kept = cluster.metric("tier_slots_used", tier="disk")
    assert kept >= 0.9 * chunks
    return kept


class Killed:
    """The disk tier of a cluster that was killed while it wrote to it."""

    def __init__(self, folder: Path, expected: list[str]) -> None:
        self.folder = folder
        with small_cluster(folder) as cluster:
            self.first = [ask(cluster, prompt) for prompt in PROMPTS]
            self.session = begin(cluster)
            self.first.append(say(cluster, self.session, "A"))
            self.chunks = sink(cluster, sum(map(chunks_of, self.first)))
            assert self.chunks > DEVICE_CHUNKS + HOST_CHUNKS
            self.again = [ask(cluster, prompt) for prompt in PROMPTS[:SUNK]]
            self.traffic = Traffic(cluster)
            written = cluster.metric("tier_writes_total", tier="disk")
            wait_for(lambda: cluster.metric("tier_writes_total", tier="disk") > written + 5, 20)
            cluster.kill()
            self.traffic.join(30)
        assert [text_of(answer) for answer in self.first] == expected[:-1]

    def copy(self, folder: Path) -> Path:
        """The group's folder in a copy for a cluster of its own."""
        shutil.copytree(self.folder, folder, dirs_exist_ok=True)
        (group,) = folder.glob("*/group-0")
        return group


class Traffic(threading.Thread):
    """Prompts one after the other that nobody has asked before, until the cluster is no more."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(daemon=True)
        self._cluster = cluster
        self.start()

    def run(self) -> None:
        index = 0
        try:
            with self._cluster.client() as client:
                while True:
                    index += 1
                    client.completions.create(model=MODEL, prompt=f"Page {index}. {SENTENCE * 30}", max_tokens=4)
        except (openai.OpenAIError, httpx.HTTPError):
            pass


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, expected: list[str]) -> Killed:
    return Killed(tmp_path_factory.mktemp("killed"), expected)


def test_what_has_sunk_to_disk_comes_back(killed: Killed, expected: list[str]) -> None:
    assert [text_of(answer) for answer in killed.again] == expected[:SUNK]
    # On a busy machine computing may be quicker than the disk, though not every time.
    found = [answer for answer in killed.again if answer["cache"]["tier"] == "disk"]
    assert any(chunks_from(answer, "host", "disk") == chunks_of(answer) for answer in found)


def test_a_killed_cluster_finds_its_kv_and_sessions_again(
    killed: Killed, expected: list[str], tmp_path: Path
) -> None:
    killed.copy(tmp_path)
    with small_cluster(tmp_path) as cluster:
        turn = say(cluster, killed.session, "B")
        assert text_of(turn) == expected[-1]
        history = killed.first[-1]["usage"]["total_tokens"]
        assert turn["usage"]["prompt_tokens_details"]["session_tokens"] == history
        answers = [ask(cluster, prompt) for prompt in PROMPTS]
        assert [text_of(answer) for answer in answers] == expected[:-2]
        found = sum(map(chunks_found, (turn, *answers)))
        assert found >= 0.95 * killed.chunks
        assert cluster.metric("tier_failures_total") == 0
        assert cluster.stop() == 0


def flip_bits(group: Path) -> None:
    """One in every MiB of one rank's slab: the other's is whole, and worth nothing without it."""
    rng = random.Random(0)
    with (group / "rank-1.slab").open("r+b") as slab:
        for start in range(0, slab.seek(0, 2), 1 << 20):
            offset = start + rng.randrange(1 << 20)
            slab.seek(offset)
            byte = slab.read(1)
            slab.seek(offset)
            slab.write(bytes([(byte or b"\0")[0] ^ 1 << rng.randrange(8)]))


def test_damaged_files_cost_hits_never_words(killed: Killed, expected: list[str], tmp_path: Path) -> None:
    flip_bits(killed.copy(tmp_path))
    with small_cluster(tmp_path) as cluster:
        answers = [ask(cluster, prompt) for prompt in PROMPTS]
        assert [text_of(answer) for answer in answers] == expected[:-2]
        found = sum(chunks_from(answer, "host", "disk") for answer in answers)
        assert found < 0.95 * killed.chunks  # it was damaged indeed
        # What replaces it is kept as ever. So small a host pool may lose a chunk before the disk has it.
        missing = [0]
        for _ in range(ROUNDS):
            again = [ask(cluster, prompt) for prompt in PROMPTS]
            assert [text_of(answer) for answer in again] == expected[:-2]
            missing.append(sum(chunks_of(a) - chunks_found(a, "device", "host", "disk") for a in again))
            if not missing[-1]:
                break
        assert missing[-1] == 0, missing
        assert cluster.stop() == 0


@pytest.mark.parametrize("ranks", [2, 1])
def test_clusters_share_a_remote_tier_and_do_without_it(
    redis_server: RedisServer, expected: list[str], tmp_path: Path, ranks: int
) -> None:
    """Also if the groups that have written the chunks have another number of ranks."""
    half = len(PROMPTS) // 2
    with small_cluster(tmp_path / "a", "--remote-tier", redis_server.url, "--tp", str(ranks)) as cluster:
        chunks = sum(chunks_of(ask(cluster, prompt)) for prompt in PROMPTS)
        client: Any = redis_server.client()
        least = 0.9 * ranks * chunks  # a part per rank; the host pool may lose a chunk before it is sent
        wait_for(lambda: sum(map(client.hlen, redis_server.places())) >= least, 20)
    with small_cluster(tmp_path / "b", "--remote-tier", redis_server.url) as cluster:
        answers = [ask(cluster, prompt) for prompt in PROMPTS[:half]]
        assert [text_of(answer) for answer in answers] == expected[:half]
        # Not all: on a busy machine the tier may not answer in time, or computing is predicted to be faster.
        found = [answer for answer in answers if answer["cache"]["tier"] == "remote"]
        assert found
        assert sum(chunks_from(a, "remote") for a in found) >= 0.5 * sum(map(chunks_of, found))
        redis_server.kill()
        # Half of the prompts are here by now, the others nowhere any more.
        assert [text_of(ask(cluster, prompt)) for prompt in PROMPTS] == expected[:-2]
        wait_for(lambda: cluster.metric("tier_up", tier="remote") == 0, 10)
        cluster.wait_healthy()
        assert cluster.stop() == 0
