"""What the parts of the GPU benchmark run on: the device, how things are timed there, and where results go.

Parts reach the device through `Gpu` alone, so that tests can put the emulated kernels in its place.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final, Protocol, TextIO

import torch

from trunkline.kernels.cuda import CudaKernels
from trunkline.kernels.cuda_work import WORKSPACE_BYTES
from trunkline.kernels.library_attention import CUDA_LIBRARIES, AttentionLibrary, LibraryPrefill

Call = Callable[[], object]

SAMPLE_US: Final = 1000.0
"""Least length of a timed sample: events tell about 0.5 µs apart."""
ENQUEUE_CYCLES: Final = 2_000_000
"""For which the device is kept busy (about 1 ms) while the host enqueues a sample: launches are not measured."""


NO_CACHING: Final = "PYTORCH_NO_CUDA_MEMORY_CACHING"
"""Variable that turns torch's allocator off, so that a sanitizer sees each tensor's memory."""


class Replay(Protocol):
    """A captured graph."""

    @property
    def replay(self) -> Call: ...


@dataclass(frozen=True)
class Again:
    """Stands for a graph."""

    replay: Call


class Output:
    """Where a part's findings go: a JSON object per line, at once, so that those of a part that is killed stay."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def add(self, case: dict[str, Any], metric: str, value: float, unit: str, runs: int) -> None:
        """One figure, as in `Report.add`."""
        self._write({"case": case, "metric": metric, "value": value, "unit": unit, "runs": runs})

    def fact(self, name: str, value: object) -> None:
        """About the machine."""
        self._write({"fact": name, "value": value})

    def note(self, sentence: str) -> None:
        """What is missing, and why; nothing is wrong."""
        self._write({"note": sentence})

    def problem(self, sentence: str) -> None:
        """Something is wrong."""
        self._write({"problem": sentence})

    def _write(self, line: dict[str, Any]) -> None:
        self._stream.write(json.dumps(line) + "\n")
        self._stream.flush()


@dataclass(frozen=True)
class Visit:
    """What a part is told."""

    seconds: float
    """Its limit; it had better end a little earlier."""
    kit: Path | None = None
    """Folder with the reference outputs."""
    quick: bool = False
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds_left(self) -> float:
        return self.started + self.seconds - time.monotonic()

    def has_used(self, share: float) -> bool:
        """Whether so much of the time is over."""
        return self.seconds_left < (1 - share) * self.seconds


def times_by_kernel(events: Iterable[Any], calls: int) -> dict[str, float]:
    """Microseconds of a call by kernel, the longest first, from the averages of torch's profiler."""
    found = {str(event.key): float(event.self_device_time_total) / calls for event in events}
    return dict(sorted(((k, v) for k, v in found.items() if v > 0), key=lambda pair: -pair[1]))


class Gpu:
    """The first CUDA device that is visible."""

    device = torch.device("cuda", 0)
    worker: dict[str, Any] = {"device": "cuda", "gpu": 0, "kernels": "cuda"}  # noqa: RUF012 (never changed)
    """Fields of `WorkerConfig` for a rank on it."""
    libraries: tuple[AttentionLibrary, ...] = tuple(CUDA_LIBRARIES.values())
    """To which prefill may be given."""

    def kernels(
        self,
        *,
        share: bool = True,
        invariant: bool = False,
        prefill: LibraryPrefill | None = None,
        workspace_bytes: int = WORKSPACE_BYTES,
    ) -> CudaKernels:
        return CudaKernels(share=share, invariant=invariant, prefill=prefill, workspace_bytes=workspace_bytes)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    @property
    def cache_bytes(self) -> int:
        """Of the second level."""
        return int(torch.cuda.get_device_properties(0).L2_cache_size)

    @property
    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info()[0])

    def graph(self, calls: Sequence[Call], kernels: Sequence[CudaKernels] = ()) -> Replay:
        """All calls in one graph: launches then cost what they do in a server.

        Args:
            kernels: those that the calls use, for the emulation, which captures there.
        """
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for call in calls:
                call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        return graph

    def graph_or_call(self, call: Call, kernels: CudaKernels) -> Replay:
        """A graph of a call that allocates memory; the call itself under a sanitizer, for which torch's allocator
        is off: the driver's own allows nothing while a graph is captured."""
        if NO_CACHING not in os.environ:
            return self.graph([call], [kernels])
        call()
        return Again(call)

    def time_us(self, call: Call, runs: int = 21) -> float:
        """Median microseconds of a call, each sample over as many calls as take a millisecond."""
        call()
        batches = self._batches(call)
        return median(self._sample(call, batches) for _ in range(runs))

    def interleaved_us(self, calls: dict[str, Call], runs: int = 15) -> dict[str, float]:
        """Median microseconds of each, measured in turn: whatever the clock does, it does to all of them."""
        for call in calls.values():
            call()
        batches = {name: self._batches(call) for name, call in calls.items()}
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(runs):
            for name, call in calls.items():
                times[name].append(self._sample(call, batches[name]))
        return {name: median(taken) for name, taken in times.items()}

    def _batches(self, call: Call) -> int:
        return max(1, -(-int(SAMPLE_US) // max(1, int(self._sample(call, 3)))))

    def _sample(self, call: Call, batches: int) -> float:
        """Microseconds of a call, over `batches` in a row."""
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(ENQUEUE_CYCLES)  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(batches):
            call()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) * 1e3 / batches

    def together_us(self, main: Call, side: Call) -> tuple[float, float]:
        """Microseconds of two calls, begun at the same time on two streams."""
        streams = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in streams]  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        torch.cuda._sleep(ENQUEUE_CYCLES)  # type: ignore[no-untyped-call]
        ready = torch.cuda.current_stream().record_event()
        for stream, call, (start, stop) in zip(streams, (main, side), events, strict=True):
            stream.wait_event(ready)
            with torch.cuda.stream(stream):
                start.record()
                call()
                stop.record()
        torch.cuda.synchronize()
        first, second = (float(start.elapsed_time(stop)) * 1e3 for start, stop in events)
        return first, second

    def kernel_times(self, call: Call, calls: int = 10) -> dict[str, float]:
        """Microseconds on the device of a call, by kernel."""
        call()
        self.synchronize()
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in range(calls):
                call()
            self.synchronize()
        events = [e for e in profiler.key_averages() if str(e.device_type).endswith(".CUDA")]
        return times_by_kernel(events, calls)

    def copy_bandwidth(self, size_bytes: int = 1 << 30) -> float:
        """Bytes per second of a device-to-device copy, read and written bytes counted."""
        source = torch.empty(size_bytes, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * size_bytes / (self.time_us(partial(target.copy_, source)) * 1e-6)

    def read_bandwidth(self, size_bytes: int = 1 << 30) -> float:
        """Bytes per second of a sum over a large tensor."""
        source = torch.ones(size_bytes // 4, dtype=torch.float32, device=self.device)
        return size_bytes / (self.time_us(source.sum) * 1e-6)

    def matmul_rate(self, size: int = 8192) -> float:
        """bfloat16 operations per second of a large product of random matrices."""
        a, b = (torch.randn(size, size, device=self.device).bfloat16() for _ in range(2))
        return 2 * size**3 / (self.time_us(partial(torch.mm, a, b), runs=9) * 1e-6)


def measure_ceilings(gpu: Gpu, out: Output, visit: Visit, size_bytes: int = 1 << 30, matrix: int = 8192) -> None:
    """What the device gives at most: the part `ceilings`."""
    del visit
    out.add({"limit": "copy (read + written)"}, "bandwidth", gpu.copy_bandwidth(size_bytes) / 1e12, "TB/s", 21)
    out.add({"limit": "read (a sum)"}, "bandwidth", gpu.read_bandwidth(size_bytes) / 1e12, "TB/s", 21)
    out.add({"limit": "bfloat16 product"}, "rate", gpu.matmul_rate(matrix) / 1e12, "TFLOP/s", 9)
