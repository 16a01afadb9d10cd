"""What one all-reduce between ranks on this host costs, through `trunkline.worker.tensor_parallel`.

    python benchmarks/allreduce.py [--quick] [--json PATH] [--ranks N] [--dtype NAME]

A decode step of an L-layer model does 2 L + 1 of them (embedding, attention, MLP), so at batch 1 they can
cost more than the model. 1.5 KB is a row of hidden size 768 in bfloat16, 3 MB a prompt of 2,048 tokens of it.
Shared memory and gloo take turns in the same processes; `memcpy` is the limit: what rank 0 needs to copy such a
message once.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from report import Report, argument_parser
from torch import Tensor

from trunkline.worker.config import WorkerConfig
from trunkline.worker.tensor_parallel import TensorParallel

SIZES = (1024, 1536, 8 * 1024, 48 * 1024, 256 * 1024, 1024 * 1024, 3 * 1024 * 1024)
"""Bytes of a message."""
TURN = 20
"""Calls of one implementation in a row, before the next takes its turn."""

Times = dict[tuple[str, int], list[float]]


def call_us(group: TensorParallel, impl: str, tensor: Tensor, copy: Tensor) -> float:
    start = time.perf_counter()
    if impl == "shared":
        group.all_reduce(tensor)
    elif impl == "gloo":
        # The connected group that shared memory was set up through.
        dist.all_reduce(tensor)
    else:
        copy.copy_(tensor)
    return (time.perf_counter() - start) * 1e6


def rank_main(
    rank: int, arguments: argparse.Namespace, rendezvous: str, turns: int, pipe: Connection | None
) -> None:
    """One rank; rank 0 sends microseconds by implementation and size."""
    torch.set_num_threads(1)
    config = WorkerConfig(
        model="",
        plan_endpoint="",
        report_endpoint="",
        rank=rank,
        tp=arguments.ranks,
        pool_blocks=1,
        rendezvous=rendezvous,
        collectives="shared",
    )
    group = TensorParallel.connect(config, torch.device("cpu"))
    dtype: torch.dtype = getattr(torch, arguments.dtype)
    times: Times = {}
    with torch.inference_mode():
        for size in SIZES:
            tensor = torch.zeros(size // dtype.itemsize, dtype=dtype)
            copy = torch.empty_like(tensor)
            large = size > 100_000
            for turn in range(max(2, turns // 10) if large else turns):
                for impl in ("shared", "gloo", "memcpy"):
                    taken = [call_us(group, impl, tensor, copy) for _ in range(TURN)]
                    # The first turn, and the first call after somebody else's, find cold caches and peers asleep.
                    if turn:
                        times.setdefault((impl, size), []).extend(taken[1:])
    if pipe is not None:
        pipe.send(times)
    group.close()


def run(arguments: argparse.Namespace) -> None:
    turns = 30 if arguments.quick else 150
    report = Report("allreduce")
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"file://{Path(folder, 'rendezvous')}"
        ranks = [
            context.Process(
                target=rank_main, args=(rank, arguments, rendezvous, turns, sender if rank == 0 else None)
            )
            for rank in range(arguments.ranks)
        ]
        for process in ranks:
            process.start()
        sender.close()
        times: Times = receiver.recv()
        for process in ranks:
            process.join()
    for (impl, size), values in times.items():
        case = {"impl": impl, "ranks": arguments.ranks, "dtype": arguments.dtype, "bytes": size}
        report.add(case, "time_p50", float(np.median(values)), "us", len(values))
        report.add(case, "time_mean", float(np.mean(values)), "us", len(values))
        report.add(case, "time_p90", float(np.quantile(values, 0.9)), "us", len(values))
    report.finish(arguments.json)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16", "float64"))
    run(parser.parse_args())


if __name__ == "__main__":
    main()
