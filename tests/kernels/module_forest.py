"""Random prompts with modules (Prompt Cache §3.4): texts of a schema at scattered places of each row's context.

A row selects modules in any order, some in part, and with shifts at places of its own, even one of them twice. Its
own tokens stand in the gaps between them and behind, packed one behind the other in blocks of its own.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final

import numpy as np
from kernels.attention_cases import Case, make_case
from kernels.forests import Forest, Range, Row
from kernels.implementations import DTYPES
from kernels.oracle import HEAD_DIMS, HEADS, alibi_slopes, has_positions, make_spec

from trunkline.kernels.ops import AttentionSpec

CHUNKS: Final = (1, 3, 8, 16, 32, 64, 100)
KINDS: Final = ("rotary", "alibi", "learned")
"""What the positions of a model are."""


@dataclass(frozen=True)
class Prompts:
    """What a random batch may contain."""

    rows: int
    chunk_size: int
    modules: int = 6
    module_tokens_max: int = 50
    gap_max: int = 9
    """Positions between modules, which own tokens or nothing may take."""
    shifts: bool = False


@dataclass(frozen=True)
class _Module:
    ranges: list[Range]
    """Block by block, at the positions of its computation; a hole where a placeholder stood."""
    tokens: int

    @property
    def base(self) -> int:
        return self.ranges[0].base - self.ranges[0].first


class _Schema:
    """Modules one behind the other, each from a new block on."""

    def __init__(self, rng: np.random.Generator, shape: Prompts) -> None:
        self.modules: list[_Module] = []
        self.blocks, position, size = 0, 0, shape.chunk_size
        for _ in range(shape.modules):
            position += int(rng.integers(0, shape.gap_max + 1))
            tokens = int(rng.integers(1, shape.module_tokens_max + 1))
            ranges = []
            for start in range(0, tokens, size):
                count = min(size, tokens - start)
                ranges.append(Range(0, self.blocks + start // size, 0, count, position + start, 0))
            self.modules.append(_Module(_with_hole(rng, ranges), tokens))
            self.blocks += -(-tokens // size)
            position += tokens


def _with_hole(rng: np.random.Generator, ranges: list[Range]) -> list[Range]:
    """At times some tokens inside one block are left out: the block is then read in two ranges."""
    number = int(rng.integers(len(ranges)))
    chosen = ranges[number]
    if chosen.tokens < 3 or rng.random() < 0.5:
        return ranges
    start, stop = sorted((1 + rng.choice(chosen.tokens - 1, size=2, replace=False)).tolist())
    head = chosen._replace(tokens=start)
    rest = chosen._replace(first=chosen.first + stop, tokens=chosen.tokens - stop, base=chosen.base + stop)
    return [*ranges[:number], head, rest, *ranges[number + 1 :]]


class _Prompt:
    """One row in the making."""

    def __init__(self, rng: np.random.Generator, shape: Prompts, schema: _Schema) -> None:
        self._rng = rng
        self._shape = shape
        self.placed = self._place(schema.modules)
        self.runs = self._own_runs()

    def _place(self, modules: list[_Module]) -> list[tuple[int, _Module]]:
        """(position of its first token, module), by position."""
        rng = self._rng
        chosen = np.flatnonzero(rng.random(len(modules)) < 0.6).tolist()
        if not self._shape.shifts:
            return [(modules[index].base, modules[index]) for index in chosen]
        if chosen and rng.random() < 0.3:
            chosen.append(chosen[0])
        placed, position = [], 0
        for index in rng.permutation(chosen).tolist():
            position += int(rng.integers(0, self._shape.gap_max + 1))
            # Many rows leave a module where it was computed: only those of one shift are read together in a run.
            position = max(position, modules[index].base if rng.random() < 0.5 else 0)
            placed.append((position, modules[index]))
            position += modules[index].tokens
        return placed

    def _own_runs(self) -> list[tuple[int, int]]:
        """(position, count) of own tokens: in gaps, and always behind everything."""
        rng, runs, end = self._rng, [], 0
        for position, module in self.placed:
            if position > end and rng.random() < 0.7:
                start = int(rng.integers(end, position))
                runs.append((start, int(rng.integers(1, position - start + 1))))
            end = position + module.tokens
        start = end + int(rng.integers(0, self._shape.gap_max + 1))
        return [*runs, (start, int(rng.integers(1, 2 * self._shape.gap_max)))]

    def row(self, first_block: int) -> tuple[Row, int]:
        """The row, its own tokens in blocks from `first_block` on, and the number of its modules' blocks."""
        ranges: list[Range] = []
        table: list[int] = []
        for index in self._rng.permutation(len(self.placed)).tolist():
            position, module = self.placed[index]
            for part in module.ranges:
                if not table or table[-1] != part.block:
                    table.append(part.block)
                ranges.append(part._replace(table_index=len(table) - 1, shift=position - module.base))
        own: list[int] = []
        size, used = self._shape.chunk_size, 0
        for position, count in self.runs:
            done = 0
            while done < count:
                first = used % size
                tokens = min(count - done, size - first)
                block = used // size
                at = Range(len(table) + block, first_block + block, first, tokens, position + done, 0)
                ranges.append(at)
                done, used = done + tokens, used + tokens
            own += range(position, position + count)
        return Row(ranges, own[-1], own), len(table)


def module_forest(rng: np.random.Generator, shape: Prompts) -> Forest:
    """A batch of prompts; the runs say of each row alone that its modules' blocks may be shared."""
    schema = _Schema(rng, shape)
    forest = Forest(shape.chunk_size, [], np.zeros((0, 4), dtype=np.int32), schema.blocks)
    runs = []
    for index in range(shape.rows):
        row, entries = _Prompt(rng, shape, schema).row(forest.blocks)
        forest.rows.append(row)
        forest.blocks += -(-len(row.own) // shape.chunk_size)
        if entries:
            runs.append((index, index + 1, 0, entries))
    forest.runs = np.array(runs, dtype=np.int32).reshape(-1, 4)
    return forest


def spec_of(seed: int, kind: str) -> AttentionSpec:
    """Learned positions are in the hidden states already: attention knows only where each token acts."""
    heads, kv_heads = HEADS[seed % len(HEADS)]
    return make_spec(
        heads,
        kv_heads,
        HEAD_DIMS[seed * 3 % len(HEAD_DIMS)],
        rotary_dim=None if kind == "rotary" else 0,
        alibi_slopes=alibi_slopes(heads) if kind == "alibi" else None,
        window=(0, 0, 7, 40)[seed % 4],
        soft_cap=(0.0, 0.0, 5.0)[seed % 3],
    )


def forest_of(seed: int, spec: AttentionSpec, rows: int) -> Forest:
    rng = np.random.default_rng(seed)
    shifts = has_positions(spec) and seed % 2 == 1
    return module_forest(rng, Prompts(rows, CHUNKS[seed % len(CHUNKS)], shifts=shifts))


@functools.lru_cache(maxsize=8)
def module_case(seed: int, kind: str, is_prefill: bool) -> Case:
    spec = spec_of(seed, kind)
    forest = forest_of(seed, spec, 1 + seed % 4 if is_prefill else 2 + seed % 7)
    rng = np.random.default_rng(seed)
    own = [len(row.own) if seed % 3 else int(rng.integers(1, len(row.own) + 1)) for row in forest.rows]
    return make_case(forest, spec, DTYPES[seed % len(DTYPES)], seed, own if is_prefill else None)
