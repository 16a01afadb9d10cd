"""Build the flat arrays of one forward pass from a step plan, which says only what changed.

In the steady state of decoding nothing but counters move: positions and slots grow by one and the decode plan
goes on (`decode_planner`, the lazy copy of ChunkAttention §3.3).

Logits are asked for in this order: decode rows, prefill entries that sample, prompt positions that are scored:

      samples      row 0 … row n-1 │ entry, entry, … │ fork, fork, …
      logits rows  0     … n-1     │ n, n + 1, …     │ (a fork reads its parent's) │ scored prompt positions

A decode row with drafts is followed by a row for each of them (`draft_rows`), a sample and logits row like it.

Behind these rows stand the tokens whose final hidden states are needed, but no logits: those of prompts that are
pooled over all of their tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trunkline.kernels.adapters import AdapterRows
from trunkline.kernels.live_plan import AnyDecodePlan
from trunkline.kernels.plan import PrefillPlan, WritePlan
from trunkline.kvstore.chunks import NO_BLOCK, Int32Array, unpack_int32
from trunkline.worker.batch.decode_planner import DecodePlanner, LivePlanner, RebuildingPlanner
from trunkline.worker.batch.draft_rows import DraftRows
from trunkline.worker.batch.sequences import BatchSequence, SequenceTable, entries_behind, segments_of
from trunkline.worker.errors import PlanError
from trunkline.worker.messages import StepPlan

_NO_RUNS = np.zeros((0, 4), dtype=np.int32)
_NO_ROWS = np.zeros(0, dtype=np.int32)


def to_int64(values: np.ndarray[tuple[int], np.dtype[np.signedinteger]], device: torch.device) -> Tensor:
    """Return numbers as an int64 tensor on a device."""
    return torch.from_numpy(values.astype(np.int64)).to(device)


class ScoredPrompt(NamedTuple):
    """Prompt tokens whose log-probabilities are asked for: those that follow the tokens of one prefill entry."""

    sequence: int
    start: int
    """Position of the first target."""
    targets: Int32Array
    """The prompt's tokens at positions `start`, `start + 1`, …: each is scored by the logits before it."""
    top: int
    """Number of most likely tokens to report at each position."""


class PooledPiece(NamedTuple):
    """Tokens of a prompt whose final hidden states are pooled, all computed by one prefill entry."""

    sequence: int
    rows: slice
    """Their rows among the final hidden states (`ForwardBatch.state_rows`)."""
    tokens: int
    """Number of the prompt's tokens that are pooled up to here, earlier pieces included."""
    sample: int
    """Index of the sample whose report has the result; -1: further pieces follow."""


@dataclass(frozen=True)
class ForwardBatch:
    """One forward pass: the decode rows' tokens, then the prefill entries' tokens."""

    inputs: Callable[[], tuple[Int32Array, Int32Array]]
    """Returns `numbers`; not called for steps whose tokens the device knows."""
    num_rows: int
    """Number of decode rows, drafts included."""
    write: WritePlan
    decode: AnyDecodePlan | None
    prefill: PrefillPlan | None
    samples: list[BatchSequence]
    """Sequences whose next token is drawn, in the order of `StepResult.tokens`: rows, prefill entries, forks."""
    samples_changed: bool
    """Whether `samples` differ from those of the step before."""
    state_rows: Tensor | None
    """int64 `[rows]`: indices of the tokens whose final hidden states are needed, those whose logits are needed
    first; None: all, in order, and all logits."""
    fork_rows: tuple[int, ...] = ()
    """The logits row from which each fork is drawn; the forks are the last of `samples`. Row i is also the row of
    sample i, which is no fork."""
    scored: tuple[ScoredPrompt, ...] = ()
    """The scored prompts. Their logits rows follow those of the samples, entry by entry."""
    pooled: tuple[PooledPiece, ...] = ()
    guesses: Int32Array | None = None
    """The draft that stands at each decode row (`DraftRows.guesses`); None: no row has drafts."""
    adapters: AdapterRows | None = None
    """The adapters of the tokens' sequences; None: no token has one."""

    device: torch.device = torch.device("cpu")  # noqa: RUF009
    """Where `ids` and `positions` are made."""

    @cached_property
    def numbers(self) -> tuple[Int32Array, Int32Array]:
        """Token ids, and the tokens' positions for rotation (see `sequences`), int32 `[tokens]`."""
        return self.inputs()

    @cached_property
    def ids(self) -> Tensor:
        """Token ids, int64 `[tokens]`."""
        return to_int64(self.numbers[0], self.device)

    @cached_property
    def positions(self) -> Tensor:
        """Positions of the tokens for rotation, int64 `[tokens]`."""
        return to_int64(self.numbers[1], self.device)

    @property
    def needs_states(self) -> bool:
        """Whether any final hidden states are needed, for logits or to be pooled."""
        return bool(self.samples or self.scored or self.pooled)

    @property
    def logits_rows(self) -> int:
        """Number of rows whose logits are needed."""
        rows = len(self.samples) - len(self.fork_rows)
        for entry in self.scored:
            rows += len(entry.targets)
        return rows

    @property
    def children(self) -> list[BatchSequence]:
        """The forks, which are the last of the samples."""
        return self.samples[self.sampled_rows :]

    @property
    def sampled_rows(self) -> int:
        """Number of logits rows that are sampled from; the scored rows follow."""
        return len(self.samples) - len(self.fork_rows)


class BatchBuilder:
    """Builds the batch of each step; keeps the decode rows between steps."""

    def __init__(
        self,
        sequences: SequenceTable,
        chunk_size: int,
        device: torch.device,
        *,
        live: bool,
        window: int = 0,
        cached_prompts_decode: bool = False,
    ) -> None:
        """
        Args:
            live: Whether the kernels execute live plans; else plans are made from nothing.
            window: `ModelConfig.window`.
            cached_prompts_decode: Whether a prompt that is cached but for its last token is computed as a decode
                row, instead of by prefill. Untried where graphs run decode rows.
        """
        self._window = window
        self._cached_prompts_decode = cached_prompts_decode
        self._sequences = sequences
        self._chunk_size = chunk_size
        self._device = device
        self._rows: list[BatchSequence] = []
        self._runs: Int32Array = _NO_RUNS
        self._decode: DecodePlanner = (LivePlanner if live else RebuildingPlanner)(chunk_size, window)
        self._had_prefill_samples = False
        self._had_drafts = False

    @property
    def live(self) -> LivePlanner | None:
        """What keeps the decode rows, if the kernels execute live plans."""
        return self._decode if isinstance(self._decode, LivePlanner) else None

    def build(self, plan: StepPlan) -> ForwardBatch:
        """Return the batch of a plan whose leaves, joins and blocks have been applied.

        Raises:
            PlanError: rows, runs or prefill entries that do not fit the sequences.
        """
        rebuilt = self._update_rows(plan)
        drafted = DraftRows.of(self._rows, plan.drafts) if plan.drafts else None
        entries = unpack_int32(plan.prefill, columns=5) if plan.prefill else None
        may_enter = self._cached_prompts_decode and drafted is None and not plan.forks
        entering = self._entering(entries) if may_enter and entries is not None else None
        rows = self._rows if drafted is None else drafted.sequences
        if entering:
            rows = rows + entering
            self._decode.rows_changed()
        num_rows, decode = len(rows), None
        if num_rows:
            self._decode.step(self._rows if drafted is not None else rows, self._runs, drafted)
            decode = self._decode.plan
        prefill = None
        if entering:
            self._decode.rows_changed()  # the next plan says which of them go on
        elif entries is not None:
            prefill = _Prefill(entries, self._sequences, self._chunk_size)
        positions, slots = (self._decode.positions, self._decode.slots) if num_rows else (_NO_ROWS, _NO_ROWS)
        samples, state_rows = rows, None
        fork_rows: tuple[int, ...] = ()
        scored: tuple[ScoredPrompt, ...] = ()
        pooled: tuple[PooledPiece, ...] = ()
        prefill_samples = bool(entering)
        if prefill is not None:
            positions = np.concatenate([positions, *prefill.positions])
            slots = np.concatenate([slots, *prefill.slots])
            prefill_samples = bool(prefill.samples)
            needed = [np.array(prefill.last_tokens, dtype=np.int64), *prefill.scored_tokens]
            pooled, further = prefill.pooled(num_rows, num_rows + sum(map(len, needed)))
            state_rows = np.concatenate([np.arange(num_rows), np.concatenate([*needed, *further]) + num_rows])
            children, parents = self._fork(plan, prefill)
            samples = rows + prefill.samples + children
            fork_rows = tuple(num_rows + parent for parent in parents)
            scored = tuple(prefill.scored)
        elif plan.forks:
            raise PlanError(f"sequence {plan.forks[0].parent} forks in a step without prefill")
        changed = (
            rebuilt or prefill_samples or self._had_prefill_samples or drafted is not None or self._had_drafts
        )
        self._had_prefill_samples, self._had_drafts = prefill_samples, drafted is not None

        return ForwardBatch(
            inputs=partial(self._inputs, rows, drafted, prefill, positions),
            num_rows=num_rows,
            write=WritePlan(self._chunk_size, slots),
            decode=decode,
            prefill=prefill.plan(self._chunk_size, self._window) if prefill is not None else None,
            samples=samples,
            samples_changed=changed,
            state_rows=None if state_rows is None else to_int64(state_rows, self._device),
            fork_rows=fork_rows,
            scored=scored,
            pooled=pooled,
            guesses=None if drafted is None else drafted.guesses,
            adapters=self._adapters(rows, prefill) if self._sequences.adapted else None,
            device=self._device,
        )

    def _entering(self, entries: Int32Array) -> list[BatchSequence] | None:
        """Return the sequences of a plan's prefill entries, in order, if each entry is what a decode row is: the
        last known token, which is stored and drawn from. That is so of prompts that are cached but for this token.
        None: some entry is more."""
        found = []
        for sequence_id, start, count, write_from, sample in entries.tolist():
            sequence = self._sequences[sequence_id]
            sampling, is_last = sequence.sampling, start + count == sequence.known
            is_row = count == 1 and sample and write_from <= start and is_last and sequence.beam_position is None
            if not is_row or sampling.prompt_logprobs >= 0 or sampling.pooling:
                return None
            found.append(sequence)
        return found

    @staticmethod
    def _adapters(rows: list[BatchSequence], prefill: _Prefill | None) -> AdapterRows | None:
        """Return the adapter of each token: of the decode rows, then of the prefill entries."""
        used = [*rows, *(prefill.sequences if prefill is not None else ())]
        numbers: dict[bytes, int] = {b"": -1}
        of_sequence = [numbers.setdefault(each.adapter, len(numbers) - 1) for each in used]
        if len(numbers) == 1:
            return None
        tokens = [1] * len(rows) + ([] if prefill is None else [len(ids) for ids in prefill.ids])
        return AdapterRows(tuple(numbers)[1:], np.repeat(np.array(of_sequence, dtype=np.int32), tokens))

    def forget_plan(self) -> None:
        """Make the next step plan the beams anew: they have exchanged block tables."""
        self._decode.beams_changed()

    def _fork(self, plan: StepPlan, prefill: _Prefill) -> tuple[list[BatchSequence], list[int]]:
        """Make the plan's forks; return them, and for each the index of its parent among the prefill samples.

        Raises:
            PlanError: a fork of a sequence whose prompt does not end in this step.
        """
        if not plan.forks:
            return [], []
        index_of = {sequence.id: index for index, sequence in enumerate(prefill.samples)}
        stray = [fork.parent for fork in plan.forks if fork.parent not in index_of]
        if stray:
            raise PlanError(f"sequences {stray} fork, but none of their prefill entries samples in this step")
        children = [self._sequences.fork(fork) for fork in plan.forks]
        return children, [index_of[fork.parent] for fork in plan.forks]

    def _inputs(
        self,
        rows: list[BatchSequence],
        drafted: DraftRows | None,
        prefill: _Prefill | None,
        positions: Int32Array,
    ) -> tuple[Int32Array, Int32Array]:
        """Return the ids and positions of a step's tokens."""
        ids = drafted.ids if drafted is not None else np.array([row.tokens[-1] for row in rows], dtype=np.int32)
        if prefill is not None:
            ids = np.concatenate([ids, *prefill.ids])
        return ids, positions

    def _update_rows(self, plan: StepPlan) -> bool:
        """Take over the plan's rows and runs; return whether the rows are others than before."""
        if plan.rows is not None:
            self._rows = [self._sequences[sequence] for sequence in unpack_int32(plan.rows).tolist()]
            self._runs = _NO_RUNS
        elif plan.leaves:
            gone = set(unpack_int32(plan.leaves).tolist())
            stale = [row.id for row in self._rows if row.id in gone]
            if stale:
                raise PlanError(f"sequences {stale} leave, but the plan keeps their rows")
        if plan.runs is not None:
            self._runs = unpack_int32(plan.runs, columns=4)
            if len(self._runs) and not (self._runs.min() >= 0 and self._runs[:, :2].max() <= len(self._rows)):
                raise PlanError(f"runs {self._runs.tolist()} reach outside {len(self._rows)} rows")
        if plan.rows is not None or plan.runs is not None:
            self._decode.rows_changed()
        if plan.blocks:
            self._decode.tables_changed(unpack_int32(plan.blocks, columns=3)[:, 0].tolist())
        return plan.rows is not None


class _Prefill:
    """The prefill entries of one step."""

    def __init__(self, entries: Int32Array, sequences: SequenceTable, chunk_size: int) -> None:
        self.ids: list[Int32Array] = []
        self.positions: list[Int32Array] = []
        self.slots: list[Int32Array] = []
        self.samples: list[BatchSequence] = []
        self.last_tokens: list[int] = []
        """Index, among all prefill tokens, of the last token of each entry that samples."""
        self.scored: list[ScoredPrompt] = []
        self.scored_tokens: list[NDArray[np.int64]] = []
        """Indices, among all prefill tokens, of the token before each scored one."""
        self.sequences: list[BatchSequence] = []
        self._stops: list[int] = []
        """For each entry, the index in its sequence behind the entry's last token."""
        self._pooled: list[tuple[BatchSequence, int, int, int]] = []
        """For each entry of a prompt that is pooled: its sequence, its first token among all prefill tokens, the
        number of its tokens, and the index of its prefill sample, or -1."""
        total = 0
        for sequence_id, start, count, write_from, sample in entries.tolist():
            sequence, stop = sequences[sequence_id], start + count
            self.ids.append(sequence.token_slice(start, stop))
            slots = sequence.slots(start, stop, chunk_size)
            slots[: max(0, min(count, write_from - start))] = NO_BLOCK
            self.slots.append(slots)
            self.positions.append(sequence.layout.frame_positions(start, stop))
            self.sequences.append(sequence)
            self._stops.append(stop)
            if sequence.sampling.prompt_logprobs >= 0:
                self._score(sequence, start, stop, total)
            if sequence.sampling.pooling:
                self._pooled.append((sequence, total, count, len(self.samples) if sample else -1))
            total += count
            if sample:
                if stop != sequence.known:
                    raise PlanError(
                        f"sequence {sequence_id}: to sample after index {stop - 1}, "
                        f"while {sequence.known} tokens are known"
                    )
                self.samples.append(sequence)
                self.last_tokens.append(total - 1)

    def _score(self, sequence: BatchSequence, start: int, stop: int, first_token: int) -> None:
        """Note which prompt tokens the entry `[start, stop)` scores; the entry's tokens begin at index
        `first_token` of all prefill tokens."""
        count = min(stop, sequence.prompt_len - 1) - start
        if count <= 0:
            return
        targets = sequence.token_slice(start + 1, start + 1 + count)
        self.scored.append(ScoredPrompt(sequence.id, start + 1, targets, sequence.sampling.prompt_logprobs))
        self.scored_tokens.append(np.arange(first_token, first_token + count))

    def pooled(self, rows: int, states: int) -> tuple[tuple[PooledPiece, ...], list[NDArray[np.int64]]]:
        """Return the pieces of prompts that are pooled, and the prefill tokens whose states they need in addition.

        Args:
            rows: number of decode rows, which come before the prefill samples.
            states: number of rows of final hidden states that are needed for logits.

        Raises:
            PlanError: a prompt that is pooled over all of its tokens was not computed from its first one.
        """
        pieces: list[PooledPiece] = []
        further: list[NDArray[np.int64]] = []
        for sequence, first, count, sample in self._pooled:
            index = -1 if sample < 0 else rows + sample
            if not sequence.sampling.pools_all:
                if sample >= 0:  # its state is there already, for the logits
                    pieces.append(PooledPiece(sequence.id, slice(index, index + 1), 1, index))
                continue
            sequence.pooled += count
            if sample >= 0 and sequence.pooled != sequence.prompt_len:
                raise PlanError(
                    f"sequence {sequence.id}: {sequence.pooled} of its prompt's {sequence.prompt_len} tokens were "
                    "computed; all are needed to be pooled"
                )
            pieces.append(PooledPiece(sequence.id, slice(states, states + count), sequence.pooled, index))
            further.append(np.arange(first, first + count))
            states += count
        return tuple(pieces), further

    def plan(self, chunk_size: int, window: int) -> PrefillPlan:
        stops = np.array(self._stops, dtype=np.int32)
        query_indptr = np.array([0, *accumulate(map(len, self.ids))], dtype=np.int32)
        behind = None
        if window:
            behind = entries_behind(self.sequences, stops - np.diff(query_indptr), window, chunk_size)
        segments = segments_of(self.sequences, stops, chunk_size, behind)
        return PrefillPlan(
            chunk_size=chunk_size,
            query_indptr=query_indptr,
            query_position=np.concatenate(self.positions),
            item_indptr=segments.row.searchsorted(np.arange(len(self.sequences) + 1)).astype(np.int32),
            block=segments.block,
            first=segments.first,
            count=segments.count,
            base=segments.base,
            shift=segments.shift,
        )
