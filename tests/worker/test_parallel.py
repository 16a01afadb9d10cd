"""Tensor parallelism: real ranks over gloo give the logits of `transformers`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from worker.checkpoints import make_checkpoint
from worker.driver import Stream
from worker.test_equality import LAYOUTS, largest_difference

from trunkline.controller.messages import TopLogprobs
from trunkline.worker.checkpoint import Shard, load_weights
from trunkline.worker.families import check_model
from trunkline.worker.messages import Sampling

TESTS = Path(__file__).parents[1]
CASES = {2: ("mha", "gqa", "mqa-tied", "biases", "llama3-rope"), 4: ("mha", "gqa", "mqa-tied")}
"""Head layouts with as many, fewer and far fewer KV heads than ranks; the vocabulary of 101 is padded."""


@pytest.mark.parametrize("tp", [2, 4])
def test_logits_equal_transformers(tp: int, tmp_path: Path) -> None:
    folders = [make_checkpoint(tmp_path / name, **LAYOUTS[name]) for name in CASES[tp]]
    command = [sys.executable, str(TESTS / "worker" / "parallel_rank.py")]
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([*command, str(rank), str(tp), str(tmp_path), *map(str, folders)], env=environment)
        for rank in range(tp)
    ]
    assert [rank.wait(timeout=120) for rank in ranks] == [0] * tp
    for folder in folders:
        data = (tmp_path / f"{folder.name}-{tp}.msgpack").read_bytes()
        reports = msgspec.msgpack.decode(data, type=list[tuple[list[int], list[int], list[TopLogprobs]]])
        for prompt, output, logprobs in reports:
            stream = Stream(0, prompt, Sampling(), [], output=output, logprobs=logprobs)
            assert len(output) >= 4
            assert largest_difference(folder, stream) <= 1e-4, folder.name


@pytest.mark.parametrize("name", ["mha", "gqa", "biases", "sharded"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_rank_reads_only_its_slices(name: str, tp: int, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / name, **LAYOUTS[name])
    config = check_model(folder, tp, "float32")
    device = torch.device("cpu")
    shards = [Shard(config, rank, tp) for rank in range(tp)]
    loaded = [load_weights(folder, shard, torch.float32, device, lambda *_: None) for shard in shards]
    hidden, head_dim = config.hidden_size, config.head_dim
    queries, keys = config.heads * head_dim // tp, max(1, config.kv_heads // tp) * head_dim
    mlp = config.intermediate_size // tp
    for shard, weights in zip(shards, loaded, strict=True):
        attention = (2 * queries + 2 * keys) * hidden
        biases = queries + 2 * keys + 2 * mlp + (2 * hidden if shard.rank == 0 else 0)
        layer = attention + 3 * mlp * hidden + 2 * hidden + (biases if config.mlp_bias else 0)
        vocabulary = len(range(*shard.vocab_rows.indices(config.vocab_size)))
        floats = config.layers * layer + hidden + 2 * vocabulary * hidden
        assert weights.bytes_read == 4 * floats
        assert weights.head.shape == (-(-config.vocab_size // tp), hidden)
    # Together the ranks hold every row of the vocabulary once, and zeros behind it.
    table = torch.cat([weights.embedding for weights in loaded])
    assert not table[config.vocab_size :].any()
    whole = load_weights(folder, Shard(config, 0, 1), torch.float32, device, lambda *_: None)
    assert torch.equal(table[: config.vocab_size], whole.embedding)
