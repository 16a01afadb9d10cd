"""What tests of tiers have in common: copies held at will, a sequence that leaves the device and comes back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from worker.driver import VOCAB_SIZE, Driver, run_config

from trunkline.controller.reports import StepResult
from trunkline.kernels.ops import Kernels, KvPool
from trunkline.kvstore.chunks import Int32Array, pack_int32, unpack_int32
from trunkline.worker.loading import load_runner
from trunkline.worker.messages import Join, Sampling
from trunkline.worker.tiers.copier import Copier
from trunkline.worker.tiers.copy_lane import CopyLane, CopyOptions

LAYERS = 4
DEADLINE_S = 60.0


def wait_until(holds: Callable[[], bool], seconds: float = DEADLINE_S) -> None:
    """Until something that another thread does is done."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.001)


class HeldKernels:
    """Kernels of a copy thread that stop before each copy until the test lets it go."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._permits = threading.Semaphore(0)
        self.asked = 0
        """Copies that have come so far …"""
        self.done = 0
        """… and those that were let through and are over."""

    @classmethod
    def hold(cls, lane: CopyLane) -> HeldKernels:
        held = cls(lane.kernels)
        lane.kernels = held  # type: ignore[assignment]
        return held

    def let(self, copies: int) -> None:
        """This many more copies may go on."""
        self._permits.release(copies)

    def let_all(self) -> None:
        self._permits.release(1_000_000)

    def release_when_asked(self, call: Callable[[], Any]) -> Any:
        """What a call returns that must wait for a copy, which goes on only when it is seen to wait."""
        background = Background(call)
        wait_until(lambda: self.asked == 1)
        assert not background.is_over
        self.let_all()
        return background.join()

    def gather_slots(
        self, pool: KvPool, blocks: Int32Array, layers: range, host: Tensor, slots: Int32Array
    ) -> None:
        self._wait()
        self._kernels.gather_slots(pool, blocks, layers, host, slots)
        self.done += 1

    def scatter_slots(
        self, pool: KvPool, blocks: Int32Array, layers: range, host: Tensor, slots: Int32Array
    ) -> None:
        self._wait()
        self._kernels.scatter_slots(pool, blocks, layers, host, slots)
        self.done += 1

    def _wait(self) -> None:
        self.asked += 1
        assert self._permits.acquire(timeout=DEADLINE_S)


class Background:
    """A call on a thread of its own, as the copies' opponent."""

    def __init__(self, call: Callable[[], Any]) -> None:
        executor = ThreadPoolExecutor(1)
        self._future = executor.submit(call)
        executor.shutdown(wait=False)

    @property
    def is_over(self) -> bool:
        return self._future.done()

    def join(self) -> Any:
        """What the call returned, or the error that it raised."""
        return self._future.result(DEADLINE_S)


def moves(*rows: tuple[int, int, int]) -> bytes:
    """Blocks, slots and generations as plans have them."""
    return pack_int32(np.array(rows, dtype=np.int32).reshape(-1))


OUT = moves((3, 7, 1), (4, 8, 1), (9, 2, 1))
"""A traveller's blocks into slots …"""
BACK = moves((10, 7, 1), (11, 8, 1), (12, 2, 1))
"""… and from there into other blocks."""
TARGETS = [10, 11, 12]


class Traveller:
    """One greedy sequence over a runner, whose blocks the test sends where it wants."""

    PROMPT = 21
    BLOCKS = (3, 4, 9)

    def __init__(self, folder: Path, copying: CopyOptions = CopyOptions(), **config: Any) -> None:  # noqa: B008
        settings: dict[str, Any] = {"host_memory_bytes": 1 << 18, **config}
        self.runner = load_runner(run_config(folder, **settings), lambda *_: None, copying=copying)
        self.driver = Driver(self.runner.execute, num_blocks=64, chunk_size=8)
        self.tokens = np.random.default_rng(4).integers(VOCAB_SIZE, size=self.PROMPT).tolist()
        self.results: list[Any] = []

    @property
    def copier(self) -> Copier:
        assert self.runner.copier is not None
        return self.runner.copier

    def prefill(self, **fields: Any) -> StepResult:
        """The whole prompt, which fills two blocks and begins a third."""
        join = self._join(1, list(self.BLOCKS))
        entry = pack_int32([1, 0, self.PROMPT, 0, 1])
        return self._collect(self.driver.send(joins=[join], prefill=entry, **fields))

    def leave(self, **fields: Any) -> None:
        self.driver.send(leaves=pack_int32([1]), **fields)

    def come_back(self, blocks: list[int], **fields: Any) -> StepResult:
        """Join again over other blocks, and decode a token."""
        join = self._join(2, blocks)
        return self._collect(self.driver.send(joins=[join], rows=pack_int32([2]), runs=b"", **fields))

    def decode(self, **fields: Any) -> StepResult:
        return self._collect(self.driver.send(**fields))

    def swap_out(self) -> None:
        """Prefill, then have everything in the host pool and nothing on the device."""
        self.prefill()
        self.leave(saves=OUT, save_fence=self.driver.step + 1)
        self.wipe()

    def swap_in(self, **fields: Any) -> StepResult:
        """Come back by loads that the same step waits for."""
        return self.come_back(TARGETS, loads=BACK, load_fence=self.driver.step + 1, **fields)

    def check_end(self, expected: list[Any]) -> None:
        """Decode two tokens; all that was said is what a sequence gives that never left the device."""
        self.decode()
        self.decode()
        assert self.results == expected

    def wipe(self) -> None:
        """Nothing of what the device held is left."""
        self.runner.pool.data.fill_(float("nan"))
        self.runner.pool.packed.zero_()

    def close(self) -> None:
        self.runner.close()

    def _join(self, sequence: int, blocks: list[int]) -> Join:
        sampling = Sampling(temperature=0, logprobs=VOCAB_SIZE)
        return Join(sequence, pack_int32(self.tokens), 0, self.PROMPT, pack_int32(blocks), sampling)

    def _collect(self, result: StepResult | None) -> StepResult:
        assert result is not None
        assert result.logprobs is not None
        self.tokens.append(int(unpack_int32(result.tokens)[0]))
        self.results.append((result.tokens, result.logprobs[0].top_ids, result.logprobs[0].top_logprobs))
        return result


def never_away(folder: Path) -> list[Any]:
    """What a sequence gives that never leaves the device: its prompt, then three tokens."""
    traveller = Traveller(folder)
    traveller.prefill()
    traveller.leave()
    traveller.come_back(list(Traveller.BLOCKS))
    traveller.decode()
    traveller.decode()
    traveller.close()
    return traveller.results
