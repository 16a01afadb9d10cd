"""Sixty sessions of a model of 110 million parameters, while a group is drained and another loses its disk.

Texts are compared with a server that computes everything anew. The weights are random; the tokenizer and the chat
template are the demo model's.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cluster.chaos import View
from cluster.conversations import MODEL, Conversations, expected_of, sessions_of
from cluster.harness import Cluster
from transformers import LlamaConfig, LlamaForCausalLM

from trunkline.deploy.config.models import DEMO_FOLDER

pytestmark = [
    pytest.mark.processes,
    pytest.mark.soak,
    pytest.mark.area("survival"),
    pytest.mark.timeout(1500),
]

COUNT = 60
FOUND_MIN = 0.9
"""Smallest share of cached prompt tokens that is found after a drain."""
METRICS_AGE_S = 2.0
"""Metrics may be so old."""
OPTIONS = ("--tp", "1", "--dtype", "float32", "--threads", "1", "--served-model-name", MODEL)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("110M")
    for file in DEMO_FOLDER.iterdir():
        if "token" in file.name or file.suffix == ".jinja":
            shutil.copy(file, folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[str]]:
    with Cluster(*OPTIONS, "--no-prefix-cache", "--kv-memory", "1GiB", model=str(checkpoint)) as plain:
        return expected_of(plain, "large", turns=4, count=COUNT)


@pytest.fixture
def cluster(checkpoint: Path, tmp_path: Path) -> Iterator[Cluster]:
    size = ("--kv-memory", "1GiB", "--disk-tier", f"{tmp_path / 'kv'}:3GiB")
    with Cluster("--groups", "3", "--routers", "2", *OPTIONS, *size, model=str(checkpoint)) as running:
        yield running
        assert running.stop() == 0


def cached_tokens(cluster: Cluster) -> int:
    """Prompt tokens whose KV was found so far."""
    time.sleep(METRICS_AGE_S)
    return cluster.metric("controller_cached_tokens_total")


def test_a_drained_group(cluster: Cluster, expected: list[list[str]]) -> None:
    view, conversations = View(cluster), Conversations(cluster, "large", COUNT)
    routers = view.pids("router")
    assert conversations.turn(cluster, 0) == expected[0]
    before = cached_tokens(cluster)
    assert conversations.turn(cluster, 1) == expected[1]
    at_home = cached_tokens(cluster) - before
    cluster.command("drain", "0")
    before = cached_tokens(cluster)
    assert conversations.turn(cluster, 2) == expected[2]
    found = cached_tokens(cluster) - before
    print(f"cached prompt tokens of a turn: {at_home} at home, {found} after the drain")
    assert found >= FOUND_MIN * at_home
    assert view.pids("router") == routers
    assert sessions_of(cluster) == set(conversations.ids)


def test_a_lost_disk(cluster: Cluster, expected: list[list[str]], tmp_path: Path) -> None:
    view, conversations = View(cluster), Conversations(cluster, "large", COUNT)
    routers = view.pids("router")
    assert [conversations.turn(cluster, number) for number in range(2)] == expected[:2]
    victims = [view.pid(name) for name in ("controller-0", "worker-0.0")]
    slabs = {os.readlink(link) for link in Path(f"/proc/{victims[1]}/fd").iterdir() if link.exists()}
    [slab] = [Path(path) for path in slabs if path.endswith("rank-0.slab")]
    shutil.rmtree(slab.parent)
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    assert conversations.turn(cluster, 2) == expected[2]
    view.wait_replaced("controller-0", victims[0])
    assert conversations.turn(cluster, 3) == expected[3]
    assert view.pids("router") == routers
    assert sessions_of(cluster) == set(conversations.ids)
