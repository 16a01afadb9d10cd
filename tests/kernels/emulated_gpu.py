"""What the GPU benchmark runs on without a GPU: emulated kernels, tensors in main memory, graphs as lists."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from gpu_device import Call, Gpu, Replay
from kernels.cuda_emulated import H200, configure, make_emulated
from kernels.emulated_graphs import EmulatedGraphs

from trunkline.kernels.cuda import CudaKernels
from trunkline.kernels.cuda_work import WORKSPACE_BYTES
from trunkline.kernels.library_attention import FLASH_ON_CPU, AttentionLibrary, LibraryPrefill


class Repeated:
    """A graph of calls that launch nothing of ours: they are called again."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls

    def replay(self) -> None:
        for call in self._calls:
            call()


class EmulatedGpu(Gpu):
    """Times are of one call and mean nothing."""

    device = torch.device("cpu")
    worker = {"device": "cpu", "kernels": "cpu"}  # noqa: RUF012 (never changed)
    cache_bytes = 1 << 10
    free_bytes = 1 << 30
    libraries: tuple[AttentionLibrary, ...] = (FLASH_ON_CPU,)

    def __init__(self) -> None:
        configure(H200, 0)

    def kernels(
        self,
        *,
        share: bool = True,
        invariant: bool = False,
        prefill: LibraryPrefill | None = None,
        workspace_bytes: int = WORKSPACE_BYTES,
    ) -> CudaKernels:
        return make_emulated(share=share, invariant=invariant, prefill=prefill, workspace_bytes=workspace_bytes)

    def synchronize(self) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def graph(self, calls: Sequence[Call], kernels: Sequence[CudaKernels] = ()) -> Replay:
        for call in calls:
            call()
        if not kernels:
            return Repeated(calls)
        (own,) = kernels

        def run() -> None:
            for call in calls:
                call()

        with torch.inference_mode():
            return EmulatedGraphs(own).capture(run)

    def time_us(self, call: Call, runs: int = 21) -> float:
        del runs
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e6

    def interleaved_us(self, calls: dict[str, Call], runs: int = 15) -> dict[str, float]:
        return {name: self.time_us(call, runs) for name, call in calls.items()}

    def together_us(self, main: Call, side: Call) -> tuple[float, float]:
        return self.time_us(main), self.time_us(side)

    def kernel_times(self, call: Call, calls: int = 10) -> dict[str, float]:
        del calls
        return {"attention_matrix_kernel": self.time_us(call), "merge_kernel": 1.0}
