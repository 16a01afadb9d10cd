"""Which tokens the ranks of a group choose together, each of which has some columns of the logits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from seeds import seeds
from torch import Tensor

from trunkline.kernels.plan import WritePlan
from trunkline.kvstore.chunks import Int32Array, pack_int32
from trunkline.worker.batch.batch import ForwardBatch
from trunkline.worker.batch.sequences import BatchSequence
from trunkline.worker.messages import Join, Sampling
from trunkline.worker.sampling.beams import BeamSearches
from trunkline.worker.sampling.sampler import Sampler
from trunkline.worker.sampling.selection import Selector
from trunkline.worker.tensor_parallel import TensorParallel

CPU = torch.device("cpu")
COLUMNS = 40
"""Of each rank."""


class ThreadRank(TensorParallel):
    """A rank that is a thread, and gathers through a list that all ranks see."""

    def __init__(self, rank: int, parts: list[Tensor], barrier: Barrier) -> None:
        super().__init__(rank, len(parts), CPU, backend="none")
        self._parts, self._barrier = parts, barrier

    def all_gather(self, tensor: Tensor) -> Tensor:
        self._parts[self.rank] = tensor
        self._barrier.wait(60)
        every = torch.stack(self._parts)
        self._barrier.wait(60)
        return every


def greedy_rows(count: int, forks: tuple[int, ...]) -> ForwardBatch:
    """A step's batch of rows that take their largest logit, as far as selection looks at it."""
    nothing = np.zeros(0, dtype=np.int32)
    rows = [
        BatchSequence(Join(1 + i, pack_int32([3]), 0, 1, pack_int32([0]), Sampling(temperature=0.0)))
        for i in range(count + len(forks))
    ]
    return ForwardBatch(
        lambda: (nothing, nothing),
        count,
        WritePlan(64, nothing),
        None,
        None,
        rows,
        samples_changed=True,
        state_rows=None,
        fork_rows=forks,
    )


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("seed", seeds(1))
def test_all_ranks_take_the_largest_logit(size: int, seed: int) -> None:
    """On a tie the lowest id; of rows with NaN some id that exists. Step after step in the same memory."""
    rng = np.random.default_rng(seed)
    steps = []
    for _ in range(8):
        logits = rng.integers(-9, 10, (6, size * COLUMNS)).astype(np.float32)  # many ties
        logits[1] = -np.inf
        logits[2] = rng.normal(size=size * COLUMNS)
        logits[3, rng.integers(size * COLUMNS)] = np.nan
        steps.append(logits)
    parts, barrier = [torch.empty(0)] * size, Barrier(size)

    def chosen(rank: int) -> list[Int32Array]:
        shard = SimpleNamespace(config=SimpleNamespace(vocab_size=size * COLUMNS), vocab_start=rank * COLUMNS)
        group, sampler = ThreadRank(rank, parts, barrier), Sampler(size * COLUMNS, CPU)
        selector = Selector(group, sampler, BeamSearches(), shard, 64)  # type: ignore[arg-type]
        own, found = torch.empty(6, COLUMNS), []
        for logits in steps:
            own.copy_(torch.from_numpy(logits[:, shard.vocab_start : shard.vocab_start + COLUMNS]))
            batch = greedy_rows(6, (2, 0))
            found.append(selector.select(batch, own).tokens)
            assert [row.tokens[-1] for row in batch.samples] == found[-1].tolist()
        return found

    with ThreadPoolExecutor(size) as threads:
        by_rank = list(threads.map(chosen, range(size)))
    for step, logits in enumerate(steps):
        for found in by_rank:
            tokens = found[step]
            assert tokens.dtype == np.int32
            assert tokens.tolist() == by_rank[0][step].tolist()
            for sample, row in enumerate([*range(6), 2, 0]):
                if row == 3:
                    assert 0 <= tokens[sample] < size * COLUMNS
                else:
                    assert tokens[sample] == logits[row].argmax()
