"""One rank of `test_parallel`'s collectives: the same random calls through each backend, results to a file.

Usage: collectives_rank.py RANK SIZE FOLDER SEED BACKEND…
       collectives_rank.py RANK SIZE FOLDER die BACKEND        rank SIZE - 1 kills itself; the others exit with 7

A BACKEND is "gloo" or "shared", or "auto=gloo" and the like: what to ask for and what must come of it.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from torch import Tensor
from worker.driver import run_config

from trunkline.worker.errors import PeerLostError
from trunkline.worker.parallel.collectives import TensorParallel

CALLS = 60
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def connect(rank: int, size: int, folder: Path, backend: str) -> TensorParallel:
    rendezvous = f"file://{folder}/rendezvous-{backend}"
    asked, _, expected = backend.partition("=")
    config = run_config(folder, rank=rank, tp=size, rendezvous=rendezvous, collectives=asked)
    group = TensorParallel.connect(config, torch.device("cpu"))
    assert group.backend == (expected or asked)
    assert group.minimum(size - rank) == 1
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/trunkline-" in line]
    # Without a name once the first collective is over, so that nothing can stay behind.
    assert bool(mapped) == (group.backend == "shared")
    assert all(line.endswith("(deleted)") for line in mapped)
    return group


def random_results(group: TensorParallel, seed: int) -> list[Tensor]:
    """Results of the same calls for every backend; what only rank 0 gets is empty elsewhere."""
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


def wait_for_a_killed_rank(group: TensorParallel) -> None:
    try:
        group.all_reduce(torch.ones(4))
        if group.rank == group.size - 1:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        group.all_reduce(torch.ones(4))
    except PeerLostError:
        # As the worker leaves, whose threads may hang when the interpreter shuts down.
        os._exit(7)


def main() -> None:
    rank, size, folder, what = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    for backend in sys.argv[5:]:
        group = connect(rank, size, folder, backend)
        if what == "die":
            wait_for_a_killed_rank(group)
        torch.save(random_results(group, int(what)), folder / f"{backend}-{rank}.pt")
        group.close()


if __name__ == "__main__":
    main()
