"""One rank of `test_hung_device`: its first step waits for a device that never answers, as happens when another
rank of a collective on GPUs has died.

Usage: hung_rank.py CONFIG.json MARKER        MARKER appears when the step waits

Nothing of Python reaches the main thread there: it is inside a C function that does not return.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trunkline.worker.config import load_config
from trunkline.worker.service import serve


def wait_for_the_device(_plan: object) -> None:
    Path(sys.argv[2]).touch()
    while True:
        ctypes.CDLL(None).pause()


def load(*_: object) -> Any:
    return SimpleNamespace(
        copier=None,
        num_blocks=32,
        block_bytes=1024,
        host_slots=0,
        swap_us_per_block=0.0,
        is_compiling=False,
        check=lambda: None,
        grammar_reports=list,
        execute=wait_for_the_device,
    )


if __name__ == "__main__":
    os._exit(serve(load_config(Path(sys.argv[1])), load))
