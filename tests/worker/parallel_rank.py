"""One rank of `test_parallel`: generates with every checkpoint given, and stores what rank 0 reports.

Usage: parallel_rank.py RANK TP FOLDER CHECKPOINT…
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
from worker.driver import generate, run_config

from trunkline.worker.messages import Sampling
from trunkline.worker.runner import Runner


def main() -> None:
    rank, tp, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    for checkpoint in map(Path, sys.argv[4:]):
        rendezvous = f"file://{folder}/rendezvous-{checkpoint.name}-{tp}"
        config = run_config(checkpoint, rank=rank, tp=tp, rendezvous=rendezvous)
        runner = Runner.load(config, lambda *_: None)
        runner.pool.data.fill_(float("nan"))
        streams = generate(runner)
        # Without log-probabilities the ranks agree on the largest logit among themselves.
        plain = generate(runner, Sampling(temperature=0), first_step=runner.steps + 1)
        runner.close()
        assert rank or [s.output for s in plain] == [s.output for s in streams]
        if rank == 0:
            report = [(s.prompt, s.output, s.logprobs) for s in streams]
            (folder / f"{checkpoint.name}-{tp}.msgpack").write_bytes(msgspec.msgpack.encode(report))


if __name__ == "__main__":
    main()
