"""A random batch of decode rows: joins, leaves, growth over chunk borders, cuts, modules, beams, drafts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from trunkline.kvstore.chunks import pack_int32
from trunkline.worker.batch.draft_rows import DraftRows
from trunkline.worker.batch.sequences import BatchSequence
from trunkline.worker.messages import BeamPosition, Join, Sampling

OPEN = -1


class Text(NamedTuple):
    """A module's text: where it was computed, and its blocks."""

    base: int
    tokens: int
    blocks: list[int]


@dataclass
class RowWorld:
    """Sequences that decode, and what changed since the last step."""

    rng: np.random.Generator
    chunk: int
    rows_max: int
    kinds: tuple[str, ...] = ("plain", "cut", "modules", "beams", "drafts")
    rows: list[BatchSequence] = field(default_factory=list)
    rows_changed: bool = True
    touched: set[int] = field(default_factory=set)
    exchanged: bool = False
    drafts: DraftRows | None = None
    blocks: int = 0
    _next_id: int = 1
    _texts: list[Text] = field(default_factory=list)
    _chains: dict[int, int] = field(default_factory=dict)
    """Number of drafts behind each sequence's own token."""

    def step(self) -> None:
        """Go on to the next step."""
        self._accept()
        self.rows_changed, self.exchanged = False, False
        self.touched.clear()
        roll = self.rng.random()
        if roll < 0.15 or not self.rows:
            self._join()
        elif roll < 0.25:
            self._leave()
        elif roll < 0.3 and len(self.rows) > 1:
            self.rows = [self.rows[i] for i in self.rng.permutation(len(self.rows))]
            self.rows_changed = True
        elif roll < 0.33:
            self._replace_block()
        if "beams" in self.kinds:
            self._move_beams()
        self._draft()

    def _accept(self) -> None:
        """Each sequence has one token more, and some of its drafts."""
        for row in self.rows:
            accepted = int(self.rng.integers(0, self._chains.get(row.id, 0) + 1))
            for _ in range(1 + accepted):
                row.append(0)

    def _draft(self) -> None:
        self._chains.clear()
        if "drafts" in self.kinds and self.rng.random() < 0.3:
            for row in self.rows:
                if row.beam_position is None and self.rng.random() < 0.5:
                    self._chains[row.id] = int(self.rng.integers(1, 4))
        for row in self.rows:
            self._make_room(row, self._chains.get(row.id, 0))
        self.drafts = None
        if self._chains:
            chains = [pack_int32([7] * self._chains.get(row.id, 0)) for row in self.rows]
            self.drafts = DraftRows.of(self.rows, chains)

    def _make_room(self, row: BatchSequence, drafts: int) -> None:
        """Give a row the blocks that it needs, or a few more."""
        table_start, first, _, start = row.layout.opening
        needed = table_start + (first + row.known - 1 + drafts - start) // self.chunk + 1
        if len(row.blocks) < needed:
            needed += int(self.rng.integers(0, 3)) if row.beam_position is None else 0
            while len(row.blocks) < needed:
                row.set_block(len(row.blocks), self._block())
            self.touched.add(row.id)

    def _block(self) -> int:
        self.blocks += 1
        return self.blocks - 1

    def _join(self) -> None:
        if len(self.rows) >= self.rows_max:
            return
        self.rows_changed = True
        kind = self.rng.choice([kind for kind in self.kinds if kind != "drafts"])
        place = int(self.rng.integers(0, len(self.rows) + 1))
        if kind == "beams":
            table, tokens = self._prefix()
            width = int(self.rng.integers(2, 5))
            members = [BeamPosition(self._next_id, index, width) for index in range(width)]
            joined = [self._sequence(table, tokens, [], member) for member in members]
            for one in joined[1:]:
                one.blocks[-1] = self._block()  # a tail of its own
        elif kind == "modules":
            joined = [self._with_modules()]
        else:
            table, tokens = self._prefix()
            extents, left_out = self._cut(tokens) if kind == "cut" else ([], 0)
            joined = [self._sequence(table, tokens - left_out, extents)]
        self.rows[place:place] = joined

    def _prefix(self) -> tuple[list[int], int]:
        """A table that begins like that of some row, or like none, and the number of its tokens."""
        table: list[int] = []
        plain = [row for row in self.rows if row.layout.is_plain]
        if plain and self.rng.random() < 0.7:
            source = plain[int(self.rng.integers(0, len(plain)))]
            full = (source.known - 1) // self.chunk
            table = list(source.blocks[: int(self.rng.integers(0, full + 1))])
        more = int(self.rng.integers(1, 4 * self.chunk))
        tokens = len(table) * self.chunk + more
        while len(table) * self.chunk < tokens:
            table.append(self._block())
        return table, tokens

    def _cut(self, tokens: int) -> tuple[list[tuple[int, ...]], int]:
        """A layout that leaves some tokens out between two parts, perhaps in the middle of blocks; how many."""
        kept, gap = (int(x) for x in self.rng.integers(1, max(2, tokens // 2), size=2))
        if kept + gap >= tokens:
            return [], 0
        start, first = divmod(kept + gap, self.chunk)
        shift = int(self.rng.choice([0, 0, -gap]))
        return [(0, 0, kept, 0, 0), (start, first, OPEN, kept + gap, shift)], gap

    def _with_modules(self) -> BatchSequence:
        while len(self._texts) < 3:
            tokens = int(self.rng.integers(1, 3 * self.chunk))
            blocks = [self._block() for _ in range(-(-tokens // self.chunk))]
            self._texts.append(Text(int(self.rng.integers(0, 200)), tokens, blocks))
        table: list[int] = []
        extents: list[tuple[int, ...]] = []
        position = index = 0
        for number in self.rng.integers(0, 3, size=int(self.rng.integers(1, 4))).tolist():
            text = self._texts[number]
            first = int(self.rng.integers(0, text.tokens)) if self.rng.random() < 0.2 else 0
            shift = position - text.base - first
            extents.append((len(table), first, text.tokens - first, text.base + first, shift))
            table += text.blocks
            position += text.tokens - first + int(self.rng.integers(0, 5))
            index += text.tokens - first
        own = int(self.rng.integers(1, 2 * self.chunk))
        extents.append((len(table), 0, OPEN, position, 0))
        table += [self._block() for _ in range(-(-own // self.chunk))]
        return self._sequence(table, index + own, extents)

    def _sequence(
        self,
        table: list[int],
        tokens: int,
        extents: list[tuple[int, ...]],
        beam: BeamPosition | None = None,
    ) -> BatchSequence:
        flat = [x for extent in extents for x in extent]
        join = Join(
            sequence=self._next_id,
            tokens=pack_int32([0]),
            first=tokens - 1,
            prompt_len=tokens,
            blocks=pack_int32(table),
            sampling=Sampling(),
            extents=pack_int32(flat) if flat else b"",
            beam_position=beam,
        )
        self._next_id += 1
        return BatchSequence(join)

    def _leave(self) -> None:
        gone = self.rows[int(self.rng.integers(0, len(self.rows)))]
        beam = gone.beam_position
        search = None if beam is None else beam.search
        self.rows = [
            row
            for row in self.rows
            if row is not gone and (row.beam_position is None or row.beam_position.search != search)
        ]
        self.rows_changed = True

    def _replace_block(self) -> None:
        """The last full block turns out to be there already, under another number."""
        row = self.rows[int(self.rng.integers(0, len(self.rows)))]
        full = (row.known - 1) // self.chunk
        if row.layout.is_plain and full and row.beam_position is None:
            row.set_block(full - 1, self._block())
            self.touched.add(row.id)

    def _move_beams(self) -> None:
        """Every beam goes on from any of its search: it has that one's full blocks, and a tail of its own."""
        searches: dict[int, list[BatchSequence]] = {}
        for row in self.rows:
            if row.beam_position is not None:
                searches.setdefault(row.beam_position.search, []).append(row)
        for members in searches.values():
            before = [list(row.blocks) for row in members]
            for row in members:
                parent = before[int(self.rng.integers(0, len(members)))]
                full = (row.known - 1) // self.chunk
                tail = self._block()
                row.blocks = type(row.blocks)("i", [*parent[:full], tail])
            self.exchanged = True
