"""Random edits of random histories: what a request finds has seen all that the request sees, and, without an edit,
nothing else.

The model knows of each cell of the pool its token, the position of its key, and what it saw when it was computed.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
from controller.kv_harness import CHUNK, Bench
from seeds import seeds

from trunkline.controller.allocation.prefix_match import keep_or_compact
from trunkline.controller.engine.intake import make_group
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.messages import Submit
from trunkline.controller.sequences.sequence import Request, Sequence
from trunkline.kvstore.chunks import PLAIN_LAYOUT, pack_int32
from trunkline.worker.messages import Sampling

BLOCKS = 60
LENGTH_MAX = 48
TOKENS = 3
CONFIG = EngineConfig(num_blocks=BLOCKS, chunk_size=CHUNK, max_context=4 * LENGTH_MAX)

Drops = list[tuple[int, int]]


class Cell(NamedTuple):
    """KV of one token."""

    token: int
    frame: int
    """Position at which its key was rotated."""
    saw: int
    """What it saw: bit `position * TOKENS + token` for each token that it saw."""


class Editors:
    """Clients whose histories begin alike; each asks again and again, with edits that grow, shrink or change."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._bench = Bench(BLOCKS, 0)
        self._cells: dict[tuple[int, int], Cell] = {}
        self._histories: list[list[int]] = [self._draw(12) for _ in range(3)]
        self._drops: list[Drops] = [[], [], []]
        self.kept = self.recomputed = 0

    def _draw(self, count: int) -> list[int]:
        return [self._rng.randrange(TOKENS) for _ in range(count)]

    def act(self) -> None:
        """One client edits and asks; or forks another client's history."""
        rng = self._rng
        client = rng.randrange(len(self._histories))
        history = self._histories[client]
        if len(history) > LENGTH_MAX or rng.random() < 0.03:
            other = rng.randrange(len(self._histories))
            history[:] = self._histories[other][: rng.randrange(8, 24)]
            self._drops[client] = [drop for drop in self._drops[other] if drop[1] < len(history) - 1]
        history += self._draw(rng.randrange(1, 6))
        self._drops[client] = self._edited(self._drops[client], len(history))
        self.ask(history, self._drops[client])

    def _edited(self, drops: Drops, length: int) -> Drops:
        rng, last = self._rng, length - 2
        kind = rng.random()
        if kind < 0.1:
            return []
        if kind < 0.5:
            return drops
        start = drops[-1][1] + 1 if drops and kind < 0.85 else rng.randrange(last)
        width = 1 if rng.random() < 0.4 else rng.randrange(1, 9)
        dropped = {token for a, b in drops for token in range(a, b)} | set(range(start, min(start + width, last)))
        edges = [token for token in range(length) if (token in dropped) != (token - 1 in dropped)]
        return list(zip(edges[::2], edges[1::2], strict=True))

    def ask(self, history: list[int], drops: Drops) -> None:
        """A request comes, is computed, and goes."""
        bench = self._bench
        packed = pack_int32([end for drop in drops for end in drop])
        submit = Submit(bench.step, pack_int32(history), len(history), 4, Sampling(), drops=packed)
        group = make_group(Request.of(bench.step, submit), bench.step, submit.sampling, bench.tree, CONFIG)
        sequence = group.members[0]
        keep_or_compact(bench.tree, sequence, bench.step + 1)
        plan = bench.admit(sequence)
        for source, target, first, count in plan.copies:
            for offset in range(first, first + count):
                if (source, offset) in self._cells:
                    self._cells[target, offset] = self._cells[source, offset]
                else:  # left out before anything was computed there
                    self._cells.pop((target, offset), None)
        self.kept += group.cut is not None
        self.recomputed += bool(drops) and group.cut is None
        self._compute(sequence)
        bench.leave(sequence)

    def _compute(self, sequence: Sequence) -> None:
        """Read what was found, compute the rest, in the order in which tokens act."""
        cut, table, tokens = sequence.group.cut, sequence.block_table(), sequence.tokens.view().tolist()
        saw = 0
        for extent in cut.cut.extents() if cut is not None else PLAIN_LAYOUT:
            begin = extent.table_start * CHUNK + extent.first_token
            stop = begin + extent.token_count if extent.token_count >= 0 else len(tokens)
            for index in range(begin, stop):
                place = table[index // CHUNK], index % CHUNK
                token, frame = tokens[index], extent.base_position + index - begin
                may_compute = cut is None or index >= cut.cut.first_open
                assert may_compute or index < sequence.cached_tokens, "new tokens stand behind the last edit only"
                if index >= sequence.cached_tokens:
                    self._cells[place] = Cell(token, frame, saw)
                cell = self._cells[place]
                assert cell[:2] == (token, frame)
                assert not saw & ~cell.saw, "it saw less than is seen now"
                assert cut is not None or cell.saw == saw, "it saw what is not seen now"
                saw |= 1 << (frame * TOKENS + token)


def run(seed: int, edits: int) -> None:
    editors = Editors(seed)
    for _ in range(edits):
        editors.act()
    assert editors.kept > edits / 5
    assert editors.recomputed > edits / 50


@pytest.mark.parametrize("seed", seeds(1))
def test_what_is_found_saw_all_that_is_seen(seed: int) -> None:
    run(seed, 4000)


@pytest.mark.soak
@pytest.mark.parametrize("seed", seeds(4))
def test_ten_thousand_edits(seed: int) -> None:
    run(seed, 10_000)
