"""Parts of `gpu_host`: how evenly the units of a decode plan are spread over the thread blocks of a GPU.

Costs are those of the planner (query vectors: tokens read, weighed by arithmetic), not times: nothing runs here.
`of_mean` is what the busiest thread block has, over the mean of all. `turns`: unit u is done by thread block u
modulo their number, as before plans were dealt; `longest_first`: as the plan deals them; `launches_apart`: the
same for wide and narrow pieces by themselves, added up, as if two kernels followed each other.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise
from statistics import mean

import numpy as np
from report import Report

from trunkline.kernels.cuda_decode import PIECES_PER_WORKER, unit_times
from trunkline.kernels.plan import Segments, WorkOptions, build_decode_plan, plan_decode_work
from trunkline.kvstore.chunks import Int32Array

GPU = WorkOptions(
    kv_heads=8,
    group=4,
    kv_token_bytes=512,
    partial_bytes=1040,
    tile_rows=64,
    workers=264,
    pieces_per_worker=PIECES_PER_WORKER,
    dealt=True,
    narrow_vectors=16,
    **unit_times(64, 128),
)
"""As the CUDA kernels cut work on an H100 or H200 (264 thread blocks) for a model of 32 heads of size 128 and 8 KV
heads, in 16 bits."""
CHUNK = 64
SHORTEST, LONGEST = 256, 16_384
"""Tokens of a row, drawn evenly on a logarithmic scale."""
PIECES, PIECE_ITEMS, PIECE_ENTRIES, ITEM_COUNT, WORKERS, UNIT_BOUNDS, UNITS = 2, 9, 10, 13, 25, 26, 27
"""Words of the header (csrc/common/work_plan.h, WorkHeader)."""


def mixed_plan(rng: np.random.Generator, rows: int, shared: int, options: WorkOptions) -> Int32Array:
    """Return the words of a plan of rows of mixed lengths that share some tokens."""
    own = np.exp(rng.uniform(np.log(SHORTEST), np.log(LONGEST), rows)).astype(np.int32)
    tokens, prefix = own + np.int32(shared), shared // CHUNK
    table, used = [], prefix
    for row, length in enumerate(tokens.tolist()):
        for index in range(-(-length // CHUNK)):
            block = index if index < prefix else (used := used + 1) - 1
            table.append((row, index, block, 0, min(CHUNK, length - index * CHUNK), index * CHUNK, 0))
    columns = np.array(table, dtype=np.int32).T.copy()
    runs = np.array([[0, rows, 0, prefix]] if prefix and rows > 1 else [], dtype=np.int32).reshape(-1, 4)
    plan = build_decode_plan(Segments(*columns), tokens - 1, runs, CHUNK)
    words: Int32Array = plan_decode_work(plan, options).numpy()
    return words


def costs_of(words: Int32Array, options: WorkOptions) -> tuple[list[int], list[bool]]:
    """Return the cost of a unit of each piece, and whether it is narrow."""
    pieces = int(words[PIECES])
    items = words[words[PIECE_ITEMS] :][: 2 * pieces].reshape(-1, 2)
    entries = words[words[PIECE_ENTRIES] :][: pieces + 1]
    counts = words[words[ITEM_COUNT] :]
    vectors = np.diff(entries) * options.group
    tokens = np.array([counts[start:stop].sum() for start, stop in items], dtype=np.int64)
    narrow = vectors <= options.narrow_vectors
    unit = np.where(narrow, options.narrow_unit_ns, options.wide_unit_ns)
    tile = np.where(narrow, options.narrow_tile_ns, options.wide_tile_ns)
    costs = unit - (-tokens // options.tile_tokens) * tile
    return costs.tolist(), narrow.tolist()


def most_dealt(words: Int32Array, costs: Sequence[int], options: WorkOptions) -> int:
    """Return what the busiest worker has by the lists of the plan."""
    bounds = words[words[UNIT_BOUNDS] :][: 2 * int(words[WORKERS]) + 1 : 2]
    units = words[words[UNITS] :][: bounds[-1]] // options.kv_heads
    of_unit = np.array(costs)[units]
    return int(max(of_unit[start:stop].sum() for start, stop in pairwise(bounds)))


def most_in_turns(costs: Sequence[int], options: WorkOptions) -> int:
    units = np.repeat(costs, options.kv_heads)
    return int(np.bincount(np.arange(len(units)) % options.workers, weights=units).max())


def most_longest_first(costs: Sequence[int], options: WorkOptions) -> int:
    loads = [0] * options.workers
    for cost in sorted(costs, reverse=True):
        for _ in range(options.kv_heads):
            heapq.heapreplace(loads, loads[0] + cost)
    return max(loads)


def measure_deal(report: Report, options: WorkOptions, batches: int) -> None:
    """Several random batches of each size."""
    for rows in (8, 32, 256):
        for shared in (0, 2048):
            rng = np.random.default_rng(rows + shared)
            found: dict[str, list[float]] = {"turns": [], "longest_first": [], "launches_apart": []}
            for _ in range(batches):
                words = mixed_plan(rng, rows, shared, options)
                costs, narrow = costs_of(words, options)
                average = sum(costs) * options.kv_heads / options.workers
                kinds = (
                    [cost for cost, is_narrow in zip(costs, narrow, strict=True) if is_narrow is kind]
                    for kind in (False, True)
                )
                apart = sum(most_longest_first(kind, options) for kind in kinds)
                found["turns"].append(most_in_turns(costs, options) / average)
                found["longest_first"].append(most_dealt(words, costs, options) / average)
                found["launches_apart"].append(apart / average)
            for way, ratios in found.items():
                case = {"part": "deal", "rows": rows, "shared": shared, "way": way}
                report.add(case, "of_mean", mean(ratios), "ratio", batches)
