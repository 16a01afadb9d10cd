"""One rank of `test_beams`: searches and samples with a checkpoint, and stores what rank 0 finds.

Usage: search_rank.py RANK TP FOLDER CHECKPOINT
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
from worker.beam_driver import Case, Search
from worker.driver import Driver, run_config

from trunkline.controller.sequences.samples import sample_seed
from trunkline.router.messages import Hypothesis
from trunkline.worker.messages import Sampling
from trunkline.worker.runner import Runner

CHUNK_SIZE = 8


def main() -> None:
    rank, tp, folder, checkpoint = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
    config = run_config(
        checkpoint,
        rank=rank,
        tp=tp,
        rendezvous=f"file://{folder}/rendezvous-{tp}",
        chunk_size=CHUNK_SIZE,
        pool_blocks=1000,
    )
    runner = Runner.load(config, lambda *_: None)
    runner.pool.data.fill_(float("nan"))
    cases = msgspec.msgpack.decode((folder / "cases.msgpack").read_bytes(), type=list[Case])
    results = run_cases(runner, cases)
    runner.close()
    if rank == 0:
        (folder / f"found-{tp}.msgpack").write_bytes(msgspec.msgpack.encode(results))


def run_cases(runner: Runner, cases: list[Case]) -> tuple[list[list[Hypothesis]], list[list[int]]]:
    """The hypotheses of each search; then what ran beside them, and samples of the first case's prompt."""
    driver = Driver(runner.execute, num_blocks=1000, chunk_size=CHUNK_SIZE)
    searches = [Search(driver, CHUNK_SIZE, case) for case in cases]
    found = [search.run() for search in searches]
    samples = driver.add_samples(cases[0].prompt, [Sampling(seed=sample_seed(1, i)) for i in range(3)])
    greedy = driver.add_samples(cases[0].prompt, [Sampling(temperature=0)] * 2)
    driver.run([samples[0], greedy[0]], 8)
    outputs = [search.output for search in searches] + [stream.output[:8] for stream in samples + greedy]
    return found, outputs


if __name__ == "__main__":
    main()
