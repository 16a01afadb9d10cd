"""A worker group without a model: it obeys step plans and checks that every token sees its own past.

It follows the contract in `trunkline.worker.messages`, and asserts whatever a correct plan promises: tables
without holes, blocks written by one sequence only, forks that share what they should, runs that agree, searches
that are whole. Its pool (`simulation.pool`) holds hashes, its model (`simulation.model`) says what comes next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import msgspec
import numpy as np
from simulation.beams import Resident, Searches
from simulation.layout import Layout, seen_hash
from simulation.model import (
    MODULES,
    extend_hash,
    extend_seen,
    next_token,
    pool_state,
    prompt_score,
    text_token,
)
from simulation.pool import Entry
from simulation.windowed_pool import WindowedPool

from trunkline.controller.reports import BeamStep, PromptLogprobs, StepResult, TopLogprobs
from trunkline.kvstore.chunks import NAME_BYTES, pack_int32, unpack_int32
from trunkline.worker.messages import CompileGrammar, ForgetGrammar, Fork, Join, Sampling, StepPlan

TOKEN_US = 25
"""Computing one."""
MOVE_US = 10
"""A save or load of one block."""


class SimulatedWorkers:
    """Executes plans in order; counts what real workers would have computed, copied and held."""

    window: int = 0
    """Tokens that a query sees; 0: all before it. What it does not see is not read."""
    part_window: int = 0
    """Tokens that a query sees in some layers, while others see all; 0: there are no such layers."""

    def __init__(
        self,
        num_blocks: int,
        chunk_size: int,
        host_slots: int = 0,
        seed: int = 0,
        *,
        like: SimulatedWorkers | None = None,
    ) -> None:
        """
        Args:
            like: those whose place they take; they count on where these ended.
        """
        self.chunk_size = chunk_size
        self.pool = WindowedPool(num_blocks, chunk_size, host_slots, seed)
        self.residents: dict[int, Resident] = {}
        self.searches = Searches(chunk_size)
        self.grammars: dict[int, bool] = {}
        self.grammar_tenants: set[tuple[int, bytes]] = set()
        """Those announced; True once they are compiled."""
        self.rows: list[int] = []
        self.runs = np.empty((0, 4), np.int32)
        self.last_step = 0
        self.holders: Counter[int] = Counter()
        """By block, the entries of residents' tables that name it while the step computes."""
        self.computed_tokens: int = like.computed_tokens if like else 0
        self.written_tokens: int = like.written_tokens if like else 0
        self.refused_tokens: int = like.refused_tokens if like else 0
        """Drafts that were computed in vain; not in `computed_tokens`."""
        self.max_rows = 0
        self.observer: Callable[[StepPlan], None] | None = like.observer if like else None
        """Called after each step."""

    @property
    def copied_tokens(self) -> int:
        return self.pool.copied_tokens

    @property
    def _drafted(self) -> int:
        """Drafts of the present step."""
        return sum(len(self.residents[batch_seq_id].drafts) for batch_seq_id in self.rows)

    @property
    def blocks_held(self) -> tuple[int, int]:
        """(physical, logical): different blocks in the residents' tables, entries of these tables."""
        entries = [block for resident in self.residents.values() for block in resident.table]
        return len(set(entries)), len(entries)

    def prepare(self, message: CompileGrammar | ForgetGrammar) -> None:
        """What comes on the plan topic between steps."""
        if isinstance(message, CompileGrammar):
            assert message.grammar > 0
            assert not self.grammars.get(message.grammar), "a grammar is compiled again"
            assert (message.grammar, message.tenant) not in self.grammar_tenants, "a grammar is asked for twice"
            self.grammar_tenants.add((message.grammar, message.tenant))
            self.grammars[message.grammar] = False
        else:
            del self.grammars[message.grammar]

    def execute(self, plan: StepPlan, modules: Mapping[int, Mapping[int, int]] | None = None) -> StepResult:
        """
        Args:
            modules: of those that join, the ones whose prompts have modules; also those that compute texts. By
                position, what `Entry.reach` must be of a token that acts there, where that is known.
        """
        assert plan.step == self.last_step + 1, "a step plan was lost"
        self.last_step = plan.step
        self._leave(unpack_int32(plan.leaves).tolist())
        for join in plan.joins:
            self._join(join, (modules or {}).get(join.sequence))
        saves, loads = unpack_int32(plan.saves, 3).tolist(), unpack_int32(plan.loads, 3).tolist()
        late_saves = unpack_int32(plan.late_saves, 3).tolist()
        names = [plan.save_names[at : at + NAME_BYTES] for at in range(0, len(plan.save_names), NAME_BYTES)]
        self.pool.name_saves(names, saves + late_saves)
        self.pool.order(plan.step, saves, loads, plan.save_fence, plan.load_fence, plan.load_layers)
        self.pool.thin(unpack_int32(plan.thinned).tolist(), plan.step)
        self.pool.copy(self.searches.take_copies())
        self.pool.copy(unpack_int32(plan.copies, 4).tolist())
        for batch_seq_id, index, block in unpack_int32(plan.blocks, 3).tolist():
            table = self.residents[batch_seq_id].table
            assert index <= len(table), "a block table has a hole"
            table[index : index + 1] = [block]
        if plan.rows is not None:
            assert plan.runs is not None
            self.rows = unpack_int32(plan.rows).tolist()
            self.runs = unpack_int32(plan.runs, 4)
        assert self.rows or plan.prefill or plan.joins or saves, "a step does nothing"
        assert len(plan.drafts) in (0, len(self.rows)), "drafts do not go with the rows"
        assert not plan.drafts or any(plan.drafts), "a plan names drafts and has none"
        for batch_seq_id, drafts in zip(self.rows, plan.drafts or [b""] * len(self.rows), strict=True):
            self.residents[batch_seq_id].drafts = unpack_int32(drafts).tolist()
        for batch_seq_id, start, *_ in unpack_int32(plan.prefill, 5).tolist():
            self.residents[batch_seq_id].start = start
        for batch_seq_id in self.rows:
            self.residents[batch_seq_id].start = self.residents[batch_seq_id].total - 1
        self._check_batch()
        result = self._compute(plan, len(saves) + len(late_saves) + len(loads))
        self.pool.computed(plan.step, late_saves)
        if self.observer is not None:
            self.observer(plan)
        return result

    def _leave(self, batch_seq_ids: list[int]) -> None:
        positions = [
            beam_position
            for batch_seq_id in batch_seq_ids
            if (beam_position := self.residents[batch_seq_id].beam_position) is not None
        ]
        for batch_seq_id in batch_seq_ids:
            del self.residents[batch_seq_id]
        self.searches.leave(positions)

    def _join(self, join: Join, reaches: Mapping[int, int] | None) -> None:
        assert join.sequence not in self.residents
        grammar = join.sampling.grammar
        assert not grammar or self.grammars.get(grammar), "a sequence follows a grammar that nobody compiled"
        assert not grammar or join.first == 0, "a grammar needs the whole output"
        self._enter(
            join.sequence,
            Resident(
                join.sampling,
                join.prompt_len,
                join.first,
                unpack_int32(join.tokens).tolist(),
                unpack_int32(join.blocks).tolist(),
                Layout(join.extents, self.chunk_size, modules=reaches is not None),
                join.beam_position,
                reaches=reaches or {},
            ),
        )

    def _enter(self, batch_seq_id: int, resident: Resident) -> None:
        self.residents[batch_seq_id] = resident
        if resident.beam_position is not None:
            self.searches.sit(batch_seq_id, resident.beam_position)

    def _check_batch(self) -> None:
        """What must hold before anything is computed."""
        self.max_rows = max(self.max_rows, len(self.rows) + self._drafted)
        assert len(set(self.rows)) == len(self.rows), "a sequence has two rows"
        followed = {resident.sampling.grammar for resident in self.residents.values()} - {0}
        assert followed <= set(self.grammars), "a grammar is forgotten that somebody follows"
        self.searches.check_together(self.rows, self.residents)
        self._check_runs()
        self.holders = Counter()
        for resident in self.residents.values():
            self.holders.update(resident.table[self._behind(resident) :])

    def _check_runs(self) -> None:
        """Rows of a run agree on its blocks, those of searches excepted; nested runs cover disjoint ranges. A run
        of one row names what others may have elsewhere in their tables: texts of modules."""
        covered: set[tuple[int, int]] = set()
        named: set[tuple[int, int]] = set()
        for first, stop, start, end in self.runs.tolist():
            assert first < stop
            assert start < end
            members = [self.residents[batch_seq_id] for batch_seq_id in self.rows[first:stop]]
            assert len(members) == stop - first, "a run covers rows that are not there"
            assert all(len(member.table) >= end for member in members), "a run goes beyond a table"
            if stop - first == 1:
                assert members[0].layout.has_modules, "a run of one row is of no use"
                named |= {(first, index) for index in range(start, end)}
                continue
            start = max([start, *(self._behind(member) for member in members)])
            tables = [member.table[start:end] for member in members if member.beam_position is None]
            assert all(table == tables[0] for table in tables), "rows of a run read different blocks"
            cells = {(row, index) for row in range(first, stop) for index in range(start, end)}
            assert not cells & covered, "a block would be read twice for a row"
            covered |= cells
        self._check_shared(covered | named)

    def _check_shared(self, covered: set[tuple[int, int]]) -> None:
        """What several rows of prompts with modules read is in runs of all of them."""
        readers: dict[int, set[tuple[int, int]]] = {}
        for row, batch_seq_id in enumerate(self.rows):
            resident = self.residents[batch_seq_id]
            if resident.layout.has_modules:
                for index, block in enumerate(resident.table):
                    readers.setdefault(block, set()).add((row, index))
        for cells in readers.values():
            if len({row for row, _ in cells}) > 1:
                assert cells <= covered, "rows read a block each for itself"

    def _unseen(self, position: int) -> int:
        """Tokens that a query at a position does not see any more."""
        return max(0, position - self.window + 1) if self.window else 0

    def _behind(self, resident: Resident) -> int:
        """Table entries that no query of a resident will see: what they name may be anything."""
        if not resident.layout.is_plain or resident.beam_position is not None:
            return 0
        holes = next((i for i, block in enumerate(resident.table) if block >= 0), 0)
        return max(holes, self._unseen(resident.start) // self.chunk_size)

    # Computing

    def _compute(self, plan: StepPlan, moved_blocks: int) -> StepResult:
        prefill = unpack_int32(plan.prefill, 5).tolist()
        assert len({item[0] for item in prefill} | set(self.rows)) == len(prefill) + len(self.rows), (
            "a sequence has two entries in one step"
        )
        hashes: dict[int, bytes] = {}
        for batch_seq_id in self.rows:
            assert not self.residents[batch_seq_id].sampling.pooling, "a prompt that is pooled goes on"
            position = self.residents[batch_seq_id].total - 1
            hashes[batch_seq_id] = self._run(batch_seq_id, position, 1, position)
        behind = {batch_seq_id: self._run_drafts(batch_seq_id) for batch_seq_id in self.rows}
        scored: dict[int, PromptLogprobs] = {}
        for batch_seq_id, start, count, write_from, sample in prefill:
            resident = self.residents[batch_seq_id]
            assert count > 0
            assert start + count <= resident.total, "a prompt is computed beyond its end"
            assert not sample or start + count == resident.total, "a token is sampled inside of a prompt"
            assert not sample or resident.total > resident.layout.open_start, "nothing stands where it samples"
            if resident.sampling.prompt_logprobs >= 0 and (report := self._score(batch_seq_id, start, count)):
                scored[batch_seq_id] = report
            last = self._run(batch_seq_id, start, count, write_from)
            if sample:
                hashes[batch_seq_id] = last
        reports = self._pooled(hashes)
        tokens, beams = self._sample(plan, hashes, behind)
        return StepResult(
            step=plan.step,
            epoch=plan.epoch,
            tokens=pack_int32(tokens),
            elapsed_us=1 + TOKEN_US * (len(tokens) + sum(item[2] for item in prefill)),
            logprobs=reports or None,
            beams=beams or None,
            prompt_logprobs=scored or None,
            moved_us=MOVE_US * moved_blocks,
            moved_blocks=moved_blocks,
        )

    def _run(self, batch_seq_id: int, start: int, count: int, write_from: int) -> bytes:
        """Compute positions from `start` on; the hash of all tokens up to the last."""
        resident = self.residents[batch_seq_id]
        assert resident.computed in (None, start), "a sequence computes something twice or not at all"
        resident.computed = start + count
        if resident.layout.has_modules:
            return self._run_modules(batch_seq_id, start, count, write_from)
        last = self._past(batch_seq_id, start)
        for position in range(start, start + count):
            last = self._position(batch_seq_id, position, last, write=position >= write_from)
        return last

    def _run_drafts(self, batch_seq_id: int) -> list[bytes]:
        """Compute what a row guesses behind its last token; the hash behind each guess."""
        resident = self.residents[batch_seq_id]
        assert not resident.drafts or resident.beam_position is None, "a beam has drafts"
        first, known = resident.total, len(resident.tokens)
        resident.tokens += resident.drafts
        hashes = [self._run(batch_seq_id, at, 1, at) for at in range(first, first + len(resident.drafts))]
        del resident.tokens[known:]
        return hashes

    def _run_modules(self, batch_seq_id: int, start: int, count: int, write_from: int) -> bytes:
        """Likewise with modules: each new token sees what acts at smaller positions, in that order."""
        resident = self.residents[batch_seq_id]
        seen, new, positions = MODULES, start, 0
        for place, (number, cell) in enumerate(resident.layout.by_position(start + count)):
            positions += cell.acting
            block = resident.table[cell.entry]
            if number < start:
                entry = self.pool.read(block, cell.offset, self.last_step, batch_seq_id)
                if self.part_window:
                    self.pool.look_at(block, cell.offset)
                assert entry.frame == cell.frame, "a key was rotated at another position than is assumed"
                known = number < resident.first or entry.token == resident.tokens[number - resident.first]
                assert known, "KV of other tokens is seen"
                reach = resident.reaches.get(cell.acting, entry.reach)
                assert entry.reach == reach, "KV is nearer to, or farther from, what it saw"
                seen = extend_seen(seen, entry.after)
                continue
            assert number == new, "new tokens are not in the order of their positions"
            token = resident.tokens[number - resident.first]
            reach = (place + 1) * cell.acting - positions
            entry = Entry(text_token(seen, token), seen, token, cell.frame, place, reach)
            self._store(batch_seq_id, block, cell.offset, entry, write=number >= write_from)
            seen = extend_seen(seen, entry.after)
            new += 1
            if new == start + count:
                return seen
        raise AssertionError("a layout has no place for a new token")

    def _store(self, batch_seq_id: int, block: int, offset: int, entry: Entry, *, write: bool) -> None:
        """Store (or, unstored, find) what was computed of a token."""
        if write:
            assert self.holders[block] == 1, "a sequence writes to a block that others refer to"
            self.pool.write(block, offset, entry, self.last_step, batch_seq_id)
            self.written_tokens += 1
        else:
            stored = self.pool.read(block, offset, self.last_step, batch_seq_id)
            same = stored == entry._replace(reach=stored.reach)  # texts may have moved since
            assert same, "a token that is not stored differs from the stored one"
        self.computed_tokens += 1

    def _past(self, batch_seq_id: int, count: int) -> bytes:
        """Attend over a sequence's first `count` positions; the hash of what is seen there."""
        resident = self.residents[batch_seq_id]
        if resident.layout.is_plain:
            if self.part_window:
                self.pool.look(resident.table, max(0, count - self.part_window + 1), count)
            return self.pool.walk(resident.table, count, self.last_step, batch_seq_id, self._unseen(count))
        cells = resident.layout.cells(count)
        step = self.last_step
        entries = [self.pool.read(resident.table[cell.entry], cell.offset, step, batch_seq_id) for cell in cells]
        for entry, cell in zip(entries, cells, strict=True):
            assert entry.frame == cell.frame, "a key was rotated at another position than is assumed"
        known = resident.tokens[: max(0, count - resident.first)]
        assert [entry.token for entry in entries][resident.first :] == known, "KV of other tokens is seen"
        return seen_hash(entries)

    def _position(self, batch_seq_id: int, position: int, past: bytes, *, write: bool) -> bytes:
        """Compute a position after `past`, then store (or, unstored, find) its entry."""
        resident = self.residents[batch_seq_id]
        token = resident.tokens[position - resident.first]
        current = extend_hash(past, token)
        index, offset, frame, _ = resident.layout.cell(position)
        block = resident.table[index]
        if write:
            assert self.holders[block] == 1, "a sequence writes to a block that others refer to"
            self.pool.write(
                block, offset, Entry(current, past, token, frame, position), self.last_step, batch_seq_id
            )
            self.written_tokens += 1
        else:
            stored = self.pool.read(block, offset, self.last_step, batch_seq_id)
            if self.part_window:
                self.pool.look(resident.table, position, position + 1)
            same = stored == Entry(current, past, token, frame, position)
            behind_cut = not resident.layout.is_plain and stored[2:4] == (token, frame)
            assert same or behind_cut, "a token that is not stored differs from the stored one"
        self.computed_tokens += 1
        if resident.sampling.pools_all:
            resident.pooled = pool_state(resident.pooled, current)
        return current

    def _pooled(self, hashes: dict[int, bytes]) -> dict[int, TopLogprobs]:
        """The reports of prompts that end and are pooled, by place; rows and their drafts come before them."""
        reports = {}
        for index, (batch_seq_id, last) in enumerate(hashes.items(), self._drafted):
            resident = self.residents[batch_seq_id]
            if resident.sampling.pooling:
                pooled = resident.pooled if resident.sampling.pools_all else last
                reports[index] = TopLogprobs(0.0, b"", b"", pooled)
        return reports

    def _score(self, batch_seq_id: int, start: int, count: int) -> PromptLogprobs | None:
        """Scores of the prompt tokens after positions `[start, start + count)`."""
        resident = self.residents[batch_seq_id]
        stop = min(start + count + 1, resident.prompt_len)
        if stop <= start + 1:
            return None
        past = self._past(batch_seq_id, start)
        scores = []
        for position in range(start, stop - 1):
            past = extend_hash(past, resident.tokens[position - resident.first])
            following = resident.tokens[position + 1 - resident.first]
            scores.append(prompt_score(past, following, resident.sampling.prompt_logprobs))
        values, ranks, ids, tops = zip(*scores, strict=True)
        return PromptLogprobs(
            start=start + 1,
            token_logprobs=np.array(values, "<f4").tobytes(),
            ranks=pack_int32(ranks),
            top_ids=pack_int32([x for row in ids for x in row]),
            top_logprobs=np.array([x for row in tops for x in row], "<f4").tobytes(),
        )

    # Sampling

    def _sample(
        self, plan: StepPlan, hashes: dict[int, bytes], behind: dict[int, list[bytes]]
    ) -> tuple[list[int], dict[int, BeamStep]]:
        """Tokens in the order of the result: rows with their drafts, prompts that end, forks.

        Args:
            behind: of rows, the hashes behind their drafts.
        """
        order = list(hashes)
        for fork in plan.forks:
            self._fork(fork, hashes)
            order.append(fork.child)
        forked = {fork.child: fork.parent for fork in plan.forks}
        sampled: dict[int, int] = {}
        for batch_seq_id in order:
            if self.residents[batch_seq_id].beam_position is None:
                sampled[batch_seq_id] = next_token(
                    hashes[forked.get(batch_seq_id, batch_seq_id)], self.residents[batch_seq_id].sampling.seed
                )
        for batch_seq_id, token in sampled.items():
            self.residents[batch_seq_id].tokens.append(token)
        beams: dict[int, BeamStep] = {}
        groups = {
            beam_position.search: None
            for batch_seq_id in order
            if (beam_position := self.residents[batch_seq_id].beam_position) is not None
        }
        for group in groups:
            beams[group], chosen = self.searches.advance(group, hashes, self.residents)
            sampled.update(chosen)
        places = [
            [sampled[batch_seq_id], *self._verify(batch_seq_id, behind.get(batch_seq_id, []))]
            for batch_seq_id in order
        ]
        return [token for row in places for token in row], beams

    def _verify(self, batch_seq_id: int, hashes: list[bytes]) -> list[int]:
        """Draw behind the drafts that are accepted; -1 behind the others."""
        resident = self.residents[batch_seq_id]
        drawn: list[int] = []
        for draft, past in zip(resident.drafts if hashes else (), hashes, strict=True):
            if draft != resident.tokens[-1]:
                break
            drawn.append(next_token(past, resident.sampling.seed))
            resident.tokens.append(drawn[-1])
        refused = len(hashes) - len(drawn)
        if hashes:
            resident.computed = resident.total - 1
        self.refused_tokens += refused
        self.computed_tokens -= refused
        self.written_tokens -= refused
        return drawn + [-1] * refused

    def _fork(self, fork: Fork, hashes: dict[int, bytes]) -> None:
        parent = self.residents[fork.parent]
        assert fork.parent in hashes, "a fork comes out of a sequence that samples nothing"
        assert fork.parent not in self.rows, "a fork comes out of a row"
        assert fork.child not in self.residents
        table = unpack_int32(fork.blocks).tolist()
        index, offset, _, _ = parent.layout.cell(parent.total - 1)
        whole, rest = divmod(index * self.chunk_size + offset + 1, self.chunk_size)
        seen = next((index for index, block in enumerate(table) if block >= 0), 0)
        assert table[seen:whole] == parent.table[seen:whole], "a fork does not share its parent's blocks"
        assert len(table) <= whole + bool(rest), "a fork has blocks that nobody needs yet"
        assert all(self.holders[block] == 0 for block in table[whole:]), "a fork's tail is not its own"
        self.holders.update(table)
        assert (parent.beam_position is None) == (fork.beam_position is None)
        sampling = parent.sampling if fork.beam_position else _with_seed(parent.sampling, fork.seed)
        child = Resident(
            sampling,
            parent.prompt_len,
            parent.first,
            list(parent.tokens),
            table,
            parent.layout,
            fork.beam_position,
            parent.total,
            parent.reaches,
        )
        self._enter(fork.child, child)


def _with_seed(sampling: Sampling, seed: int) -> Sampling:
    return msgspec.structs.replace(sampling, seed=seed)
