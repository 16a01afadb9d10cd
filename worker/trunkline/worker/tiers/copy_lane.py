"""One direction of the copies between device and host pool: a thread that carries out jobs in their order.

The thread has kernels of its own, because ops of one instance run on one thread; inside them the interpreter's
lock is free, so copies and computation really go on at the same time.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Final, NamedTuple

import structlog
import torch

from trunkline.kernels.ops import Kernels
from trunkline.kvstore.int32_codec import Int32Array
from trunkline.worker.errors import CopyError
from trunkline.worker.tiers.copy_streams import CopyStream
from trunkline.worker.tiers.host_pool import HostPool
from trunkline.worker.tiers.layer_gate import LATE_SAVE, LOAD, LayerGate, LayerSpan, LayerTrace

_QUANTUM_BYTES: Final = 256 << 10
"""Bytes copied before waiting threads are told: a job of small layers goes several layers at a time."""
_CUDA_QUANTUM_BYTES: Final = 4 << 20
"""The same on a GPU, where each quantum costs a round trip."""

log = structlog.get_logger()


class CopyJob(NamedTuple):
    """The copies of one plan in one direction."""

    kind: str
    """`LOAD`, `SAVE` or `LATE_SAVE`."""
    step: int
    blocks: Int32Array
    slots: Int32Array
    """Ascending."""
    waits: tuple[tuple[LayerGate, int], ...] = ()
    """Counts that must be reached before the job begins."""
    mark: object = None
    """Of the computation's stream, when the job was given."""
    computed: tuple[LayerGate, int] | None = None
    """Of a late save: what counts the computed layers, and its count before the first of the step."""
    layer_marks: list[object] = []  # noqa: RUF012
    """Of a late save: a mark behind each computed layer, in order."""


class CopyLane:
    """Jobs are numbered from 1; `gate` counts the layers that are done, all of a job's before the next job's."""

    def __init__(
        self,
        name: str,
        host: HostPool,
        kernels: Kernels,
        stream: CopyStream,
        failed: Callable[[BaseException], None],
    ) -> None:
        """
        Args:
            kernels: used by this lane's thread only.
            failed: told, on the lane's thread, of what ended it.
        """
        self.kernels = kernels
        self.gate = LayerGate()
        self.submitted = 0
        """Jobs so far."""
        self.moved = (0, 0)
        """Nanoseconds spent on copying, and blocks copied, since the start."""
        self.trace: LayerTrace | None = None
        self.link_bytes_per_s = 0.0
        """Of an emulated link, which copies never exceed; 0: as fast as it goes."""
        self.is_layerwise = True
        self._host = host
        self._stream = stream
        self._failed = failed
        self._queue: SimpleQueue[CopyJob | None] = SimpleQueue()
        self._steps: deque[tuple[int, int]] = deque()
        """Step and number of jobs that may not be done yet."""
        self._link_free_ns = 0
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    # --- for the thread that takes plans

    def submit(self, job: CopyJob) -> int:
        """Returns the job's number."""
        self.submitted += 1
        self._steps.append((job.step, self.submitted))
        self._queue.put(job)
        return self.submitted

    def last_until(self, step: int) -> int:
        """Number of the last job of the plans up to `step`; 0 if all of these are done."""
        if not self._steps:
            return 0
        done = self.gate.passed // self._host.layers
        while self._steps and self._steps[0][1] <= done:
            self._steps.popleft()
        number = 0
        for job_step, job_number in self._steps:
            if job_step > step:
                break
            number = job_number
        return number

    def wait_for(self, number: int) -> int:
        """Until a job is done whole; returns nanoseconds waited.

        Raises:
            CopyError: it never will be.
        """
        return self.gate.wait(number * self._host.layers)

    def close(self) -> None:
        """End the thread; what it has not begun is not done."""
        self.gate.fail(CopyError("the rank leaves"))
        self._queue.put(None)
        self._thread.join()

    # --- the thread

    def _serve(self) -> None:
        try:
            with torch.inference_mode(), self._stream.use():
                number = 0
                while (job := self._queue.get()) is not None:
                    self.gate.check()
                    number += 1
                    self._carry_out(job, number)
        except CopyError as error:
            self._failed(error)
        except Exception as error:  # whatever it is, no thread may wait for this one any more
            log.error("copies between device and host failed", error=str(error), exc_info=True)
            self._failed(error)

    def _carry_out(self, job: CopyJob, number: int) -> None:
        for gate, until in job.waits:
            gate.wait(until)
        self._stream.after(job.mark)
        behind = (number - 1) * self._host.layers
        spent_ns = 0
        for layers in self._quanta(job):
            if job.computed is not None:
                gate, count = job.computed
                gate.wait(count + layers.stop)
                self._stream.after(job.layer_marks[layers.stop - 1])
            started = time.perf_counter_ns()
            copy = self._host.scatter if job.kind == LOAD else self._host.gather
            copy(self.kernels, job.blocks, job.slots, layers)
            self._stream.finish()
            if self.link_bytes_per_s:
                self._pace(started, len(job.blocks) * len(layers))
            stopped = time.perf_counter_ns()
            spent_ns += stopped - started
            if self.trace is not None:
                self.trace.add(LayerSpan(job.kind, job.step, layers, started, stopped))
            if layers.stop == self._host.layers:
                self.moved = (self.moved[0] + spent_ns, self.moved[1] + len(job.blocks))
            self.gate.advance(behind + layers.stop)

    def _quanta(self, job: CopyJob) -> Iterator[range]:
        """Return the layers that are copied together; all at once where no thread waits for single layers."""
        layers = self._host.layers
        size = layers
        if self.is_layerwise and job.kind in (LOAD, LATE_SAVE):
            layer_bytes = len(job.blocks) * (self._host.slot_bytes // layers)
            quantum = _CUDA_QUANTUM_BYTES if self._host.is_pinned else _QUANTUM_BYTES
            # A slow link shows what single layers are worth.
            size = 1 if self.link_bytes_per_s else -(-quantum // layer_bytes)
        for start in range(0, layers, size):
            yield range(start, min(start + size, layers))

    def _pace(self, started_ns: int, block_layers: int) -> None:
        """Sleep as long as the emulated link would still take."""
        size = block_layers * (self._host.slot_bytes // self._host.layers)
        begin = max(self._link_free_ns, started_ns)
        self._link_free_ns = begin + int(size * 1e9 / self.link_bytes_per_s)
        left_ns = self._link_free_ns - time.perf_counter_ns()
        if left_ns > 0:
            time.sleep(left_ns / 1e9)
