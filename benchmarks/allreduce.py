"""What one all-reduce between two ranks on this host costs, through `trunkline.worker.parallel`.

    python benchmarks/allreduce.py [--quick] [--json PATH]

A decode step of an L-layer model does 2 L + 1 of them (embedding, attention, MLP), so at batch 1 they can
cost more than the model. The message is what a step of 1, 8 or 32 rows sends at hidden size 256 in float32.
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
from report import Report, parse_arguments

from trunkline.worker.config import WorkerConfig
from trunkline.worker.parallel import TensorParallel

HIDDEN = 256


def rank_main(rank: int, rendezvous: str, repeats: int, pipe: Connection | None) -> None:
    """One rank; rank 0 sends microseconds by batch size."""
    torch.set_num_threads(1)
    config = WorkerConfig(
        model="", plan_endpoint="", report_endpoint="", rank=rank, tp=2, pool_blocks=1, rendezvous=rendezvous
    )
    group = TensorParallel.connect(config, torch.device("cpu"))
    times: dict[int, list[float]] = {}
    for rows in (1, 8, 32):
        tensor = torch.zeros(rows, HIDDEN)
        for _ in range(20):
            group.all_reduce(tensor)
        for _ in range(repeats):
            start = time.perf_counter()
            group.all_reduce(tensor)
            times.setdefault(rows, []).append((time.perf_counter() - start) * 1e6)
    if pipe is not None:
        pipe.send(times)
    group.close()


def run(arguments: argparse.Namespace) -> None:
    repeats = 200 if arguments.quick else 2000
    report = Report("allreduce")
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"file://{Path(folder, 'rendezvous')}"
        ranks = [
            context.Process(target=rank_main, args=(rank, rendezvous, repeats, sender if rank == 0 else None))
            for rank in range(2)
        ]
        for process in ranks:
            process.start()
        times: dict[int, list[float]] = receiver.recv()
        for process in ranks:
            process.join()
    for rows, values in times.items():
        case = {"impl": "gloo", "ranks": 2, "rows": rows, "bytes": rows * HIDDEN * 4}
        report.add(case, "time_p50", float(np.median(values)), "us", repeats)
        report.add(case, "time_mean", float(np.mean(values)), "us", repeats)
        report.add(case, "time_p90", float(np.quantile(values, 0.9)), "us", repeats)
    report.finish(arguments.json)


if __name__ == "__main__":
    run(parse_arguments(__doc__))
