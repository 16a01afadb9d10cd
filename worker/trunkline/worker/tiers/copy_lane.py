"""One direction of the copies between device and host pool: a thread, and counts of layers to wait for.

The thread carries out jobs in their order. It has kernels of its own, because ops of one instance run on one
thread; inside them the interpreter's lock is free, so copies and computation really go on at the same time.

Three counts, each written by one thread and waited for by others, say how far a rank is, layer by layer, so that
computation and copies overlap (CachedAttention §3.2):

      loads     layers whose KV has come from the host pool, over all loads so far
      saves     layers whose KV is in the host pool, over all saves so far
      computed  layers whose KV the present step has stored

On a CPU an op is over when its call returns. On a GPU calls only enqueue: copies have a stream of their own, wait
there for marks in the computation's stream, and are over when the host has seen their stream empty.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, Final, NamedTuple, Protocol

import structlog
import torch

from trunkline.kernels.ops import Kernels
from trunkline.kvstore.chunks import Int32Array
from trunkline.worker.errors import CopyError
from trunkline.worker.tiers.host_pool import HostPool, UInt8Array

_QUANTUM_BYTES: Final = 256 << 10
"""Bytes copied before waiting threads are told: a job of small layers goes several layers at a time."""
_CUDA_QUANTUM_BYTES: Final = 4 << 20
"""Bytes copied on a GPU before waiting threads are told: each such piece costs a round trip."""
_WHOLE_BYTES: Final = 1 << 20
"""A late save of up to so many bytes begins when its step has been answered. To tell a thread of each layer takes
longer than the copy, and takes the step's time, for which a client waits."""

log = structlog.get_logger()


class CopyOptions(NamedTuple):
    """Options of the copies beside the computation. Only benchmarks and tests use other values than the
    defaults."""

    link_bytes_per_s: float = 0.0
    """Speed of an emulated slower link between device and host, in each direction; 0: no emulation."""
    is_layerwise: bool = True
    """Whether each layer of the computation waits for its own KV only; else the first layer waits for the KV of
    all."""
    saves_beside: bool = True
    """Whether steps go on while blocks are saved; else a step that saves waits until its saves are done."""


class CopyJob(NamedTuple):
    """The copies of one plan in one direction."""

    kind: str
    """Kind of the copies: `LOAD`, `SAVE` or `LATE_SAVE`."""
    step: int
    blocks: Int32Array
    slots: Int32Array
    """Host slots of the copies, ascending."""
    waits: tuple[tuple[LayerGate, int], ...] = ()
    """Counts that must be reached before the job begins."""
    mark: object = None
    """Mark in the computation's stream (`mark_of`) when the job was submitted."""
    computed: tuple[LayerGate, int] | None = None
    """For a late save that follows layers: the count of computed layers, and its value before the step's first."""
    layer_marks: list[object] = []  # noqa: RUF012
    """For a late save: a mark behind each computed layer, in order."""
    parts: UInt8Array | None = None
    """For a load: of each block, the layers to load (`LoadedLayers`); None: all of all."""


class CopyLane:
    """One direction of the copies. Jobs are numbered from 1; `gate` counts the layers that are done, all layers of
    a job before those of the next job."""

    def __init__(
        self,
        name: str,
        host: HostPool,
        kernels: Kernels,
        stream: CopyStream,
        options: CopyOptions,
        failed: Callable[[BaseException], None],
    ) -> None:
        """
        Args:
            kernels: used by this lane's thread only.
            failed: called on the lane's thread with the error that ended it.
        """
        self.kernels = kernels
        self.gate = LayerGate()
        self.submitted = 0
        """Number of jobs submitted so far."""
        self.moved = (0, 0)
        """Nanoseconds spent on copying, and blocks copied, since the start."""
        self.trace: LayerTrace | None = None
        self._host = host
        self._stream = stream
        self._options = options
        self._failed = failed
        self._queue: SimpleQueue[CopyJob | None] = SimpleQueue()
        self._steps: deque[tuple[int, int]] = deque()
        """For each job that may not be done yet: the step of its plan, and the job's number."""
        self._link_free_ns = 0
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    # --- for the thread that takes plans

    def submit(self, job: CopyJob) -> int:
        """Queue a job; return its number."""
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
        """Wait until a whole job is done; return the nanoseconds waited.

        Raises:
            CopyError: copies have failed.
        """
        return self.gate.wait(number * self._host.layers)

    def close(self) -> None:
        """End the thread. Jobs that it has not begun are not done."""
        self.gate.fail(CopyError("the rank leaves"))
        self._queue.put(None)
        self._thread.join()

    def follows_layers(self, blocks: int) -> bool:
        """Return whether a late save of so many blocks should be told of each layer; else it is ordered when
        all are computed."""
        is_large = blocks * self._host.slot_bytes > _WHOLE_BYTES or self._options.link_bytes_per_s > 0
        return self._options.is_layerwise and is_large

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
            if job.parts is not None:
                self._host.scatter_parts(self.kernels, job.blocks, job.slots, layers, job.parts)
            else:
                copy = self._host.scatter if job.kind == LOAD else self._host.gather
                copy(self.kernels, job.blocks, job.slots, layers)
            self._stream.finish()
            if self._options.link_bytes_per_s:
                self._pace(started, len(job.blocks) * len(layers))
            stopped = time.perf_counter_ns()
            spent_ns += stopped - started
            if self.trace is not None:
                self.trace.append(LayerSpan(job.kind, job.step, layers, started, stopped))
            if layers.stop == self._host.layers:
                self.moved = (self.moved[0] + spent_ns, self.moved[1] + len(job.blocks))
            self.gate.advance(behind + layers.stop)

    def _quanta(self, job: CopyJob) -> Iterator[range]:
        """Return the layers that are copied together; all at once where no thread waits for single layers."""
        layers = self._host.layers
        size = layers
        is_load = self._options.is_layerwise and job.kind == LOAD
        if is_load or (job.kind == LATE_SAVE and self.follows_layers(len(job.blocks))):
            layer_bytes = len(job.blocks) * (self._host.slot_bytes // layers)
            quantum = _CUDA_QUANTUM_BYTES if self._host.is_pinned else _QUANTUM_BYTES
            # A slow link shows what single layers are worth.
            size = 1 if self._options.link_bytes_per_s else -(-quantum // layer_bytes)
        for start in range(0, layers, size):
            yield range(start, min(start + size, layers))

    def _pace(self, started_ns: int, block_layers: int) -> None:
        """Sleep as long as the emulated link would still take."""
        size = block_layers * (self._host.slot_bytes // self._host.layers)
        begin = max(self._link_free_ns, started_ns)
        self._link_free_ns = begin + int(size * 1e9 / self._options.link_bytes_per_s)
        left_ns = self._link_free_ns - time.perf_counter_ns()
        if left_ns > 0:
            time.sleep(left_ns / 1e9)


COMPUTE: Final = "compute"
LOAD: Final = "load"
SAVE: Final = "save"
LATE_SAVE: Final = "late_save"


class LayerGate:
    """A count that only grows. `wait` costs one comparison where the count is there already."""

    def __init__(self) -> None:
        self.passed = 0
        self._failure: BaseException | None = None
        self._condition = threading.Condition()

    def advance(self, to: int) -> None:
        """Raise the count, and wake the threads that wait for it."""
        with self._condition:
            self.passed = max(self.passed, to)
            self._condition.notify_all()

    def fail(self, error: BaseException) -> None:
        """End the counting: every thread that waits, now or later, gets an error."""
        with self._condition:
            if self._failure is None:
                self._failure = error
            self._condition.notify_all()

    def wait(self, until: int) -> int:
        """Wait until the count is at least `until`.

        Returns:
            Nanoseconds waited.

        Raises:
            CopyError: copies have failed.
        """
        if self.passed >= until:
            return 0
        started = time.perf_counter_ns()
        with self._condition:
            while self.passed < until:
                self._raise_failure()
                self._condition.wait()
        return time.perf_counter_ns() - started

    def check(self) -> None:
        """Raise the error that ended the counting, if one did.

        Raises:
            CopyError: the count grows no more.
        """
        if self._failure is not None:
            with self._condition:
                self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise CopyError(f"copying between device and host failed: {self._failure}") from self._failure


class LayerSpan(NamedTuple):
    """The time at which a layer was computed, loaded or saved, by `time.perf_counter_ns`."""

    kind: str
    """Kind of the work: `COMPUTE`, `LOAD`, `SAVE` or `LATE_SAVE`."""
    step: int
    """Step of the plan that ordered the work."""
    layers: range
    start_ns: int
    stop_ns: int


LayerTrace = deque[LayerSpan]
"""The times at which the last layers were computed and copied, in the order in which these ended."""


class StepGate:
    """Lets the computation of one step wait for loads, and late saves follow it, by layer. Used by one thread."""

    def __init__(self, step: int, layers: int, loads: LayerGate, computed: LayerGate) -> None:
        self.step = step
        self.behind = (step - 1) * layers
        """Value of `computed` before this step's first layer."""
        self._layers = layers
        self._loads = loads
        self._computed = computed
        self.loads_from: int | None = None
        """Value of `loads` before layer 0 of the last load that the step needs; None: the step needs no load."""
        self.tells_layers = False
        """Whether late saves wait for single layers of this step."""
        self.record_layer: Callable[[], object] = lambda: None
        self.marks: list[object] = []
        """For each layer, the mark that `record_layer` gave when the layer was stored."""
        self.trace: LayerTrace | None = None
        self.waited_ns = 0
        self._layer = -1
        self._entered_ns = 0

    def enter(self, layer: int) -> None:
        """Wait for a layer's KV, before it is written and read.

        Raises:
            CopyError: its KV will not come.
        """
        if self.trace is not None:
            self._note(layer)
        if self.loads_from is not None:
            self.waited_ns += self._loads.wait(self.loads_from + layer + 1)
        if self.trace is not None:
            self._entered_ns = time.perf_counter_ns()

    def stored(self, layer: int) -> None:
        """Note that the layer's new KV is in the pool."""
        if self.tells_layers:
            self.marks.append(self.record_layer())
            self._computed.advance(self.behind + layer + 1)

    def finish(self) -> None:
        """Note that the step is computed, perhaps without any layer.

        Raises:
            CopyError: a load that the step needed will not come.
        """
        if self.trace is not None:
            self._note(-1)
        if self.loads_from is not None:
            self.waited_ns += self._loads.wait(self.loads_from + self._layers)
        if self.tells_layers:
            while len(self.marks) < self._layers:
                self.marks.append(self.record_layer())
            self._computed.advance(self.behind + self._layers)

    @property
    def is_open(self) -> bool:
        """Whether the layers need neither wait nor tell anything."""
        return self.loads_from is None and not self.tells_layers and self.trace is None

    def _note(self, next_layer: int) -> None:
        """Trace the layer that ends; the next one begins here."""
        if self.trace is not None and self._layer >= 0:
            layers = range(self._layer, self._layer + 1)
            self.trace.append(LayerSpan(COMPUTE, self.step, layers, self._entered_ns, time.perf_counter_ns()))
        self._layer = next_layer


class CopyStream(Protocol):
    """One copy thread's side of a device."""

    def use(self) -> Any:
        """Return a context in which the thread's ops go to this stream."""

    def after(self, mark: object) -> None:
        """Let later work begin only when everything before the mark (see `mark_of`) is done."""

    def finish(self) -> None:
        """Wait until everything enqueued is done."""


class HostStream:
    """The stream of a CPU, where nothing is to be ordered."""

    @contextmanager
    def use(self) -> Iterator[None]:
        yield

    def after(self, mark: object) -> None:
        pass

    def finish(self) -> None:
        pass


class CudaStream:
    """A side stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def use(self) -> Iterator[None]:
        torch.cuda.set_device(self._device)
        with torch.cuda.stream(self._stream):
            yield

    def after(self, mark: object) -> None:
        if isinstance(mark, torch.cuda.Event):
            self._stream.wait_event(mark)

    def finish(self) -> None:
        self._stream.synchronize()


def make_stream(device: torch.device) -> CopyStream:
    """Return the stream of one copy thread."""
    return CudaStream(device) if device.type == "cuda" else HostStream()


def mark_of(device: torch.device) -> object:
    """Return a mark behind everything that the calling thread has enqueued; None on a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
