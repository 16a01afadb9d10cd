"""Counts of layers that threads wait for, so that computation and copies overlap (CachedAttention §3.2).

Three of them, each written by one thread and waited for by others, say how far a rank is:

      loads     layers whose KV has come from the host pool, over all loads so far
      saves     layers whose KV is in the host pool, over all saves so far
      computed  layers whose KV the present step has stored
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from trunkline.worker.errors import CopyError

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
        """Until the count is at least `until`.

        Returns:
            Nanoseconds waited.

        Raises:
            CopyError: it never will be.
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
        """
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
    """When something was done about a layer; times are of `time.perf_counter_ns`."""

    kind: str
    """`COMPUTE`, `LOAD`, `SAVE` or `LATE_SAVE`."""
    step: int
    """Of the plan that ordered it."""
    layers: range
    start_ns: int
    stop_ns: int


class LayerTrace:
    """When the last layers were computed and copied: shows whether both overlapped."""

    def __init__(self, length: int) -> None:
        self._spans: deque[LayerSpan] = deque(maxlen=length)

    def add(self, span: LayerSpan) -> None:
        """Called from any thread."""
        self._spans.append(span)

    def spans(self) -> list[LayerSpan]:
        """In the order in which they ended."""
        return list(self._spans)


class StepGate:
    """Lets the computation of one step wait for loads, and late saves follow it, by layer. Used by one thread."""

    def __init__(self, step: int, layers: int, loads: LayerGate, computed: LayerGate) -> None:
        self.step = step
        self.behind = (step - 1) * layers
        """What `computed` counts before this step's first layer."""
        self._layers = layers
        self._loads = loads
        self._computed = computed
        self.loads_from: int | None = None
        """What `loads` counts before layer 0 of the last load that the step needs; None: it needs none."""
        self.tells_layers = False
        """Whether late saves wait for single layers of this step."""
        self.record_layer: Callable[[], object] = _no_mark
        self.marks: list[object] = []
        """By layer: what `record_layer` gave when it was stored."""
        self.trace: LayerTrace | None = None
        self.waited_ns = 0
        self._layer = -1
        self._entered_ns = 0

    def enter(self, layer: int) -> None:
        """Before the layer's KV is written and read.

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
        """The layer's new KV is in the pool."""
        if self.tells_layers:
            self.marks.append(self.record_layer())
            self._computed.advance(self.behind + layer + 1)

    def finish(self) -> None:
        """The step is computed, perhaps without any layer.

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
        """One layer ends where the next begins; the first begins behind its wait."""
        if self.trace is not None and self._layer >= 0:
            layers = range(self._layer, self._layer + 1)
            self.trace.add(LayerSpan(COMPUTE, self.step, layers, self._entered_ns, time.perf_counter_ns()))
        self._layer = next_layer


def _no_mark() -> object:
    return None
