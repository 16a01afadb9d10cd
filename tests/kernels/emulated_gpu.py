"""What the GPU benchmark runs on without a GPU: emulated kernels, tensors in main memory, graphs as lists."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from gpu_device import Call, Gpu
from kernels.cuda_emulated import H200, configure, emulated_library, make_emulated

from trunkline.kernels.cuda import CudaKernels

Launch = tuple[str, tuple[Any, ...]]


class Recorded:
    """A graph: launches of the emulated library with the addresses they had, as a captured one has them; calls
    that launch nothing there are called again."""

    def __init__(self, launches: list[Launch], calls: Sequence[Call]) -> None:
        self._launches = launches
        self._calls = calls

    def replay(self) -> None:
        for name, arguments in self._launches:
            emulated_library().call(name, *arguments)
        if not self._launches:
            for call in self._calls:
                call()


class EmulatedGpu(Gpu):
    """Times are of one call and mean nothing."""

    device = torch.device("cpu")
    worker = {"device": "cpu", "kernels": "cpu"}  # noqa: RUF012 (never changed)
    cache_bytes = 1 << 10
    free_bytes = 1 << 30

    def __init__(self) -> None:
        configure(H200, 0)

    def kernels(self, *, share: bool = True, invariant: bool = False) -> CudaKernels:
        return make_emulated(share=share, invariant=invariant)

    def synchronize(self) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def graph(self, calls: Sequence[Call], kernels: Sequence[CudaKernels] = ()) -> Recorded:
        library, launches = emulated_library(), list[Launch]()
        launch: Callable[..., None] = library.call
        for call in calls:
            call()

        def record(name: str, *arguments: Any) -> None:
            launches.append((name, arguments))
            launch(name, *arguments)

        for each in kernels:
            each._is_capturing = lambda: True
        with patch.object(library, "call", record):
            for call in calls:
                call()
        for each in kernels:
            each._is_capturing = lambda: False
        return Recorded(launches, calls)

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
