"""Random batches over paged KV, and dense attention in float64 that knows nothing of plans."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trunkline.kernels.ops import AttentionSpec, make_angles, swap_halves
from trunkline.kernels.plan import Segments

SEGMENT_FIELDS = ("table_index", "block", "first", "count", "base", "shift")


@dataclass
class Row:
    """One query's context: ranges of blocks in order, and its position."""

    segments: list[tuple[int, int, int, int, int, int]] = field(default_factory=list)
    """`SEGMENT_FIELDS` each."""
    position: int = 0


@dataclass
class Forest:
    """A batch whose rows share prefixes."""

    rows: list[Row]
    runs: NDArray[np.int32]
    blocks: int

    def segments(self) -> Segments:
        row = [index for index, r in enumerate(self.rows) for _ in r.segments]
        table = np.array([s for r in self.rows for s in r.segments], dtype=np.int32)
        columns = {name: table[:, i].copy() for i, name in enumerate(SEGMENT_FIELDS)}
        return Segments(row=np.array(row, dtype=np.int32), **columns)

    @property
    def positions(self) -> NDArray[np.int32]:
        return np.array([row.position for row in self.rows], dtype=np.int32)


def random_forest(
    rng: np.random.Generator, rows: int, chunk_size: int, *, shifts: bool = False, holes: bool = False
) -> Forest:
    """Two-level trees: groups of rows share a prefix, pairs within a group share more, tails are private."""
    forest = Forest([Row() for _ in range(rows)], np.zeros((0, 4), dtype=np.int32), 0)
    runs: list[tuple[int, int, int, int]] = []
    start = 0
    while start < rows:
        stop = min(rows, start + int(rng.integers(1, 7)))
        depth = int(rng.integers(0, 9))
        _share(forest, rng, (start, stop), (0, depth), chunk_size, holes)
        runs += [(start, stop, 0, depth)] if depth and stop - start > 1 else []
        for pair in range(start, stop - 1, 2):
            more = int(rng.integers(0, 3))
            _share(forest, rng, (pair, pair + 2), (depth, depth + more), chunk_size, holes)
            runs += [(pair, pair + 2, depth, depth + more)] if more else []
        start = stop
    for row in forest.rows:
        private = int(rng.integers(0, 3))
        table = row.segments[-1][0] + 1 if row.segments else 0
        for index in range(table, table + private + 1):
            is_tail = index == table + private
            count = int(rng.integers(1, chunk_size + 1)) if is_tail else chunk_size
            row.segments.append((index, forest.blocks, 0, count, index * chunk_size, 0))
            forest.blocks += 1
        row.position = row.segments[-1][4] + row.segments[-1][3] - 1
        if shifts and rng.random() < 0.7:
            cut, shift = int(rng.integers(0, len(row.segments))), int(rng.integers(-40, 40))
            moved = [(*s[:5], shift) if i < cut else s for i, s in enumerate(row.segments)]
            row.segments = moved
    forest.runs = np.array(runs, dtype=np.int32).reshape(-1, 4)
    return forest


def _share(
    forest: Forest,
    rng: np.random.Generator,
    rows: tuple[int, int],
    table: tuple[int, int],
    chunk_size: int,
    holes: bool,
) -> None:
    """Give the rows the same blocks at these table entries; with holes, use only a part of some blocks."""
    for index in range(*table):
        first, count = 0, chunk_size
        if holes and chunk_size > 1 and rng.random() < 0.4:
            first = int(rng.integers(0, chunk_size))
            count = int(rng.integers(1, chunk_size - first + 1))
        for row in forest.rows[slice(*rows)]:
            row.segments.append((index, forest.blocks, first, count, index * chunk_size + first, 0))
        forest.blocks += 1


def poisoned_pool(
    forest: Forest, spec: AttentionSpec, layers: int, chunk_size: int, *, spare: int = 0, seed: int = 0
) -> Tensor:
    """float64 pool in which every slot that no row covers is NaN; `spare` tokens follow each tail."""
    generator = torch.Generator().manual_seed(seed)
    shape = (forest.blocks, layers, 2, spec.kv_heads, chunk_size, spec.head_dim)
    pool = torch.full(shape, float("nan"), dtype=torch.float64)
    for row in forest.rows:
        for position, (_, block, first, count, _, _) in enumerate(row.segments):
            extra = spare if position == len(row.segments) - 1 else 0
            stop = min(chunk_size, first + count + extra)
            part = pool[block, ..., first:stop, :]
            filled = torch.randn(part.shape, generator=generator, dtype=torch.float64)
            pool[block, ..., first:stop, :] = torch.where(part.isnan(), filled, part)
    return pool


def rotate(x: Tensor, positions: Tensor, spec: AttentionSpec) -> Tensor:
    """`x` `[tokens, heads, head_dim]` rotated by positions, float64."""
    assert spec.inverse_frequencies is not None
    angles = make_angles(positions, spec.inverse_frequencies)
    return x * angles.cos + swap_halves(x) * angles.sin


def dense_attention(row: Row, q: Tensor, pool: Tensor, layer: int, spec: AttentionSpec) -> Tensor:
    """float64 `[heads, head_dim]`: every key turned to where it acts, one plain softmax."""
    keys, values, shift = [], [], []
    for _, block, first, count, _, moved in row.segments:
        keys.append(pool[block, layer, 0, :, first : first + count].transpose(0, 1))
        values.append(pool[block, layer, 1, :, first : first + count].transpose(0, 1))
        shift += [moved] * count
    k, v = torch.cat(keys), torch.cat(values)
    if any(shift):
        k = rotate(k, torch.tensor(shift), spec)
    k, v = k.repeat_interleave(spec.group, dim=1), v.repeat_interleave(spec.group, dim=1)
    scores = torch.einsum("hd,thd->ht", q, k) * spec.scale
    return torch.einsum("ht,thd->hd", scores.softmax(dim=-1), v)
