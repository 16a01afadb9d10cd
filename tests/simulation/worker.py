"""A worker group without a model: it obeys step plans and checks that every token sees its own past.

Instead of keys and values a slot of the simulated pool holds the hash of all tokens up to its position, and
the hash before it. A step walks each sequence's whole context through its block table and must find an
unbroken chain of hashes: any wrong sharing, copy, eviction or reuse of a block shows at once. The next token
is a function of the prefix hash and the seed, so a stream's text does not depend on what else ran, was
preempted or was cached.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from trunkline.controller.messages import StepResult
from trunkline.kvstore.layout import pack_int32, unpack_int32
from trunkline.worker.messages import Join, StepPlan

VOCABULARY = 50


def extend_hash(previous: bytes, token: int) -> bytes:
    return blake2b(previous + token.to_bytes(4, "little"), digest_size=8).digest()


def next_token(prefix_hash: bytes, seed: int) -> int:
    """What the simulated model says after this prefix."""
    return int.from_bytes(prefix_hash, "little") % (VOCABULARY + seed % 7)


def expected_output(prompt: list[int], seed: int, max_tokens: int, stop_ids: tuple[int, ...] = ()) -> list[int]:
    """The stream that a request must produce, whatever the schedule."""
    current = b""
    for token in prompt:
        current = extend_hash(current, token)
    output: list[int] = []
    while len(output) < max_tokens:
        token = next_token(current, seed)
        output.append(token)
        if token in stop_ids:
            break
        current = extend_hash(current, token)
    return output


@dataclass
class _Resident:
    seed: int
    first: int
    tokens: list[int]
    """From position `first` on."""
    table: list[int]
    hashes: list[bytes] = field(default_factory=list)


class SimulatedWorkers:
    """Executes plans in order; counts what real workers would have computed and copied."""

    def __init__(self, num_blocks: int, chunk_size: int) -> None:
        self.chunk_size = chunk_size
        self.pool: list[list[tuple[bytes, bytes] | None]] = [[None] * chunk_size for _ in range(num_blocks)]
        self.residents: dict[int, _Resident] = {}
        self.rows: list[int] = []
        self.runs = np.empty((0, 4), np.int32)
        self.last_step = 0
        self.written: dict[tuple[int, int], tuple[int, int]] = {}
        """(block, offset) → (step, stay) of the last write: one step's rows do not see each other's."""
        self.computed_tokens = 0
        self.written_tokens = 0
        self.copied_tokens = 0
        self.max_rows = 0

    def execute(self, plan: StepPlan) -> StepResult:
        assert plan.step == self.last_step + 1, "a step plan was lost"
        self.last_step = plan.step
        for stay in unpack_int32(plan.leaves).tolist():
            del self.residents[stay]
        for join in plan.joins:
            self._join(join)
        copies = unpack_int32(plan.copies, 4).tolist()
        targets = {target for _, target, _, _ in copies}
        assert not targets & {source for source, _, _, _ in copies}, "copies of one launch depend on each other"
        for source, target, first, count in copies:
            self.pool[target][first : first + count] = self.pool[source][first : first + count]
            self.copied_tokens += count
        for stay, index, block in unpack_int32(plan.blocks, 3).tolist():
            table = self.residents[stay].table
            assert index <= len(table), "a block table has a hole"
            table[index : index + 1] = [block]
        if plan.rows is not None:
            assert plan.runs is not None
            self.rows = unpack_int32(plan.rows).tolist()
            self.runs = unpack_int32(plan.runs, 4)
        self._check_runs()
        self.max_rows = max(self.max_rows, len(self.rows))
        tokens = self._compute(plan)
        return StepResult(step=plan.step, epoch=plan.epoch, tokens=pack_int32(tokens), elapsed_us=1)

    def _join(self, join: Join) -> None:
        assert join.sequence not in self.residents
        tokens = unpack_int32(join.tokens).tolist()
        table = unpack_int32(join.blocks).tolist()
        self.residents[join.sequence] = _Resident(join.sampling.seed, join.first, tokens, table)

    def _compute(self, plan: StepPlan) -> list[int]:
        work = [(stay, None, 1, None, 1) for stay in self.rows]
        items = [*work, *(tuple(item) for item in unpack_int32(plan.prefill, 5).tolist())]
        sampled: list[tuple[int, int]] = []
        for stay, start, count, write_from, sample in items:
            resident = self.residents[stay]
            at = resident.first + len(resident.tokens) - 1 if start is None else start
            last = self._walk(stay, at)
            for position in range(at, at + count):
                write = write_from is None or position >= write_from
                last = self._position(stay, position, last, write=write)
            if sample:
                sampled.append((stay, next_token(last, resident.seed)))
        for stay, token in sampled:
            self.residents[stay].tokens.append(token)
        return [token for _, token in sampled]

    def _slot(self, resident: _Resident, position: int) -> tuple[int, int]:
        return resident.table[position // self.chunk_size], position % self.chunk_size

    def _walk(self, stay: int, count: int) -> bytes:
        """Attend over positions `[0, count)`; the hash of all their tokens."""
        current = b""
        for position in range(count):
            entry = self._read(stay, position)
            assert entry[1] == current, "a token attends to KV of another past"
            current = entry[0]
        return current

    def _read(self, stay: int, position: int) -> tuple[bytes, bytes]:
        block, offset = self._slot(self.residents[stay], position)
        entry = self.pool[block][offset]
        assert entry is not None, "a token attends to KV that nobody computed"
        step, writer = self.written.get((block, offset), (0, 0))
        assert step < self.last_step or writer == stay, "a step reads what another sequence computes in it"
        return entry

    def _position(self, stay: int, position: int, past: bytes, *, write: bool) -> bytes:
        """Compute a position after `past`, then store (or, unstored, find) its entry."""
        resident = self.residents[stay]
        current = extend_hash(past, resident.tokens[position - resident.first])
        if write:
            block, offset = self._slot(resident, position)
            self.pool[block][offset] = (current, past)
            self.written[block, offset] = (self.last_step, stay)
            self.written_tokens += 1
        assert self._read(stay, position) == (current, past), (
            "a token that is not stored differs from the stored one"
        )
        self.computed_tokens += 1
        return current

    def _check_runs(self) -> None:
        """Rows of a run agree on its blocks; nested runs cover disjoint table ranges."""
        covered: set[tuple[int, int]] = set()
        for first, stop, start, end in self.runs.tolist():
            assert stop - first >= 2
            assert start < end
            tables = [self.residents[stay].table[start:end] for stay in self.rows[first:stop]]
            assert all(table == tables[0] and len(table) == end - start for table in tables)
            for row in range(first, stop):
                for index in range(start, end):
                    assert (row, index) not in covered, "a block would be read twice for a row"
                    covered.add((row, index))
