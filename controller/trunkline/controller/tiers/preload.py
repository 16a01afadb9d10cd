"""What of a sequence's KV is loaded, and when the sequence may begin to compute (CachedAttention §3.2.1). Pure.

Preloads starts as soon as blocks are reserved, while other sequences compute: the reserved blocks are the paper's
read buffer. The first prefill step then overlaps with the rest of the loading, layer by layer. It waits for
nothing if

      S_buf = max(0, B · (T_load · L_hist - T_pref · L_new))

bytes have arrived before it: B the bandwidth, T_load · L_hist the time to load what it needs, T_pref · L_new
that of its own computation. In time: it may start when what is left takes no longer than its first step. Loads
go one after the other, so those before it are part of what is left, and B is shared by waiting for them.

If nobody else would run meanwhile, it starts at once: to wait would win nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.sequences.sequence import ALL_ENTRIES, SequenceGroup
from trunkline.controller.tiers.costs import StepCosts


@dataclass(slots=True)
class _Load:
    step: int
    """The plan whose loads it needs, the last of them."""
    done_at: float
    """When they will be there, as far as can be known."""


def load_entries(group: SequenceGroup, config: EngineConfig, costs: StepCosts) -> int:
    """Up to which block-table entry a group's chunks are loaded from the host; the rest is computed again.

    With "recompute" a group that was preempted computes again what it had computed itself (PagedAttention §4.5);
    what it had found at its first admission may be loaded again. Texts of modules are encoded by others, so they
    are always loaded.
    """
    texts = group.modules.entries if group.modules is not None else 0
    if config.preemption == "recompute" and group.preempted and group.found is not None:
        return max(texts, group.found.entries)
    if group.modules is not None or config.preemption == "swap":
        return ALL_ENTRIES
    return ALL_ENTRIES if costs.load_pays(config.chunk_size) else 0


class Preloads:
    """Sequences that have been admitted and whose blocks are on their way, by stay."""

    def __init__(self) -> None:
        self._loads: dict[int, _Load] = {}
        self._link_free_at = 0.0
        """When all loads ordered so far will be done."""

    def ordered(self, blocks: int, now: float, move_us: float) -> None:
        """A plan loads so many blocks."""
        self._link_free_at = max(self._link_free_at, now) + blocks * move_us / 1e6

    def wait(self, batch_seq_id: int, step: int) -> None:
        """A sequence has been admitted, and needs what the plans up to `step` load."""
        self._loads[batch_seq_id] = _Load(step, self._link_free_at)

    def left(self, batch_seq_id: int) -> None:
        """It has left the batch."""
        self._loads.pop(batch_seq_id, None)

    def is_due(self, batch_seq_id: int, now: float, first_step_us: float, alone: bool) -> bool:
        """Whether a sequence may compute in a step planned now that takes `first_step_us`."""
        load = self._loads.get(batch_seq_id)
        return load is None or alone or load.done_at - now <= first_step_us / 1e6

    def begin(self, batch_seq_id: int) -> int:
        """It computes: the plan whose loads this step must wait for, layer by layer; 0: none."""
        load = self._loads.pop(batch_seq_id, None)
        return load.step if load is not None else 0
