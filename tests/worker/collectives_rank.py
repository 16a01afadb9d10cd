"""What single ranks do in tests of the collectives. A backend is "gloo" or "shared", or what is asked for and what
must come of it ("auto=gloo").
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import torch
import torch._prims.rng_prims  # generators, which workers on CPUs go without (`worker/light_torch.py`)
from torch import Tensor
from worker.ranks import Rank

from trunkline.worker.errors import PeerLostError
from trunkline.worker.tensor_parallel import TensorParallel

CALLS = 60
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def connect(rank: Rank, backend: str) -> TensorParallel:
    """Meet the others, and see that nothing of the shared memory can stay behind."""
    asked, _, expected = backend.partition("=")
    config = rank.config(Path(backend), collectives=asked)
    group = TensorParallel.connect(config, torch.device("cpu"))
    assert group.backend == (expected or asked)
    assert group.minimum(rank.size - rank.number) == 1
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/trunkline-" in line]
    assert bool(mapped) == (group.backend == "shared")
    assert all(line.endswith("(deleted)") for line in mapped), "without a name once the first collective is over"
    return group


def random_results(rank: Rank, seed: int, *backends: str) -> list[list[Tensor]]:
    """Return the results of the same random calls by each backend; what only rank 0 gets is empty elsewhere."""
    results = []
    for backend in backends:
        group = connect(rank, backend)
        results.append(_call_at_random(group, seed))
        group.close()
    return results


def _call_at_random(group: TensorParallel, seed: int) -> list[Tensor]:
    shared, own = random.Random(seed), random.Random(f"{seed} {group.rank}")
    generator = torch.Generator().manual_seed(seed)
    results = []
    for _ in range(CALLS):
        dtype = shared.choice(DTYPES)
        # The largest go through several rounds.
        shape = shared.choice(((1, 1), (3, 5), (32, 256), (7, 1001), (40, 4096)))
        mine = torch.randn(group.size, *shape, generator=generator)[group.rank].to(dtype)
        if own.random() < 0.1:
            time.sleep(own.random() * 5e-3)
        match shared.randrange(5):
            case 0 | 1:
                results.append(group.all_reduce(mine))
            case 2:
                results.append(group.all_gather(mine.t()))
            case 3:
                whole = group.gather_columns(mine)
                results.append(mine.new_empty(0) if whole is None else whole)
            case _:
                results.append(group.broadcast(mine))
        results.append(torch.tensor(group.minimum(own.randrange(-(10**12), 10**12))))
    return results


def lose_the_last_rank(rank: Rank, backend: str) -> None:
    """The last rank kills itself while the others wait for it; these exit with 7."""
    group = connect(rank, backend)
    try:
        group.all_reduce(torch.ones(4))
        if group.rank == group.size - 1:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        group.all_reduce(torch.ones(4))
    except PeerLostError:
        # As the worker leaves, whose threads may hang when the interpreter shuts down.
        os._exit(7)
