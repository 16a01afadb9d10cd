"""Reference decode attention: two phases, then a merge (ChunkAttention §3.2).

      chunk first     a run of shared items with the same rows: K, V gathered once as [kv_heads, tokens, d],
                      all rows' queries against them in one matmul -> one partial per row
      sequence first  all other items at once, bucketed by their number of rows (mostly one)
                      -> one partial per (item, row)
      merge           each row's partials by log-sum-exp, through an index of slots per row

Garbage in slots that no item covers cannot leak: its scores are masked and its values zeroed in the gathered
copy (0 * NaN would be NaN).

Floating point: a row's result depends on how its context is cut into partials, so on who shares it; equal up
to rounding, not bit by bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trunkline.kernels.ops import Angles, AttentionSpec, make_angles, swap_halves
from trunkline.kernels.plan import DecodePlan
from trunkline.kernels.softmax_state import SoftmaxState, attend, merge
from trunkline.kvstore.layout import Int32Array

RUN_ITEMS_MIN: Final = 4
"""Shared items with the same rows from which a matmul of their own pays; fewer go with the other phase."""


class DecodeState:
    """What the reference derives from a `DecodePlan`; private to `ReferenceKernels`."""

    def __init__(self, plan: DecodePlan, spec: AttentionSpec, kv_pool: Tensor) -> None:
        self.spec = spec
        self.count = plan.count.copy()
        self.tail_item = plan.tail_item
        self.steps = 0
        self.tokens = int(plan.count.sum())
        geometry = _Geometry(kv_pool, spec)
        runs, rest = _split(plan)
        widths = np.diff(plan.row_indptr)[rest]
        self.buckets = [_Bucket(plan, rest[widths == width], geometry) for width in np.unique(widths)]
        self.parts: list[_Run | _Bucket] = [_Run(plan, items, geometry) for items in runs]
        self.parts += self.buckets
        self._refresh()
        row_of_partial = [part.rows for part in self.parts]
        self.slots = _merge_slots(row_of_partial, plan.num_rows, kv_pool.device)
        self.needs_empty = self.slots is not None and self.slots.numel() > sum(map(len, row_of_partial))

    def advance_to(self, steps: int) -> int:
        """Grow tails by the steps made since the last call; returns the tokens that a layer now reads."""
        grown = steps - self.steps
        if grown:
            self.count[self.tail_item] += grown
            self.tokens += grown * len(self.tail_item)
            self.steps = steps
            self._refresh()
        return self.tokens

    def _refresh(self) -> None:
        for bucket in self.buckets:
            bucket.refresh(self.count)

    def attend(self, q: Tensor, kv_pool: Tensor, layer: int, out: Tensor) -> None:
        """See `Kernels.decode_attention`."""
        compute = torch.float32 if q.element_size() == 2 else q.dtype
        scaled = q.to(compute) * self.spec.scale
        parts = [part.attend(scaled, kv_pool, layer) for part in self.parts]
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
        out.copy_(states.output())


@dataclass(frozen=True)
class _Geometry:
    """Shapes of the pool as the gathers need them."""

    kv_pool: Tensor
    spec: AttentionSpec

    def angles(self, shifts: Int32Array) -> Angles | None:
        """Rotation by `-shift` of each (row of an) item; None if nothing is shifted."""
        frequencies = self.spec.inverse_frequencies
        if not shifts.any():
            return None
        if frequencies is None:
            raise ValueError("a shift needs rotary positions")
        angles = make_angles(torch.from_numpy(-shifts.astype(np.float64)), frequencies.double().cpu())
        compute = torch.float32 if self.kv_pool.element_size() == 2 else self.kv_pool.dtype
        return Angles(*(x.to(self.kv_pool.device, compute) for x in angles))


class _Run:
    """Shared items with the same rows and shifts: the chunk-first phase."""

    def __init__(self, plan: DecodePlan, items: NDArray[np.int64], geometry: _Geometry) -> None:
        pool, spec = geometry.kv_pool, geometry.spec
        device, heads, chunk_size = pool.device, spec.kv_heads, plan.chunk_size
        start, stop = plan.row_indptr[items[0]], plan.row_indptr[items[0] + 1]
        self.rows = plan.rows[start:stop].astype(np.int64)
        self.row_index = torch.from_numpy(self.rows).to(device)
        self.angles = geometry.angles(plan.shifts[start:stop])
        self.spec = spec
        self.layers = pool.shape[1]
        # Rows of the pool seen as [blocks * layers * 2 * kv_heads, chunk_size * head_dim], head by head, so
        # that the gathered copy is [kv_heads, tokens, head_dim] without a transposition.
        blocks = torch.from_numpy(plan.block[items].astype(np.int64)).to(device)
        first_rows = blocks * (self.layers * 2 * heads)
        self.key_index = (first_rows + torch.arange(heads, device=device)[:, None]).view(-1)
        offset = np.arange(chunk_size)
        first, count = plan.first[items, None], plan.count[items, None]
        unused = ((offset < first) | (offset >= first + count)).reshape(-1)
        self.hidden = self.unused_rows = None
        if unused.any():
            tokens = np.flatnonzero(unused)
            rows = np.arange(heads)[:, None] * len(unused) + tokens
            self.hidden = torch.from_numpy(unused).to(device)
            self.unused_rows = torch.from_numpy(rows.reshape(-1)).to(device)

    def attend(self, q: Tensor, kv_pool: Tensor, layer: int) -> SoftmaxState:
        spec = self.spec
        fine = kv_pool.view(-1, kv_pool.shape[4] * spec.head_dim)
        index = self.key_index + layer * 2 * spec.kv_heads
        k = fine.index_select(0, index).view(spec.kv_heads, -1, spec.head_dim)
        v = fine.index_select(0, index + spec.kv_heads).view(spec.kv_heads, -1, spec.head_dim)
        if self.unused_rows is not None:
            v.view(-1, spec.head_dim).index_fill_(0, self.unused_rows, 0.0)
        rows = len(self.rows)
        picked = _turn(q.index_select(0, self.row_index), self.angles)
        grouped = picked.view(rows, spec.kv_heads, spec.group, spec.head_dim).transpose(0, 1)
        grouped = grouped.reshape(spec.kv_heads, rows * spec.group, spec.head_dim)
        state = attend(grouped, k.to(q.dtype), v.to(q.dtype), self.hidden)
        return SoftmaxState(
            *(x.view(spec.kv_heads, rows, spec.group, *x.shape[2:]).transpose(0, 1).flatten(1, 2) for x in state)
        )


class _Bucket:
    """Items that have equally many rows: the sequence-first phase (one row), and small shared items."""

    def __init__(self, plan: DecodePlan, items: NDArray[np.int64], geometry: _Geometry) -> None:
        pool = geometry.kv_pool
        self.spec = geometry.spec
        self.items = items
        self.first = plan.first[items]
        self.width = int(plan.row_indptr[items[0] + 1] - plan.row_indptr[items[0]])
        entries = (plan.row_indptr[items, None] + np.arange(self.width)).reshape(-1)
        self.rows = plan.rows[entries].astype(np.int64)
        self.row_index = torch.from_numpy(self.rows).to(pool.device)
        self.angles = geometry.angles(plan.shifts[entries])
        self.is_identity = np.array_equal(self.rows, np.arange(plan.num_rows))
        # Rows of the pool seen as [blocks * layers * 2, kv_heads * chunk_size * head_dim].
        blocks = torch.from_numpy(plan.block[items].astype(np.int64)).to(pool.device)
        self.key_index = blocks * (pool.shape[1] * 2)
        self.chunk_size = plan.chunk_size
        # Kept between layers and steps: fresh pages for a copy this large cost more than the copy.
        shape = (len(items), self.spec.kv_heads * self.chunk_size * self.spec.head_dim)
        self.keys, self.values = pool.new_empty(shape), pool.new_empty(shape)
        self.hidden: Tensor | None = None
        self.unused_rows: Tensor | None = None

    def refresh(self, count: Int32Array) -> None:
        """Recompute which slots are unused, after tails have grown."""
        offset = np.arange(self.chunk_size)
        first = self.first[:, None]
        unused = (offset < first) | (offset >= first + count[self.items][:, None])
        item, token = unused.nonzero()
        if not len(item):
            self.hidden = self.unused_rows = None
            return
        heads, device = self.spec.kv_heads, self.row_index.device
        self.hidden = torch.from_numpy(unused).to(device)[:, None, None]
        # Rows of the gathered values [items * kv_heads * chunk_size, head_dim].
        rows = (item[:, None] * heads + np.arange(heads)) * self.chunk_size + token[:, None]
        self.unused_rows = torch.from_numpy(rows.reshape(-1)).to(device)

    def attend(self, q: Tensor, kv_pool: Tensor, layer: int) -> SoftmaxState:
        spec, items, width = self.spec, len(self.items), self.width
        coarse, index = kv_pool.view(-1, self.keys.shape[1]), self.key_index + layer * 2
        torch.index_select(coarse, 0, index, out=self.keys)
        torch.index_select(coarse, 0, index + 1, out=self.values)
        if self.unused_rows is not None:
            self.values.view(-1, spec.head_dim).index_fill_(0, self.unused_rows, 0.0)
        shape = (items, spec.kv_heads, self.chunk_size, spec.head_dim)
        k, v = self.keys.view(shape).to(q.dtype), self.values.view(shape).to(q.dtype)
        picked = _turn(q if self.is_identity else q.index_select(0, self.row_index), self.angles)
        grouped = picked.view(items, width, spec.kv_heads, spec.group, spec.head_dim)
        if width > 1:
            grouped = grouped.transpose(1, 2)
        grouped = grouped.reshape(items, spec.kv_heads, width * spec.group, spec.head_dim)
        state = attend(grouped, k, v, self.hidden)
        if width == 1:
            return SoftmaxState(*(x.flatten(1, 2) for x in state))
        return SoftmaxState(
            *(
                x.view(items, spec.kv_heads, width, spec.group, *x.shape[3:])
                .transpose(1, 2)
                .reshape(items * width, spec.heads, *x.shape[3:])
                for x in state
            )
        )


def _turn(q: Tensor, angles: Angles | None) -> Tensor:
    """Rotate queries `[entries, heads, head_dim]` by their angles: the shift of design.md, idea 5."""
    if angles is None:
        return q
    width = angles.cos.shape[-1]
    turned = q[..., :width] * angles.cos + swap_halves(q[..., :width]) * angles.sin
    return turned if width == q.shape[-1] else torch.cat((turned, q[..., width:]), dim=-1)


def _split(plan: DecodePlan) -> tuple[list[NDArray[np.int64]], NDArray[np.int64]]:
    """Shared items that form runs worth a matmul of their own, and all other items."""
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
    """`[rows, most partials of a row]`: each row's partials; None if partial i is all of row i.

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
