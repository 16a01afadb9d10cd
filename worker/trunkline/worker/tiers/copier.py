"""The copies between device and host pool beside the steps: saves and loads of `StepPlan` (CachedAttention §3.2).

      main thread    plan ─► begin ─► [ fence ] ─► computation: layer 0, layer 1, …  ─► finish
                       │                              ▲             │
      loads thread     └─► load   layer 0, layer 1, … ┘             │
      saves thread     └─► save, late save   layer 0, layer 1, …  ◄─┘ ─► settle: small late saves

The copies of one direction are carried out in the order of the plans. Between the directions, and between copies
and computation, the order is that of the plans wherever two touch the same slot, and wherever the plan's fences
say so; everything else goes on at the same time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
import torch

from trunkline.kernels.ops import Kernels
from trunkline.kvstore.chunks import NAME_BYTES, Int32Array, SlotId, unpack_int32
from trunkline.worker.errors import CopyError, PlanError
from trunkline.worker.messages import StepPlan
from trunkline.worker.tiers.copy_lane import (
    LATE_SAVE,
    LOAD,
    SAVE,
    CopyJob,
    CopyLane,
    CopyOptions,
    LayerGate,
    LayerTrace,
    StepGate,
    make_stream,
    mark_of,
)
from trunkline.worker.tiers.host_pool import HostPool, UInt8Array

MEASURED_BLOCKS: Final = 8
"""Largest number of blocks that `Copier.measure` writes, the first of the pool."""
_MEASURED_ROUNDS: Final = 3
_MEASURED_NS: Final = 200_000_000
"""Nanoseconds after which `measure` begins no further round."""
_SAVE_BYTES: Final = 12
"""Bytes of a save in a plan: block, host slot, generation."""


class Ticket(NamedTuple):
    """The last copies of a host slot that the plans so far have ordered."""

    save: int
    """Number of the last save into the slot; 0: none."""
    load: int
    """Number of the last load out of the slot; 0: none."""


class _Touched:
    """The last job that touched each slot or block, by number."""

    def __init__(self, slots: int, blocks: int) -> None:
        self.slot_saves = np.zeros(slots, dtype=np.int64)
        self.slot_loads = np.zeros(slots, dtype=np.int64)
        self.block_saves = np.zeros(blocks, dtype=np.int64)
        self.block_loads = np.zeros(blocks, dtype=np.int64)


class Copier:
    """Orders all copies between the device pool and the host pool. Used by the thread that takes plans, except
    for the methods that say so."""

    def __init__(
        self,
        host: HostPool,
        device: torch.device,
        blocks: int,
        make_kernels: Callable[[], Kernels],
        options: CopyOptions = CopyOptions(),  # noqa: B008
    ) -> None:
        """
        Args:
            device: The device of the device pool.
            blocks: Number of blocks of the device pool.
            make_kernels: Makes the kernels of a copy thread, called once for each thread.
        """
        self.host = host
        self._device = device
        self._options = options
        self._computed = LayerGate()
        self._late: tuple[StepPlan, StepGate] | None = None
        """The last plan, if it has small late saves that are not ordered yet."""
        self._touched = _Touched(host.capacity_slots, blocks)
        self._trace: LayerTrace | None = None
        self._reported = (0, 0)
        self.saves = CopyLane("saves", host, make_kernels(), make_stream(device), options, self._fail)
        self.loads = CopyLane("loads", host, make_kernels(), make_stream(device), options, self._fail)

    # --- a step

    def begin(self, plan: StepPlan) -> StepGate:
        """Give a plan's saves and loads to the copy threads, and wait for its save fence.

        Raises:
            PlanError: a block or slot that does not exist, or does not hold what the plan says.
            CopyError: copies have failed.
        """
        self._computed.check()
        self.settle()
        _check_names(plan)
        layers = self.host.layers
        gate = StepGate(plan.step, layers, self.loads.gate, self._computed)
        mark = mark_of(self._device) if plan.saves or plan.loads else None
        if plan.saves:
            self._save(SAVE, gate, unpack_int32(plan.saves, columns=3), mark, plan.save_names)
        if plan.thinned:
            gate.waited_ns += self._wait_for_copies_of(unpack_int32(plan.thinned))
        fence = self.saves.last_until(plan.save_fence)
        if plan.saves and not self._options.saves_beside:
            fence = self.saves.submitted
        if plan.loads:
            parts = np.frombuffer(plan.load_layers, np.uint8) if plan.load_layers else None
            self._load(plan.step, unpack_int32(plan.loads, columns=3), mark, fence, parts)
        if plan.late_saves and self.saves.follows_layers(len(plan.late_saves) // _SAVE_BYTES):
            gate.tells_layers, gate.record_layer = True, lambda: mark_of(self._device)
            self._save_late(plan, gate)
        elif plan.late_saves:
            self._late = plan, gate
        if fence:
            gate.waited_ns += self.saves.wait_for(fence)
        last = self.loads.last_until(plan.load_fence)
        if last and self._options.is_layerwise:
            gate.loads_from = (last - 1) * layers
        elif last:
            gate.waited_ns += self.loads.wait_for(last)
        gate.trace = self._trace
        return gate

    def before_copies(self, copies: Int32Array, gate: StepGate) -> None:
        """Wait until all loads into the sources and destinations of these block copies are done.

        Args:
            copies: int32 `[n, 4]`, as in `Kernels.copy_blocks`.
        """
        blocks, loads = copies[:, :2].ravel().tolist(), self._touched.block_loads
        if blocks and 0 <= min(blocks) <= max(blocks) < len(loads):
            gate.waited_ns += self.loads.wait_for(max(loads[blocks].tolist()))

    def finish(self, gate: StepGate) -> None:
        """Note that the step has been computed: its fences are done for all later plans."""
        gate.finish()
        if not self._options.saves_beside:
            self.settle()
            gate.waited_ns += self.saves.wait_for(self.saves.submitted)

    def settle(self) -> None:
        """Order the small late saves of the last plan, whose step must have been computed. A client waits for the
        step's token, and for nothing of this; the next plan does it in any case.

        Raises:
            PlanError: a block or slot that does not exist.
        """
        late, self._late = self._late, None
        if late is not None:
            self._save_late(*late)

    def take_moved(self) -> tuple[int, int]:
        """Microseconds that copying took since the last call, and blocks copied since then."""
        both = (self.saves.moved, self.loads.moved)
        total = (both[0][0] + both[1][0], both[0][1] + both[1][1])
        spent_ns, blocks = total[0] - self._reported[0], total[1] - self._reported[1]
        self._reported = total
        return spent_ns // 1000, blocks

    def _save_late(self, plan: StepPlan, gate: StepGate) -> None:
        late, names = unpack_int32(plan.late_saves, columns=3), plan.save_names
        names = names[len(plan.saves) // _SAVE_BYTES * NAME_BYTES :]
        self._save(LATE_SAVE, gate, late, mark_of(self._device), names)

    def _save(self, kind: str, gate: StepGate, moves: Int32Array, mark: object, names: bytes = b"") -> None:
        """Submit a job behind earlier loads, whose slots it may overwrite and whose blocks it may read.

        Args:
            names: Names of the chunks in the order of `moves`, and perhaps further ones; empty: not known.
        """
        touched = self._touched
        blocks, slots = self.host.begin_saves(moves)
        behind = max(*touched.slot_loads[slots].tolist(), *touched.block_loads[blocks].tolist())
        waits = ((self.loads.gate, behind * self.host.layers),)
        computed = (self._computed, gate.behind) if kind == LATE_SAVE and gate.tells_layers else None
        number = self.saves.submit(CopyJob(kind, gate.step, blocks, slots, waits, mark, computed, gate.marks))
        touched.slot_saves[slots] = number
        touched.block_saves[blocks] = number
        if names:  # not before: who finds a name must see what its content waits for
            for index, slot in enumerate(moves[:, 1].tolist()):
                self.host.names.put(slot, names[index * NAME_BYTES : (index + 1) * NAME_BYTES])

    def _wait_for_copies_of(self, blocks: Int32Array) -> int:
        """Wait until all saves and loads of these blocks are done that were ordered so far; return the nanoseconds
        waited."""
        touched = self._touched
        if not 0 <= blocks.min() <= blocks.max() < len(touched.block_saves):
            return 0  # `thin_blocks` refuses them
        waited_ns = self.saves.wait_for(int(touched.block_saves[blocks].max()))
        return waited_ns + self.loads.wait_for(int(touched.block_loads[blocks].max()))

    def _load(
        self, step: int, moves: Int32Array, mark: object, fence: int, parts: UInt8Array | None = None
    ) -> None:
        blocks, slots, parts = self.host.begin_loads(moves, parts)
        touched = self._touched
        behind = max(fence, int(touched.slot_saves[slots].max()), int(touched.block_saves[blocks].max()))
        waits = ((self.saves.gate, behind * self.host.layers),)
        number = self.loads.submit(CopyJob(LOAD, step, blocks, slots, waits, mark, parts=parts))
        touched.slot_loads[slots] = number
        touched.block_loads[blocks] = number

    # --- the tiers below

    def ticket(self, slot: int) -> Ticket:
        """Return the last copies of a host slot that the plans so far have ordered.

        Raises:
            PlanError: there is no such slot.
        """
        if not 0 <= slot < self.host.capacity_slots:
            raise PlanError(f"a move of host slot {slot}; there are {self.host.capacity_slots}")
        return Ticket(int(self._touched.slot_saves[slot]), int(self._touched.slot_loads[slot]))

    def is_saved(self, slot: int) -> bool:
        """Return whether all saves into a slot are done that the plans so far have ordered. May be called from any
        thread."""
        return self.saves.gate.passed >= int(self._touched.slot_saves[slot]) * self.host.layers

    def is_done(self, ticket: Ticket) -> bool:
        """Return whether the copies of a ticket are done. May be called from any thread."""
        layers = self.host.layers
        return self.saves.gate.passed >= ticket.save * layers and self.loads.gate.passed >= ticket.load * layers

    def wait_ticket(self, ticket: Ticket) -> None:
        """Wait until the copies of a ticket are done. May be called from any thread.

        Raises:
            CopyError: copies have failed.
        """
        self.saves.wait_for(ticket.save)
        self.loads.wait_for(ticket.load)

    # --- otherwise

    def measure(self) -> float:
        """Measure the microseconds that one save and one load of a block take, without any computation beside.

        What the device pool holds stays; the host pool must be empty.
        """
        count = min(MEASURED_BLOCKS, self.host.capacity_slots, len(self._touched.block_saves))
        if not count:
            return 0.0
        index = np.arange(count, dtype=np.int32)
        moves = np.stack([index, index, np.zeros_like(index)], axis=1)
        best, begun = float("inf"), time.perf_counter_ns()
        gate = StepGate(0, self.host.layers, self.loads.gate, self._computed)
        for attempt in range(_MEASURED_ROUNDS + 1):
            started = time.perf_counter_ns()
            self._save(SAVE, gate, moves, mark_of(self._device))
            self._load(0, moves, None, 0)
            self.loads.wait_for(self.loads.submitted)
            now = time.perf_counter_ns()
            if not attempt:
                continue  # the first round makes the system provide the pages
            best = min(best, (now - started) / 1000)
            if now - begun > _MEASURED_NS:
                break
        for slot in index.tolist():
            self.host.discard(SlotId(slot))
        self.take_moved()
        for lane in (self.saves, self.loads):
            lane.kernels.counters.reset()
        return best / count

    def start_trace(self, length: int) -> LayerTrace:
        """Keep, from now on, when the last `length` layers were computed and copied."""
        self._trace = self.saves.trace = self.loads.trace = LayerTrace(maxlen=length)
        return self._trace

    def check(self) -> None:
        """Raise the error that ended the copies, if one did.

        Raises:
            CopyError: copies have failed, so the rank cannot go on.
        """
        self._computed.check()

    def close(self) -> None:
        """End the copy threads, then give the host pool's memory back."""
        self._computed.fail(CopyError("the rank leaves"))
        for lane in (self.loads, self.saves):
            lane.close()
        self.host.close()

    def _fail(self, error: BaseException) -> None:
        """End all waiting: a copy thread has ended, so what it had to do will never be done."""
        for gate in (self._computed, self.saves.gate, self.loads.gate):
            gate.fail(error)


def _check_names(plan: StepPlan) -> None:
    """Raise `PlanError` unless a plan has no names, or one for each of its saves and late saves."""
    saves = (len(plan.saves) + len(plan.late_saves)) // _SAVE_BYTES
    if plan.save_names and len(plan.save_names) != saves * NAME_BYTES:
        raise PlanError(f"{len(plan.save_names)} bytes of names for {saves} saves")
