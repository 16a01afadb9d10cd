"""A rank for `test_shared_group` that is a process of its own, to be killed.

Usage: shared_group_rank.py FILE RANK SIZE CALLS

Prints "joined", takes part in CALLS all-reduces once there is a line to read, prints "done" and hangs.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from trunkline.kernels.shared_group import SharedGroup


def main() -> None:
    path, rank, size, calls = Path(sys.argv[1]), *map(int, sys.argv[2:])
    group = SharedGroup(path, rank, size)
    print("joined", flush=True)
    sys.stdin.readline()
    for _ in range(calls):
        group.all_reduce(torch.ones(3))
    print("done", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()
