"""Reference decode attention: two phases, then a merge (ChunkAttention §3.2).

      chunk first     a run of shared items with the same rows: K, V gathered once as [kv_heads, tokens, d],
                      all rows' queries against them in one matmul -> one partial per row
      sequence first  all other items at once, bucketed by their number of rows (mostly one)
                      -> one partial per (item, row)
      merge           each row's partials by log-sum-exp, through an index of slots per row

Garbage in slots that no item covers cannot leak: its scores are masked and its values zeroed in the gathered
copy (0 * NaN would be NaN).

Layers share a plan's state but not always a spec (sliding windows on some layers): the state holds what follows
from the plan and the pool's shape, a spec comes with each call.

Floating point: a row's result depends on how its context is cut into partials, so on the rows that share it.
Results are equal up to rounding, not bit by bit.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trunkline.kernels.ops import AttentionSpec, KvPool
from trunkline.kernels.plan import DecodePlan
from trunkline.kernels.quantised_kv import vectors_of
from trunkline.kernels.reference_attention import (
    ShiftAngles,
    SoftmaxState,
    adjust_scores,
    attend,
    check_plain,
    compute_dtype,
    merge,
    needs_distance,
    turn,
)
from trunkline.kvstore.chunks import Int32Array

RUN_ITEMS_MIN: Final = 4
"""Smallest number of shared items with the same rows that get a matmul of their own; fewer are read in the other
phase."""


class ReferenceDecodeState:
    """The data that the reference derives from a `DecodePlan`; private to `ReferenceKernels`."""

    def __init__(self, plan: DecodePlan, pool: KvPool) -> None:
        check_plain(pool, plan.block)
        self.count = plan.count.copy()
        self.tail_item = plan.tail_item
        self.steps = 0
        self.tokens = int(plan.count.sum())
        runs, rest = _split(plan)
        widths = np.diff(plan.row_indptr)[rest]
        self.buckets = [_Bucket(plan, rest[widths == width], pool) for width in np.unique(widths)]
        self.parts: list[_Run | _Bucket] = [_Run(plan, items, pool) for items in runs]
        self.parts += self.buckets
        self._refresh()
        row_of_partial = [part.rows for part in self.parts]
        self.slots = _merge_slots(row_of_partial, plan.num_rows, pool.data.device)
        self.needs_empty = self.slots is not None and self.slots.numel() > sum(map(len, row_of_partial))

    def advance_to(self, steps: int) -> int:
        """Grow tails by the steps made since the last call; return the tokens that a layer now reads."""
        grown = steps - self.steps
        if grown:
            self.count[self.tail_item] += grown
            self.tokens += grown * len(self.tail_item)
            self.steps = steps
            self._refresh()
            for part in self.parts:
                part.distance.advance(grown)
        return self.tokens

    def _refresh(self) -> None:
        for bucket in self.buckets:
            bucket.refresh(self.count)

    def attend(self, q: Tensor, pool: KvPool, layer: int, spec: AttentionSpec, out: Tensor) -> None:
        """Compute decode attention (`Kernels.decode_attention`)."""
        scaled = q.to(compute_dtype(q.dtype)) * spec.scale
        parts = [part.attend(scaled, pool, layer, spec) for part in self.parts]
        if not parts:
            out.zero_()
            return
        states = parts[0] if len(parts) == 1 else SoftmaxState(*(torch.cat(x) for x in zip(*parts, strict=True)))
        if self.slots is not None:
            rows, width = self.slots.shape
            flat = self.slots.view(-1)
            if self.needs_empty:
                fill = (0.0, float("-inf"), 0.0)
                states = SoftmaxState(*(_with_empty(x, v) for x, v in zip(states, fill, strict=True)))
            picked = SoftmaxState(*(x.index_select(0, flat).view(rows, width, *x.shape[1:]) for x in states))
            states = merge(picked, dim=1)
        out.copy_(states.output(spec.sinks))


class _Distance:
    """The distance from the query to each key, `[..., rows, tokens]`; computed only if a layer needs it."""

    def __init__(self, key_position: Int32Array, query_position: Int32Array, device: torch.device) -> None:
        self._key_position = key_position
        self._query_position = query_position
        self._device = device
        self._steps = 0
        self._made: Tensor | None = None
        self._positions: Tensor | None = None

    def advance(self, steps: int) -> None:
        """Move the queries on by `steps` tokens."""
        self._steps += steps
        if self._made is not None:
            self._made -= steps
        if self._positions is not None:
            self._positions += steps

    def positions(self, spec: AttentionSpec) -> Tensor | None:
        """Return where the queries are, `[..., rows, 1]`, if a layer needs it."""
        if not spec.span:
            return None
        if self._positions is None:
            now = (self._query_position + np.int32(self._steps)).astype(np.int32)
            self._positions = torch.from_numpy(now).to(self._device)
        return self._positions

    def of(self, spec: AttentionSpec) -> Tensor | None:
        if not needs_distance(spec):
            return None
        if self._made is None:
            distance = self._key_position - self._query_position - np.int32(self._steps)
            self._made = torch.from_numpy(distance).to(self._device)
        return self._made


class _Run:
    """Shared items with the same rows and shifts: the chunk-first phase."""

    def __init__(self, plan: DecodePlan, items: NDArray[np.int64], pool: KvPool) -> None:
        _, layers, bands, heads, chunk_size, _ = pool.data.shape
        device = pool.data.device
        start, stop = plan.row_indptr[items[0]], plan.row_indptr[items[0] + 1]
        self.rows = plan.rows[start:stop].astype(np.int64)
        self.row_index = torch.from_numpy(self.rows).to(device)
        shifts = plan.shifts[start:stop]
        self.angles = ShiftAngles(-shifts)
        # Rows of the pool seen as [blocks * layers * bands * kv_heads, chunk_size * row], head by head, so
        # that the gathered copy is [kv_heads, tokens, row] without a transposition.
        blocks = torch.from_numpy(plan.block[items].astype(np.int64)).to(device)
        first_rows = blocks * (layers * bands * heads)
        self.key_index = (first_rows + torch.arange(heads, device=device)[:, None]).view(-1)
        offset = np.arange(chunk_size, dtype=np.int32)
        first, count = plan.first[items, None], plan.count[items, None]
        key_position = (plan.base[items, None] - first + offset).reshape(-1)
        self.distance = _Distance(key_position + shifts[:, None], plan.query_position[self.rows, None], device)
        unused = ((offset < first) | (offset >= first + count)).reshape(-1)
        self.hidden = self.unused_rows = None
        if unused.any():
            tokens = np.flatnonzero(unused)
            rows = np.arange(heads)[:, None] * len(unused) + tokens
            self.hidden = torch.from_numpy(unused).to(device)
            self.unused_rows = torch.from_numpy(rows.reshape(-1)).to(device)

    def attend(self, q: Tensor, pool: KvPool, layer: int, spec: AttentionSpec) -> SoftmaxState:
        row = pool.data.shape[-1]
        fine = pool.data.view(-1, pool.chunk_size * row)
        index = self.key_index + layer * spec.bands * spec.kv_heads
        stored = k = fine.index_select(0, index).view(spec.kv_heads, -1, row)
        if not spec.latent_dim:
            stored = fine.index_select(0, index + spec.kv_heads).view(spec.kv_heads, -1, row)
        if self.unused_rows is not None:
            stored.view(-1, row).index_fill_(0, self.unused_rows, 0)
        k, v = vectors_of(pool, k, q.dtype), vectors_of(pool, stored, q.dtype)[..., -spec.value_dim :]
        rows = len(self.rows)
        picked = turn(q.index_select(0, self.row_index), self.angles.of(spec, pool))
        grouped = picked.view(rows, spec.kv_heads, spec.queries_per_kv, spec.head_dim).transpose(0, 1)
        grouped = grouped.reshape(spec.kv_heads, rows * spec.queries_per_kv, spec.head_dim)
        scores = grouped @ k.transpose(-1, -2)
        by_row = scores.view(spec.kv_heads, rows, spec.queries_per_kv, -1)
        adjust_scores(by_row, spec, self.distance.of(spec), self.distance.positions(spec))
        if self.hidden is not None:
            scores.masked_fill_(self.hidden, float("-inf"))
        state = attend(scores, v)
        return SoftmaxState(
            *(
                x.view(spec.kv_heads, rows, spec.queries_per_kv, *x.shape[2:]).transpose(0, 1).flatten(1, 2)
                for x in state
            )
        )


class _Bucket:
    """Items that have equally many rows: the sequence-first phase (one row), and small shared items."""

    def __init__(self, plan: DecodePlan, items: NDArray[np.int64], pool: KvPool) -> None:
        _, layers, bands, self.kv_heads, self.chunk_size, row = pool.data.shape
        device = pool.data.device
        self.items = items
        self.first = plan.first[items]
        self.width = int(plan.row_indptr[items[0] + 1] - plan.row_indptr[items[0]])
        entries = plan.row_indptr[items, None] + np.arange(self.width)
        rows, shifts = plan.rows[entries], plan.shifts[entries]
        self.rows = rows.reshape(-1).astype(np.int64)
        self.row_index = torch.from_numpy(self.rows).to(device)
        self.is_identity = np.array_equal(self.rows, np.arange(plan.num_rows))
        self.angles = ShiftAngles(-shifts.reshape(-1))
        offset = np.arange(self.chunk_size, dtype=np.int32)
        key_position = (plan.base[items] - self.first)[:, None] + offset
        query_position = plan.query_position[rows][..., None]
        self.distance = _Distance(key_position[:, None] + shifts[..., None], query_position, device)
        # Rows of the pool seen as [blocks * layers * bands, kv_heads * chunk_size * row].
        blocks = torch.from_numpy(plan.block[items].astype(np.int64)).to(device)
        self.key_index = blocks * (layers * bands)
        # Kept between layers and steps: fresh pages for a copy this large cost more than the copy.
        shape = (len(items), self.kv_heads * self.chunk_size * row)
        self.keys = self.values = pool.data.new_empty(shape)
        if bands > 1:
            self.values = pool.data.new_empty(shape)
        self.hidden: Tensor | None = None
        self.unused_rows: Tensor | None = None

    def refresh(self, count: Int32Array) -> None:
        """Compute again which slots are unused, after tails have grown."""
        offset = np.arange(self.chunk_size)
        first = self.first[:, None]
        unused = (offset < first) | (offset >= first + count[self.items][:, None])
        item, token = unused.nonzero()
        if not len(item):
            self.hidden = self.unused_rows = None
            return
        device = self.row_index.device
        self.hidden = torch.from_numpy(unused).to(device)[:, None, None]
        # Rows of the gathered values [items * kv_heads * chunk_size, row].
        rows = (item[:, None] * self.kv_heads + np.arange(self.kv_heads)) * self.chunk_size + token[:, None]
        self.unused_rows = torch.from_numpy(rows.reshape(-1)).to(device)

    def attend(self, q: Tensor, pool: KvPool, layer: int, spec: AttentionSpec) -> SoftmaxState:
        items, width = len(self.items), self.width
        coarse, index = pool.data.view(-1, self.keys.shape[1]), self.key_index + layer * spec.bands
        torch.index_select(coarse, 0, index, out=self.keys)
        if not spec.latent_dim:
            torch.index_select(coarse, 0, index + 1, out=self.values)
        if self.unused_rows is not None:
            self.values.view(-1, pool.data.shape[-1]).index_fill_(0, self.unused_rows, 0)
        shape = (items, spec.kv_heads, self.chunk_size, pool.data.shape[-1])
        k = vectors_of(pool, self.keys.view(shape), q.dtype)
        v = vectors_of(pool, self.values.view(shape), q.dtype)[..., -spec.value_dim :]
        picked = turn(q if self.is_identity else q.index_select(0, self.row_index), self.angles.of(spec, pool))
        grouped = picked.view(items, width, spec.kv_heads, spec.queries_per_kv, spec.head_dim)
        if width > 1:
            grouped = grouped.transpose(1, 2)
        grouped = grouped.reshape(items, spec.kv_heads, width * spec.queries_per_kv, spec.head_dim)
        scores = grouped @ k.transpose(-1, -2)
        by_row = scores.view(items, spec.kv_heads, width, spec.queries_per_kv, self.chunk_size)
        adjust_scores(by_row, spec, self.distance.of(spec), self.distance.positions(spec))
        if self.hidden is not None:
            scores.masked_fill_(self.hidden, float("-inf"))
        state = attend(scores, v)
        if width == 1:
            return SoftmaxState(*(x.flatten(1, 2) for x in state))
        return SoftmaxState(
            *(
                x.view(items, spec.kv_heads, width, spec.queries_per_kv, *x.shape[3:])
                .transpose(1, 2)
                .reshape(items * width, spec.heads, *x.shape[3:])
                for x in state
            )
        )


def _split(plan: DecodePlan) -> tuple[list[NDArray[np.int64]], NDArray[np.int64]]:
    """Return the runs of shared items that get a matmul of their own, and all other items."""
    runs: dict[bytes, list[int]] = {}
    for item in range(plan.shared_items):
        entries = slice(int(plan.row_indptr[item]), int(plan.row_indptr[item + 1]))
        runs.setdefault(plan.rows[entries].tobytes() + plan.shifts[entries].tobytes(), []).append(item)
    large = [np.array(items) for items in runs.values() if len(items) >= RUN_ITEMS_MIN]
    alone = np.ones(len(plan.block), dtype=bool)
    for items in large:
        alone[items] = False
    return large, np.flatnonzero(alone)


def _merge_slots(rows: list[NDArray[np.int64]], num_rows: int, device: torch.device) -> Tensor | None:
    """Return each row's partials, `[rows, most partials of a row]`; None if partial i is all of row i.

    Rows with fewer partials are filled up with the index after the last, which holds an empty state.
    """
    owner = np.concatenate([*rows, np.zeros(0, dtype=np.int64)])
    if np.array_equal(owner, np.arange(num_rows)):
        return None
    order = np.argsort(owner, kind="stable")
    counts = np.bincount(owner, minlength=num_rows)
    slots = np.full((num_rows, int(counts.max(initial=1))), len(owner), dtype=np.int64)
    slots[np.arange(slots.shape[1]) < counts[:, None]] = order
    return torch.from_numpy(slots).to(device)


def _with_empty(x: Tensor, value: float) -> Tensor:
    return torch.cat((x, x.new_full((1, *x.shape[1:]), value)))
