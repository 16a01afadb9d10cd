"""One rank of `test_cuts`: a session with cuts; rank 0 stores what the model said.

Usage: cut_rank.py RANK TP FOLDER CHECKPOINT
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from worker.cuts import draw, load, make_driver, make_session


def main() -> None:
    rank, tp, folder, checkpoint = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
    runner = load(checkpoint, rank=rank, tp=tp, rendezvous=f"file://{folder}/rendezvous")
    rng = np.random.default_rng(4)
    session = make_session(runner, make_driver(runner))
    turns = [session.turn(draw(rng, 41), 5)]
    session.cut((4, 25))
    session.forget_output()
    turns.append(session.turn(draw(rng, 9), 20))
    runner.close()
    if rank == 0:
        for index, (tokens, logprobs) in enumerate(turns):
            np.savez(folder / f"turn-{index}.npz", tokens=np.array(tokens), logprobs=logprobs)


if __name__ == "__main__":
    main()
