"""A session whose history is cut (CachedAttention §3.4), as a rank sees it: turns on KV that stays where it is.

The stand-in for the controller beside `driver`: it makes the extents and block tables that follow from cuts. A
token's *history index* counts all tokens of the session, also those that are not seen any more.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from worker.driver import VOCAB_SIZE, Driver, dense_logprobs, run_config
from worker.ranks import Rank

from trunkline.controller.reports import PromptLogprobs, StepResult
from trunkline.kvstore.chunks import OPEN_COUNT, pack_int32, unpack_int32
from trunkline.worker.loading import load_runner
from trunkline.worker.messages import Join, Sampling
from trunkline.worker.runner import Runner

CHUNK: Final = 16
BLOCKS: Final = 128
REPORT_ALL: Final = Sampling(temperature=0, logprobs=VOCAB_SIZE, prompt_logprobs=VOCAB_SIZE)

Logprobs = NDArray[np.float32]
"""`[tokens, VOCAB_SIZE]`."""
Turn = tuple[list[int], Logprobs]
"""Tokens that were computed, and what the model says comes after each."""
Forget = Callable[[int], None]
"""Told of a block whose tokens are all dropped."""


class CutSession:
    """Turns and cuts of one session."""

    def __init__(
        self, driver: Driver, start: int = 0, *, forget: Forget = lambda block: None, piece: int = 7
    ) -> None:
        """
        Args:
            start: history index of the first token: as if everything before it had been dropped.
            piece: tokens prefilled per step.
        """
        self._driver = driver
        self._forget = forget
        self._piece = piece
        self._blocks: dict[int, int] = {}
        self._kept: list[tuple[int, int]] = []
        """Ranges of history indices that are seen, before the open one."""
        self._open = start
        self.end = start
        """History index of the first token that is not computed."""
        self._pending: list[int] = []
        """The last sampled token, whose KV is still to be computed."""

    @property
    def seen(self) -> int:
        """Computed tokens that the next one sees: its acting position."""
        return sum(stop - start for start, stop in self._kept) + self.end - self._open

    def cut(self, *ranges: tuple[int, int]) -> None:
        """Drop ranges of history indices, in order, all of them computed."""
        for start, stop in ranges:
            parts = [*self._kept, (self._open, self.end)]
            left = [
                part for a, b in parts for part in ((a, min(b, start)), (max(a, stop), b)) if part[0] < part[1]
            ]
            *self._kept, (self._open, self.end) = left
        parts = [*self._kept, (self._open, self.end)]
        used = {chunk for a, b in parts for chunk in range(a // CHUNK, -(-b // CHUNK))}
        for chunk in self._blocks.keys() - used:
            self._forget(self._blocks.pop(chunk))

    def skip_to(self, index: int) -> None:
        """Let history go on at a later index, as if what lies between had been dropped."""
        self._kept.append((self._open, self.end))
        self._open = self.end = index

    def forget_output(self) -> None:
        """Let the next turn begin without the last sampled token, which only rank 0 of several knows here."""
        self._pending = []

    def turn(self, tokens: list[int], count: int) -> Turn:
        """Compute tokens (those left over by the turn before first), then generate `count`."""
        prompt, driver = self._pending + tokens, self._driver
        first, stream = self.seen, driver.take_id()
        stop = first + len(prompt)
        table, extents = self.layout(self.end + len(prompt) + count)
        join = Join(stream, pack_int32(prompt), first, stop, pack_int32(table), REPORT_ALL, pack_int32(extents))
        joins, rows = [join], []
        for start in range(first, stop, self._piece):
            size = min(self._piece, stop - start)
            last = int(start + size == stop)
            entry = np.array([[stream, start, size, start, last]], dtype=np.int32)
            result = driver.send(joins=joins, prefill=pack_int32(entry), rows=b"", runs=b"")
            joins = []
            rows += reported(result, stream)
        output = [sampled_token(result)]
        while len(output) < count:
            step_rows = pack_int32([stream]) if len(output) == 1 else None
            result = driver.send(rows=step_rows, runs=b"" if step_rows else None)
            rows += reported(result, stream)
            output.append(sampled_token(result))
        driver.send(leaves=pack_int32([stream]), rows=b"", runs=b"")
        self.end += len(prompt) + count - 1
        self._pending = output[-1:]
        return prompt + output[:-1], np.array(rows, dtype=np.float32)

    def layout(self, end: int) -> tuple[list[int], NDArray[np.int32]]:
        """Block table and extents for a history that will reach to `end`."""
        for chunk in range(self._open // CHUNK, -(-end // CHUNK)):
            if chunk not in self._blocks:
                self._blocks[chunk] = self._driver.take_blocks(1)[0]
        table: list[int] = []
        extents, acting = [], 0
        for start, stop in [*self._kept, (self._open, end)]:
            count = OPEN_COUNT if stop == end else stop - start
            extents.append((len(table), start % CHUNK, count, start, acting - start))
            table += [self._blocks[chunk] for chunk in range(start // CHUNK, -(-stop // CHUNK))]
            acting += stop - start
        return table, np.array(extents, dtype=np.int32)


def sampled_token(result: StepResult | None) -> int:
    """Of a step's first sample."""
    # Ranks other than 0 report nothing; here only the number of tokens matters then.
    return int(unpack_int32(result.tokens)[0]) if result else 0


def reported(result: StepResult | None, stream: int) -> list[NDArray[np.float32]]:
    """What a step reports, in the order of the tokens."""
    if result is None:
        return []
    scored = (result.prompt_logprobs or {}).get(stream)
    sampled = result.logprobs or {}
    return [
        *(dense_scores(scored) if scored else []),
        *(dense_logprobs(report, VOCAB_SIZE) for report in sampled.values()),
    ]


def dense_scores(scored: PromptLogprobs) -> list[NDArray[np.float32]]:
    """Log-probabilities by token id, of a report about the whole vocabulary, in the order of the tokens."""
    ids = unpack_int32(scored.top_ids, columns=VOCAB_SIZE)
    values = np.frombuffer(scored.top_logprobs, dtype="<f4").reshape(ids.shape)
    dense = np.full(ids.shape, np.nan, dtype=np.float32)
    np.put_along_axis(dense, ids, values, axis=1)
    return list(dense)


def load(folder: Path, **fields: object) -> Runner:
    """A rank whose pool holds nothing but NaN: what was not written must not be read."""
    runner = load_runner(run_config(folder, chunk_size=CHUNK, pool_blocks=BLOCKS, **fields), lambda *_: None)
    runner.pool.data.view(torch.uint8).fill_(255)  # in every type
    return runner


def make_session(runner: Runner, driver: Driver, start: int = 0) -> CutSession:
    """A session that leaves nothing readable in the blocks that it drops."""

    def forget(block: int) -> None:
        runner.pool.data[block].view(torch.uint8).fill_(255)

    return CutSession(driver, start, forget=forget)


def make_driver(runner: Runner) -> Driver:
    return Driver(runner.execute, num_blocks=BLOCKS, chunk_size=CHUNK, seed=1)


def draw(rng: np.random.Generator, count: int) -> list[int]:
    """Random tokens."""
    tokens: list[int] = rng.integers(VOCAB_SIZE, size=count).tolist()
    return tokens


def cut_on_rank(rank: Rank, folder: Path) -> list[Turn]:
    """Return two turns of a session, between which its history is cut."""
    runner = rank.load(folder, chunk_size=CHUNK, pool_blocks=BLOCKS)
    rng = np.random.default_rng(4)
    session = make_session(runner, make_driver(runner))
    turns = [session.turn(draw(rng, 41), 5)]
    session.cut((4, 25))
    session.forget_output()
    turns.append(session.turn(draw(rng, 9), 20))
    runner.close()
    return turns
