"""Preload: which chunks a sequence loads, and when it may begin to compute (CachedAttention §3.2.1). Pure.

Loading starts as soon as blocks are reserved, while other sequences compute: the reserved blocks are the paper's
read buffer. The first prefill step then overlaps with the rest of the loading, layer by layer. It never waits
if

      S_buf = max(0, B · (T_load · L_hist - T_pref · L_new))

bytes have arrived before it: B is the bandwidth, T_load · L_hist the time to load what the sequence needs, and
T_pref · L_new the time to compute its new tokens. In other words, it may start when the remaining loads take no
longer than its first step. Loads run one after the other, so earlier loads count as remaining, too.

If no other sequence would run meanwhile, it starts at once: waiting would gain nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.sequences.sequence import ALL_ENTRIES, SequenceGroup
from trunkline.controller.tiers.costs import StepCosts


@dataclass(slots=True)
class _Load:
    step: int
    """The last plan whose loads it needs."""
    done_at: float
    """When they are expected to be done."""


def load_entries(group: SequenceGroup, config: EngineConfig, costs: StepCosts) -> int:
    """Return up to which block-table entry a group's chunks are loaded from the host; the rest is computed again.

    With "recompute", a preempted group computes again what it had computed itself (PagedAttention §4.5); chunks
    that it found at its first admission may be loaded. It cannot compute texts of modules itself, so they are
    always loaded.
    """
    texts = group.modules.entries if group.modules is not None else 0
    if config.preemption == "recompute" and group.preempted and group.found is not None:
        return max(texts, group.found.entries)
    if group.modules is not None or config.preemption == "swap":
        return ALL_ENTRIES
    return ALL_ENTRIES if costs.load_pays(config.chunk_size) else 0


class Preloads:
    """Admitted sequences whose blocks are being loaded, by their id in the batch."""

    def __init__(self) -> None:
        self._loads: dict[int, _Load] = {}
        self._link_free_at = 0.0
        """When all loads ordered so far will be done."""

    def ordered(self, blocks: int, now: float, move_us: float) -> None:
        """Account for a plan that loads so many blocks."""
        self._link_free_at = max(self._link_free_at, now) + blocks * move_us / 1e6

    def wait(self, batch_seq_id: int, step: int) -> None:
        """Note that an admitted sequence needs the loads of the plans up to `step`."""
        self._loads[batch_seq_id] = _Load(step, self._link_free_at)

    def left(self, batch_seq_id: int) -> None:
        """Forget a sequence that has left the batch."""
        self._loads.pop(batch_seq_id, None)

    def is_due(self, batch_seq_id: int, now: float, first_step_us: float, alone: bool) -> bool:
        """Return whether a sequence may compute in a step planned now that takes `first_step_us`."""
        load = self._loads.get(batch_seq_id)
        return load is None or alone or load.done_at - now <= first_step_us / 1e6

    def begin(self, batch_seq_id: int) -> int:
        """Let a sequence compute; return the plan whose loads its step must wait for, layer by layer (0: none)."""
        load = self._loads.pop(batch_seq_id, None)
        return load.step if load is not None else 0
