"""Costs of steps and moves, learnt from past steps, and what follows: how much prefill, and when to load. Pure.

    step time ≈ base + rows · row + prompt tokens · token          (µs, without saves and loads)
    move time ≈ blocks · move

**Costs.** The scheduler uses them to choose between swapping and recomputation (PagedAttention §4.5, §7.3), and to
limit the prefill in a step (`prefill_budget`): prompt tokens that share a step with decoding rows make every
stream wait.

      |── base + rows ──|──── prompt tokens ────|
      0                                         target

The target is soft: prompts always progress by `least` tokens in every step, or a full batch would starve them.

The three step costs are estimated by a Kalman filter over a random walk: a cost that recent steps say nothing
about keeps its estimate and becomes less certain. Machines stall now and then, so a surprise beyond three standard
deviations counts as three: a single stall hardly matters, and a lasting change is followed within some dozen
steps. Plain floats are faster than arrays for three numbers.

**Preload** (CachedAttention §3.2.1): which chunks a sequence loads, and when it may begin to compute. Loading
starts as soon as blocks are reserved, while other sequences compute: the reserved blocks are the paper's read
buffer. The first prefill step then overlaps with the rest of the loading, layer by layer. It never waits if

      S_buf = max(0, B · (T_load · L_hist - T_pref · L_new))

bytes have arrived before it: B is the bandwidth, T_load · L_hist the time to load what the sequence needs, and
T_pref · L_new the time to compute its new tokens. In other words, it may start when the remaining loads take no
longer than its first step. Loads run one after the other, so earlier loads count as remaining, too. If no other
sequence would run meanwhile, it starts at once: waiting would gain nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Final

from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.sequences.sequence import ALL_ENTRIES, SequenceGroup
from trunkline.kvstore.chunks import NO_BLOCK

PRIOR_US: Final = (2000.0, 50.0, 50.0)
"""Microseconds per step, row and prompt token that are assumed before anything is measured: the order of magnitude
for models from a laptop's to a GPU's. The first steps replace them."""
PRIOR_DEVIATION: Final = 10.0
"""Standard deviation of the priors, in units of the priors; later estimates never have a larger one."""
DRIFT: Final = 0.02
"""Fraction by which all costs change together from step to step (the machine is busy)."""
OWN_DRIFT: Final = 0.005
"""Fraction by which each cost changes by itself from step to step (contexts grow)."""
NOISE: Final = 0.15
"""Standard deviation of a step's time, as a fraction of that time."""
NOISE_LEAST_US: Final = 20.0
"""Smallest standard deviation of a step's time, in microseconds."""
SURPRISE_MAX: Final = 3.0
"""Largest surprise in standard deviations: a larger one counts as this many."""

DECODE_STEPS_PER_OBSERVATION: Final = 8
"""One of so many decode steps in a row is learnt from: they are alike, and each costs some microseconds."""

MOVES_REMEMBERED: Final = 64.0
"""Number of blocks over which the time of a move is averaged; the prior counts as an eighth of it."""


class StepCosts:
    """Estimates in µs of what steps and moves cost. The same observations give the same estimates."""

    def __init__(self, swap_us_per_block: float) -> None:
        """
        Args:
            swap_us_per_block: one save and one load of a block, as the workers measured them at their start; 0:
                not measured, taken as free until they are seen.
        """
        self._costs = list(PRIOR_US)
        deviations = [PRIOR_DEVIATION * prior for prior in PRIOR_US]
        self._spread = [[a * a if i == j else 0.0 for j in range(3)] for i, a in enumerate(deviations)]
        """Covariance of the estimates."""
        self.has_prefilled = False
        """Whether `token_us` is measured, and not only assumed."""
        self._moved_blocks = MOVES_REMEMBERED / 8
        self._moved_us = self._moved_blocks * swap_us_per_block / 2

    @property
    def token_us(self) -> float:
        """Microseconds of one more prompt token in a step."""
        return self._costs[2]

    @property
    def move_us(self) -> float:
        """Microseconds of moving one block in one direction."""
        return self._moved_us / self._moved_blocks

    def step_us(self, rows: int, prefill_tokens: int) -> float:
        """Return the predicted microseconds of a step."""
        base, row, token = self._costs
        return base + rows * row + prefill_tokens * token

    def observe(self, *, rows: int, prefill_tokens: int, elapsed_us: float) -> None:
        """Learn from a step that computed for `elapsed_us` (without waiting for copies)."""
        self.has_prefilled |= prefill_tokens > 0
        work = (1.0, float(rows), float(prefill_tokens))
        expected = _dot(self._costs, work)
        noise = max(NOISE * expected, NOISE_LEAST_US)
        gain = [_dot(line, work) for line in self._spread]
        variance = _dot(gain, work) + noise * noise
        limit = SURPRISE_MAX * sqrt(variance)
        surprise = min(max(max(0.0, elapsed_us) - expected, -limit), limit) / variance
        costs = self._costs = [max(0.0, cost + g * surprise) for cost, g in zip(self._costs, gain, strict=True)]
        # The costs drift: every estimate becomes a little less certain, up to a limit.
        size = [max(cost, 0.1 * prior) for cost, prior in zip(costs, PRIOR_US, strict=True)]
        both, own = DRIFT * DRIFT, DRIFT * DRIFT + OWN_DRIFT * OWN_DRIFT
        spread = [
            [
                self._spread[i][j] - gain[i] * gain[j] / variance + (own if i == j else both) * size[i] * size[j]
                for j in range(3)
            ]
            for i in range(3)
        ]
        shrink = [min(1.0, PRIOR_DEVIATION * prior / sqrt(spread[i][i])) for i, prior in enumerate(PRIOR_US)]
        self._spread = [[spread[i][j] * shrink[i] * shrink[j] for j in range(3)] for i in range(3)]

    def observe_decode(self, step: int, *, rows: int, elapsed_us: float) -> None:
        """Learn from a step that only decodes, if it is one of those that count: one of several, and each that
        takes less than two thirds of what was expected. Until the first steps are known, far too much is expected;
        and what is much longer is mostly a stall.

        Args:
            step: number of the step.
        """
        if step % DECODE_STEPS_PER_OBSERVATION == 0 or 1.5 * elapsed_us < self.step_us(rows, 0):
            self.observe(rows=rows, prefill_tokens=0, elapsed_us=elapsed_us)

    def observe_moves(self, blocks: int, moved_us: float) -> None:
        """Learn from blocks that were saved or loaded in `moved_us`."""
        keep = max(0.0, 1.0 - blocks / MOVES_REMEMBERED)
        if self._moved_us > 0.0:
            moved_us = min(moved_us, 4.0 * blocks * self.move_us)  # a stall, not the usual speed
        self._moved_blocks = self._moved_blocks * keep + blocks
        self._moved_us = self._moved_us * keep + moved_us

    def load_pays(self, tokens: int) -> bool:
        """Return whether loading a block is faster than computing its `tokens` again."""
        return self.move_us < tokens * self.token_us

    def prefers_swap(self, tokens: int, blocks: int) -> bool:
        """Return whether saving and loading `blocks` is faster than computing their `tokens` again."""
        return 2 * blocks * self.move_us < tokens * self.token_us


def _dot(left: Sequence[float], right: tuple[float, float, float]) -> float:
    return left[0] * right[0] + left[1] * right[1] + left[2] * right[2]


def prefill_budget(costs: StepCosts, rows: int, target_us: float, budget_max: int, least: int) -> int:
    """Return how many prompt tokens fit into a step with `rows` decoding rows that should take about `target_us`.

    Args:
        target_us: 0 for no target.
        budget_max: largest number of prompt tokens that a step may have.
        least: prompt tokens that a step may have in any case.
    """
    if rows == 0 or target_us <= 0.0:
        return budget_max
    room = target_us - costs.step_us(rows, 0)
    least = min(least, budget_max)
    if room <= 0.0:
        return least
    if room >= costs.token_us * budget_max:
        return budget_max
    return max(int(room / costs.token_us), least)


@dataclass(slots=True)
class _Load:
    step: int
    """Number of the last plan whose loads the sequence needs."""
    done_at: float
    """Time at which the loads are expected to be done."""


def swaps(group: SequenceGroup, config: EngineConfig, costs: StepCosts) -> bool:
    """Return whether a preempted group's chunks should be saved to the host when their blocks are needed."""
    if config.preemption == "recompute" or not (config.host_slots and config.prefix_cache):
        return False
    blocks = len({block for s in group.members if s.batch_seq_id for block in s.block_table()} - {NO_BLOCK})
    return config.preemption == "swap" or costs.prefers_swap(blocks * config.chunk_size, blocks)


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
        """Time at which all loads ordered so far will be done."""

    def ordered(self, blocks: int, now: float, move_us: float) -> None:
        """Note that a plan loads this many blocks, each in `move_us`."""
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
