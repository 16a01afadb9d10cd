"""Random batches over paged KV: trees, modules shared by arbitrary rows, shifts, holes; and pools that hold them.

Contexts are well-formed: every key acts at or before its row's query, and a row's tail, which grows, is its own.
What no row covers is NaN, so that whoever reads it shows it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trunkline.kernels.ops import AttentionSpec, Kernels, KvPool
from trunkline.kernels.plan import DecodePlan, PrefillPlan, Segments, WritePlan, build_decode_plan
from trunkline.kernels.quantised_kv import to_rows
from trunkline.kvstore.chunk_format import kv_format, latent_format
from trunkline.kvstore.chunks import Int32Array

LAYERS: Final = 2
"""Of every pool here; tests use layer 1 unless they say otherwise, so that a wrong offset shows."""


class Range(NamedTuple):
    """A token range of a block in a row's context, in the order of `Segments`' fields."""

    table_index: int
    block: int
    first: int
    tokens: int
    base: int
    shift: int


@dataclass
class Row:
    """One sequence's context in order; its query is at `position`."""

    ranges: list[Range] = field(default_factory=list)
    position: int = 0
    own: list[int] = field(default_factory=list)
    """Ascending positions of its own tokens, which end with `position`; empty: they are consecutive."""

    @property
    def tokens(self) -> int:
        return sum(r.tokens for r in self.ranges)

    def grow(self) -> int:
        """One more token in the tail, at the next position; returns its offset in the block."""
        tail = self.ranges[-1]
        self.ranges[-1] = tail._replace(tokens=tail.tokens + 1)
        self.position += 1
        return tail.first + tail.tokens

    def query_positions(self, count: int) -> NDArray[np.int64]:
        """Positions of its last own tokens."""
        consecutive = range(self.position - count + 1, self.position + 1)
        return np.array(self.own[-count:] if self.own else consecutive, dtype=np.int64)

    def key_positions(self) -> NDArray[np.int64]:
        """Where each key acts."""
        return np.concatenate(
            [np.zeros(0, np.int64), *(np.arange(r.tokens) + (r.base + r.shift) for r in self.ranges)]
        )


@dataclass
class Forest:
    """A batch whose rows share parts of their contexts."""

    chunk_size: int
    rows: list[Row]
    runs: NDArray[np.int32]
    blocks: int = 0

    def segments(self) -> Segments:
        row = np.array([index for index, r in enumerate(self.rows) for _ in r.ranges], dtype=np.int32)
        table = _table(self.rows)
        return Segments(row, *(table[:, column].copy() for column in range(len(Range._fields))))

    @property
    def positions(self) -> NDArray[np.int32]:
        return np.array([row.position for row in self.rows], dtype=np.int32)

    def decode_plan(self) -> DecodePlan:
        return build_decode_plan(self.segments(), self.positions, self.runs, self.chunk_size)

    def prefill_plan(self, counts: list[int]) -> PrefillPlan:
        """The last `counts[i]` own tokens of row i are its queries."""
        table = _table(self.rows)
        positions = [row.query_positions(count) for row, count in zip(self.rows, counts, strict=True)]
        return PrefillPlan(
            chunk_size=self.chunk_size,
            query_indptr=np.cumsum([0, *counts], dtype=np.int32),
            query_position=np.concatenate(positions).astype(np.int32),
            item_indptr=np.cumsum([0, *(len(row.ranges) for row in self.rows)], dtype=np.int32),
            block=table[:, 1].copy(),
            first=table[:, 2].copy(),
            count=table[:, 3].copy(),
            base=table[:, 4].copy(),
            shift=table[:, 5].copy(),
        )

    def covered(self, spare: int = 0) -> NDArray[np.bool_]:
        """`[blocks, chunk_size]`: what some row reads, and `spare` tokens after each tail."""
        used = np.zeros((self.blocks, self.chunk_size), dtype=bool)
        for row in self.rows:
            for r in row.ranges:
                used[r.block, r.first : r.first + r.tokens] = True
            tail = row.ranges[-1]
            used[tail.block, tail.first + tail.tokens :][:spare] = True
        return used

    def distinct_tokens(self) -> int:
        """What a layer reads if all that is shared is read once."""
        shared = {r[1:4] for row in self.rows for r in row.ranges[:-1]}
        return sum(count for _, _, count in shared) + sum(row.ranges[-1].tokens for row in self.rows)


def _table(rows: list[Row]) -> Int32Array:
    return np.array([r for row in rows for r in row.ranges], dtype=np.int32).reshape(-1, len(Range._fields))


@dataclass(frozen=True)
class Shape:
    """What a random forest may contain."""

    rows: int
    chunk_size: int
    depth_max: int = 8
    """Chunks of the outer shared prefix."""
    private_max: int = 2
    """Whole chunks of a row's own, before its tail."""
    shifts: bool = False
    holes: bool = False
    modules: int = 0
    """Parts that arbitrary rows share, wherever they are in each."""


class _Builder:
    def __init__(self, rng: np.random.Generator, shape: Shape) -> None:
        self.rng = rng
        self.shape = shape
        self.forest = Forest(shape.chunk_size, [Row() for _ in range(shape.rows)], np.zeros((0, 4), np.int32))
        self.ends = [0] * shape.rows
        """First position behind what each row has."""

    def append(self, rows: list[int], base: int, shifts: list[int], chunks: int) -> None:
        """Give the rows the same new blocks; with holes, some are used in part."""
        rng, size = self.rng, self.shape.chunk_size
        for chunk in range(chunks):
            first, count = 0, size
            if self.shape.holes and size > 1 and rng.random() < 0.4:
                first = int(rng.integers(0, size))
                count = int(rng.integers(1, size - first + 1))
            start = base + chunk * size + first
            for row, shift in zip(rows, shifts, strict=True):
                ranges = self.forest.rows[row].ranges
                ranges.append(Range(len(ranges), self.forest.blocks, first, count, start, shift))
                self.ends[row] = start + shift + count
            self.forest.blocks += 1

    def trees(self) -> list[tuple[int, int, int, int]]:
        """Groups of rows share a prefix, pairs within a group share more; returns the runs."""
        rng, runs, start = self.rng, [], 0
        while start < self.shape.rows:
            stop = min(self.shape.rows, start + int(rng.integers(1, 7)))
            depth = int(rng.integers(0, self.shape.depth_max + 1))
            self.append([*range(start, stop)], 0, [0] * (stop - start), depth)
            runs += [(start, stop, 0, depth)] if depth and stop - start > 1 else []
            for pair in range(start, stop - 1, 2):
                more = int(rng.integers(0, 3))
                self.append([pair, pair + 1], max(self.ends[pair], self.ends[pair + 1]), [0, 0], more)
                runs += [(pair, pair + 2, depth, depth + more)] if more else []
            start = stop
        return runs

    def modules(self) -> None:
        rng, total = self.rng, self.shape.rows
        for _ in range(self.shape.modules):
            size = int(rng.integers(1, total + 1))
            rows = sorted(rng.choice(total, size=size, replace=False).tolist())
            if self.shape.shifts:
                base = int(rng.integers(0, 200))
                shifts = [self.ends[row] - base for row in rows]
            else:
                base, shifts = max(self.ends[row] for row in rows), [0] * size
            self.append(rows, base, shifts, int(rng.integers(1, 4)))

    def move(self, index: int) -> None:
        """Let the first ranges of a row act elsewhere, as after a truncation or an insertion."""
        row = self.forest.rows[index]
        cut, shift = int(self.rng.integers(0, len(row.ranges) + 1)), int(self.rng.integers(-40, 40))
        row.ranges[:cut] = [r._replace(shift=r.shift + shift) for r in row.ranges[:cut]]
        self.ends[index] += max(0, shift)

    def finish(self, index: int) -> None:
        """A row's private chunks and its tail."""
        rng, size = self.rng, self.shape.chunk_size
        self.append([index], self.ends[index], [0], int(rng.integers(0, self.shape.private_max + 1)))
        row, end = self.forest.rows[index], self.ends[index]
        first = int(rng.integers(0, size)) if self.shape.holes and rng.random() < 0.2 else 0
        count = int(rng.integers(1, size - first + 1))
        row.ranges.append(Range(len(row.ranges), self.forest.blocks, first, count, end, 0))
        row.position = end + count - 1
        self.forest.blocks += 1


def random_forest(rng: np.random.Generator, shape: Shape) -> Forest:
    builder = _Builder(rng, shape)
    runs = builder.trees()
    builder.modules()
    for index in range(shape.rows):
        if shape.shifts and rng.random() < 0.6:
            builder.move(index)
        builder.finish(index)
    forest = builder.forest
    if shape.modules or rng.random() < 0.2:
        # Modules lie at other places of each row's table: the hint is that anything may be shared.
        runs = [(0, shape.rows, 0, max(len(row.ranges) for row in forest.rows))]
    forest.runs = np.array(runs, dtype=np.int32).reshape(-1, 4)
    return forest


def beam_forest(rng: np.random.Generator, beams: int, blocks: int, others: int, chunk_size: int) -> Forest:
    """Beams of one search after `blocks` full blocks, in any places among other rows.

    At each block every beam goes on from any of them, so that any subset of rows may share any block. The run is
    what a controller can say of a search: all its rows, all its blocks, and whoever stands between them.
    """
    tables: list[list[int]] = [[] for _ in range(beams)]
    used = 0
    for _ in range(blocks):
        parents = rng.integers(0, beams, size=beams)
        # Beams with the same parent share the block unless they diverge in it.
        owner = [parent if rng.random() < 0.7 else beams + beam for beam, parent in enumerate(parents.tolist())]
        number = {value: used + place for place, value in enumerate(dict.fromkeys(owner))}
        tables = [[*tables[parent], number[value]] for parent, value in zip(parents.tolist(), owner, strict=True)]
        used += len(number)
    for _ in range(others):
        count = int(rng.integers(0, 5))
        tables.append([*range(used, used + count)])
        used += count
    places = rng.permutation(len(tables)).tolist()
    forest = Forest(chunk_size, [], np.zeros((0, 4), np.int32))
    for index, place in enumerate(places):
        ranges = [Range(i, block, 0, chunk_size, i * chunk_size, 0) for i, block in enumerate(tables[place])]
        tokens = int(rng.integers(1, chunk_size + 1))
        end = len(ranges) * chunk_size
        ranges.append(Range(len(ranges), used + index, 0, tokens, end, 0))
        forest.rows.append(Row(ranges, end + tokens - 1))
    forest.blocks = used + len(places)
    members = [index for index, place in enumerate(places) if place < beams]
    if blocks:
        forest.runs = np.array([[min(members), max(members) + 1, 0, blocks]], dtype=np.int32)
    return forest


def one_row(chunk_size: int, tokens: int, first_block: int = 0) -> Row:
    """An ordinary context of so many tokens in consecutive blocks."""
    starts = range(0, max(tokens, 1), chunk_size)
    counts = [min(chunk_size, tokens - start) for start in starts]
    ranges = [Range(i, first_block + i, 0, n, i * chunk_size, 0) for i, n in enumerate(counts)]
    return Row(ranges, tokens - 1)


def separate_rows(chunk_size: int, lengths: Iterable[int]) -> Forest:
    """Rows of so many tokens that share nothing."""
    forest = Forest(chunk_size, [], no_runs(), 0)
    for tokens in lengths:
        forest.rows.append(one_row(chunk_size, tokens, forest.blocks))
        forest.blocks += len(forest.rows[-1].ranges)
    return forest


def behind_prefix(chunk_size: int, shared: int, tails: Iterable[int]) -> Forest:
    """Rows with one shared prefix of whole blocks, and a tail each of so many tokens."""
    forest = Forest(chunk_size, [], no_runs(), shared)
    for tokens in tails:
        row = one_row(chunk_size, shared * chunk_size)
        row.ranges.append(Range(shared, forest.blocks, 0, tokens, shared * chunk_size, 0))
        row.position += tokens
        forest.rows.append(row)
        forest.blocks += 1
    forest.runs = np.array([[0, len(forest.rows), 0, shared]], dtype=np.int32)
    return forest


def no_runs() -> Int32Array:
    """The hint that no rows share anything."""
    return np.zeros((0, 4), dtype=np.int32)


def pool_data(forest: Forest, spec: AttentionSpec, dtype: torch.dtype, seed: int, *, spare: int = 0) -> Tensor:
    """Contents in plain order, NaN where nothing is covered."""
    generator = torch.Generator().manual_seed(seed)
    shape = (forest.blocks, LAYERS, spec.bands, spec.kv_heads, forest.chunk_size, spec.head_dim)
    data = torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)
    used = torch.from_numpy(forest.covered(spare))[:, None, None, None, :, None]
    return data.masked_fill_(~used, float("nan"))


Filling = Literal["wrapped", "scattered", "written"]
FILLINGS: Final[tuple[Filling, ...]] = ("wrapped", "scattered", "written")
"""How a pool got its contents: kernels may hold what they wrote themselves in an order of their own."""


def wrap(data: Tensor, kv_dtype: str = "auto", latent: int = 0) -> KvPool:
    """A pool in plain order around a copy of keys and values, or of latents of so many numbers and their
    rotary parts, rounded to `kv_dtype`."""
    _, layers, bands, heads, chunk_size, head_dim = data.shape
    dtype = str(data.dtype).removeprefix("torch.")
    form = kv_format((layers, heads, chunk_size, head_dim), dtype, kv_dtype)
    if bands == 1:
        form = latent_format((layers, chunk_size, head_dim - latent, latent), dtype, kv_dtype)
    return KvPool.wrap(to_rows(data, kv_dtype, latent) if form.is_quantised else data.clone(), form)


def fill_pool(
    kernels: Kernels,
    data: Tensor,
    spec: AttentionSpec,
    rng: np.random.Generator,
    filling: Filling,
    kv_dtype: str = "auto",
) -> KvPool:
    """A pool with such contents; `data` stays as it is."""
    plain = wrap(data, kv_dtype, spec.latent_dim)
    if filling == "wrapped":
        return plain
    pool = wrap(torch.full_like(data, float("nan")), kv_dtype, spec.latent_dim)
    if filling == "scattered":
        blocks = rng.permutation(data.shape[0]).astype(np.int32)
        kernels.scatter_blocks(pool, blocks, range(LAYERS), plain.data[torch.from_numpy(blocks).long()])
        return pool
    chunk_size = data.shape[4]
    slots = np.flatnonzero(~data[:, 0, 0, 0, :, 0].isnan().numpy().reshape(-1))
    if rng.random() < 0.25:
        slots = rng.permutation(slots)
    for part in np.array_split(slots, min(len(slots), int(rng.integers(1, 4)))):
        write_slots(kernels, pool, part, data[part // chunk_size, :, :, :, part % chunk_size], spec)
    return pool


def write_slots(kernels: Kernels, pool: KvPool, slots: NDArray[np.int64], kv: Tensor, spec: AttentionSpec) -> None:
    """Store tokens' keys and values `[tokens, layers, bands, kv_heads, head_dim]` as they are, in all layers."""
    plan = WritePlan(pool.chunk_size, slots.astype(np.int32))
    for layer in range(kv.shape[1]):
        queries = torch.full((len(slots), spec.heads * spec.head_dim), float("nan"), dtype=kv.dtype)
        qkv = torch.cat((queries, kv[:, layer].reshape(len(slots), -1)), dim=1)
        kernels.write_kv(plan, qkv, None, pool, layer, spec)


def contents(kernels: Kernels, pool: KvPool) -> Tensor:
    """The whole pool in plain order."""
    out = torch.empty_like(pool.data)
    blocks = np.arange(pool.blocks, dtype=np.int32)
    kernels.gather_blocks(pool, blocks, range(pool.data.shape[1]), out)
    return out


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal with NaN equal to NaN."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())
