"""How fast KV moves between the tiers of one rank, beside what memory and disk give at all in the same run.

    python benchmarks/tier_movers.py [--quick] [--json PATH] [--slab PATH] [--dtype NAME]

Blocks are those of the 110 M Llama of `small_model` (12 layers, 4 KV heads of 64, chunks of 64 tokens).

- `save`, `load`: through `Copier`, host slots in order and scattered; `share` is that of a single-threaded memory
  copy of the same bytes. `load` comes layer by layer, as prefill takes it; `packed` blocks are in the order in
  which the kernels read keys, and are turned into plain order on the way.
- `write`, `read`: through `TierService`, host pool to slab and back, checksums included; `share` is that of plain
  direct I/O of pieces of the same size by as many threads: of the faster of `fio`, if it is installed, and a bare
  loop of pwrite and pread. All write over what was written before.

The kinds take turns in the same process, so that a noisy machine hits all of them; each figure is the median of
the runs.
"""

from __future__ import annotations

import json
import mmap
import os
import queue
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from report import Report, argument_parser

from trunkline.controller.reports import MoveOutcome, Probed
from trunkline.kernels.large_pages import advise_large_pages
from trunkline.kernels.load import load_kernels
from trunkline.kernels.ops import KvPool
from trunkline.kvstore.chunks import NAME_BYTES, Int32Array, pack_int32
from trunkline.kvstore.tier import TierKind
from trunkline.worker.config import WorkerConfig
from trunkline.worker.messages import StepPlan, TierMove, TierMoves
from trunkline.worker.tiers.copier import Copier
from trunkline.worker.tiers.host_pool import HostPool
from trunkline.worker.tiers.tier_service import TierService

LAYERS: Final = 12
KV_HEADS: Final = 4
HEAD_DIM: Final = 64
CHUNK: Final = 64
THREADS: Final = 4
PAGE: Final = 4096


class Setup:
    """A device pool, a host pool of twice its size, and a slab."""

    def __init__(self, blocks: int, dtype: torch.dtype, slab: Path) -> None:
        self.blocks = blocks
        data = torch.empty(blocks, LAYERS, 2, KV_HEADS, CHUNK, HEAD_DIM, dtype=dtype)
        advise_large_pages(data)
        self.pool = KvPool.wrap(data.normal_())
        self.kernels = load_kernels("auto", "cpu", 1)
        self.host = HostPool(2 * blocks, self.pool)
        self.copier = Copier(self.host, data.device, blocks, lambda: load_kernels("auto", "cpu", 1))
        self.block_bytes = self.host.slot_bytes
        config = WorkerConfig(
            model="",
            plan_endpoint="",
            report_endpoint="",
            disk_path=str(slab),
            disk_bytes=PAGE + 2 * blocks * (self.block_bytes + 2 * PAGE),
            tier_fingerprint="00",
            io_threads=THREADS,
        )
        self.reports: queue.SimpleQueue[list[MoveOutcome] | Probed] = queue.SimpleQueue()
        self.tiers = TierService(config, self.copier, self.reports.put)
        if self.tiers.problem:
            sys.exit(self.tiers.problem)
        self.step = 0
        rng = np.random.default_rng(0)
        self.slots = {
            "in order": np.arange(blocks, dtype=np.int32),
            "scattered": np.sort(rng.permutation(2 * blocks)[:blocks]).astype(np.int32),
        }
        for slots in self.slots.values():  # takes the pages
            self.save(slots)

    def moves(self, slots: Int32Array) -> bytes:
        return pack_int32(np.stack([np.arange(self.blocks), slots, np.full(self.blocks, 1)], axis=1).astype("i4"))

    def save(self, slots: Int32Array) -> float:
        """Seconds from the order until everything is saved."""
        started = time.perf_counter()
        self.step += 1
        gate = self.copier.begin(StepPlan(self.step, 1, saves=self.moves(slots), save_fence=self.step))
        self.copier.finish(gate)
        return time.perf_counter() - started

    def load(self, slots: Int32Array) -> float:
        """Seconds from the order until every layer is there."""
        started = time.perf_counter()
        self.step += 1
        gate = self.copier.begin(StepPlan(self.step, 1, loads=self.moves(slots), load_fence=self.step))
        self.copier.finish(gate)
        return time.perf_counter() - started

    def unpack(self) -> None:
        """Blocks in plain order, as those that are not full."""
        self.pool.data.normal_()
        self.pool.packed.zero_()

    def move(self, *, is_write: bool) -> float:
        """Seconds for all blocks between the first host slots and the slab."""
        started = time.perf_counter()
        moves = [
            TierMove(slot, TierKind.DISK, is_write, slot, 1, slot, 1, slot.to_bytes(NAME_BYTES, "little"))
            for slot in range(self.blocks)
        ]
        self.tiers.move(TierMoves(self.step, moves))
        done = 0
        while done < len(moves):
            outcomes = self.reports.get()
            if not isinstance(outcomes, list) or any(outcome.status for outcome in outcomes):
                sys.exit(f"a move failed: {outcomes}")
            done += len(outcomes)
        return time.perf_counter() - started


def memory_copy(size: int) -> Callable[[], float]:
    """Seconds of one thread to copy so many bytes, where both sides were used before."""
    sides = [torch.empty(size, dtype=torch.uint8) for _ in range(2)]
    for side in sides:
        advise_large_pages(side)
        side.fill_(1)

    def run() -> float:
        started = time.perf_counter()
        sides[0].copy_(sides[1])
        return time.perf_counter() - started

    return run


class RawDisk:
    """Plain direct I/O on a file beside the slab: what the disk gives for pieces of a slot."""

    def __init__(self, path: Path, pieces: int, piece: int) -> None:
        self._path, self._pieces, self._piece = path, pieces, piece
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        # As the host pool's: aligned, on large pages, used before.
        area = torch.frombuffer(mmap.mmap(-1, pieces * piece), dtype=torch.uint8)
        advise_large_pages(area)
        self._memory = area.random_().view(pieces, piece).numpy()
        self._threads = ThreadPoolExecutor(THREADS)
        self.seconds("loop", is_write=True)

    def seconds(self, by: str, *, is_write: bool) -> float:
        return self._fio(is_write) if by == "fio" else self._loop(is_write)

    def _fio(self, is_write: bool) -> float:
        each = self._pieces // THREADS
        command = ["fio", "--name=raw", f"--filename={self._path}", "--direct=1", "--ioengine=psync"]
        command += [
            f"--rw={'write' if is_write else 'read'}",
            f"--bs={self._piece}",
            f"--size={each * self._piece}",
        ]
        command += [f"--numjobs={THREADS}", f"--offset_increment={each * self._piece}", "--thread"]
        command += ["--group_reporting", "--output-format=json", "--fallocate=none"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        job: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        figures = job["write" if is_write else "read"]
        return float(self._pieces * self._piece / figures["bw_bytes"])

    def _loop(self, is_write: bool) -> float:
        call = os.pwritev if is_write else os.preadv

        def work(index: int) -> int:
            return call(self._file, [self._memory[index].data], index * self._piece)

        started = time.perf_counter()
        list(self._threads.map(work, range(self._pieces)))
        return time.perf_counter() - started


def measure(setup: Setup, raw: RawDisk, runs: int) -> dict[tuple[str, str], list[float]]:
    """Seconds by kind and by what it is measured on."""
    copy = memory_copy(setup.blocks * setup.block_bytes)
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(runs):
        found.setdefault(("memory copy", ""), []).append(copy())
        for name, slots in setup.slots.items():
            setup.unpack()
            found.setdefault(("save", f"{name}, plain"), []).append(setup.save(slots))
            found.setdefault(("load", name), []).append(setup.load(slots))
            found.setdefault(("save", f"{name}, packed"), []).append(setup.save(slots))
        for is_write, kind in ((True, "write"), (False, "read")):
            for by in ("fio", "loop") if shutil.which("fio") else ("loop",):
                found.setdefault((f"raw {kind}", by), []).append(raw.seconds(by, is_write=is_write))
            found.setdefault((kind, "slab"), []).append(setup.move(is_write=is_write))
    return found


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--slab", type=Path, help="folder for the slab and the file of raw I/O")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    blocks, runs = (128, 5) if arguments.quick else (384, 11)
    report = Report("tier_movers")
    with tempfile.TemporaryDirectory(dir=arguments.slab) as folder, torch.inference_mode():
        setup = Setup(blocks, getattr(torch, arguments.dtype), Path(folder) / "slab")
        raw = RawDisk(Path(folder) / "raw", blocks, setup.block_bytes)
        setup.move(is_write=True)
        found = measure(setup, raw, runs)
        size = blocks * setup.block_bytes
        rates = {case: size / statistics.median(seconds) / 1e9 for case, seconds in found.items()}
        of = {"save": "memory copy", "load": "memory copy", "write": "raw write", "read": "raw read"}
        for (kind, what), rate in rates.items():
            case = {"kind": kind, "what": what, "block_bytes": setup.block_bytes, "blocks": blocks}
            report.add(case, "rate", rate, "GB/s", runs)
            limits = [rates[other] for other in rates if other[0] == of.get(kind)]
            if limits:
                report.add(case, "share", rate / max(limits), "of the limit", runs)
        setup.tiers.close()
        setup.copier.close()
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
