"""Reads texts longer than the context on a real rank, in three ways of going on (CachedAttention §3.4, §4.3.4).

- `ca`: KV is kept where it is, by shift: positions go on counting and the head that stays acts later.
- `tt` (token truncation): the kept text is computed anew, from position 0.
- `nkvt` (naive KV truncation): KV is kept with its old rotations, while positions restart behind the cut: a new
  token is rotated at its place in the shortened context, so that it sees kept keys as far away as their *old*
  positions say, be they behind it. Emulated by a layout whose base positions are the new places, unshifted: what
  may be seen (base positions) is right, how far away it seems (rotations) is wrong. At the next cut keys of this
  part keep the rotations that they got here.

A lane is one text read in one way; lanes that begin alike share the blocks of what they have in common. Lanes are
read side by side, in pieces, as step plans that the worker's runner executes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trunkline.kvstore.chunks import OPEN_COUNT, Int32Array, pack_int32, unpack_int32
from trunkline.worker.config import WorkerConfig
from trunkline.worker.loading import load_runner
from trunkline.worker.messages import Join, Sampling, StepPlan

Method = Literal["ca", "tt", "nkvt"]
METHODS: Final[tuple[Method, ...]] = ("ca", "tt", "nkvt")
CHUNK: Final = 64
_STEP_TOKENS: Final = 2048
_SILENT: Final = Sampling(temperature=0)
_SCORED: Final = Sampling(temperature=0, prompt_logprobs=0)


class Scores(NamedTuple):
    """What the model said of tokens, given all before them."""

    logprobs: NDArray[np.float32]
    ranks: Int32Array
    """1: the likeliest."""


@dataclass
class Lane:
    """One text, read in one way. `start` and `end` count the text's tokens, the dropped ones included."""

    method: Method
    head: int
    """First tokens of the text that are never dropped (sinks)."""
    start: int
    """Index of the first token that is seen behind the head."""
    end: int = 0
    """Index of the first token that is not computed."""
    blocks: dict[int, int] = field(default_factory=dict)
    """By chunk of the text."""
    borrowed: frozenset[int] = frozenset()
    """Those of its blocks that belong to another lane."""
    text: list[int] = field(default_factory=list)
    """What was read, for those who must read it again."""

    @property
    def seen(self) -> int:
        """Tokens that the next one sees."""
        return min(self.head, self.end) + max(0, self.end - self.start)

    @property
    def first_chunk(self) -> int:
        """Of the tokens behind the head, or of all where none is ever dropped in place."""
        return 0 if self.method == "tt" else self.start // CHUNK

    def layout(self) -> tuple[list[int], Int32Array]:
        """Block table and extents (`Join`)."""
        if self.method == "tt":
            return [block for _, block in sorted(self.blocks.items())], np.zeros((0, 5), dtype=np.int32)
        head_chunks = list(range(-(-self.head // CHUNK)))
        table = [self.blocks[chunk] for chunk in head_chunks]
        table += [block for chunk, block in sorted(self.blocks.items()) if chunk >= self.first_chunk]
        extents = [(0, 0, self.head, 0, 0)] if self.head else []
        base, shift = (self.head, 0) if self.method == "nkvt" else (self.start, self.head - self.start)
        extents.append((len(head_chunks), self.start % CHUNK, OPEN_COUNT, base, shift))
        return table, np.array(extents, dtype=np.int32)


@dataclass
class Job:
    """The next tokens of a lane."""

    lane: Lane
    tokens: list[int]
    is_scored: bool = True


class Reader:
    """A rank on the demo model, driven as its controller would."""

    def __init__(self, model: Path, *, blocks: int, dtype: str, threads: int) -> None:
        config = WorkerConfig(
            model=str(model),
            plan_endpoint="",
            report_endpoint="",
            chunk_size=CHUNK,
            pool_blocks=blocks,
            dtype=dtype,
            threads=threads,
        )
        self._runner = load_runner(config, lambda *_: None)
        self._epoch = config.epoch
        self._free = list(range(blocks))
        self._streams = 0

    def close(self) -> None:
        self._runner.close()

    def fork(self, lane: Lane, method: Method | None = None, head: int | None = None) -> Lane:
        """A second lane that goes on from here, perhaps in another way; the first must stay as long as it does.

        Another head only where nothing is dropped yet.
        """
        child = replace(lane, blocks=dict(lane.blocks), text=list(lane.text))
        child.method = method or lane.method
        if head is not None:
            assert lane.start == lane.head
            child.head = child.start = head
        tail = lane.end % CHUNK
        if tail:
            own = child.blocks[lane.end // CHUNK] = self._free.pop()
            copy = np.array([[lane.blocks[lane.end // CHUNK], own, 0, tail]], dtype=np.int32)
            self._execute(copies=pack_int32(copy), rows=b"", runs=b"")
        child.borrowed = frozenset(lane.blocks.values())
        return child

    def release(self, lane: Lane) -> None:
        """The lane's blocks are free."""
        self._free += [block for block in lane.blocks.values() if block not in lane.borrowed]
        lane.blocks.clear()

    def cut(self, lane: Lane, count: int) -> list[Job]:
        """Drop `count` tokens behind the head; returns what is to be read before the text goes on."""
        if lane.method == "tt":
            kept = lane.text[: lane.head] + lane.text[lane.head + count :]
            self.release(lane)
            lane.start, lane.end, lane.borrowed, lane.text = lane.head, 0, frozenset(), []
            return [Job(lane, kept, is_scored=False)]
        lane.start += count
        gone = {chunk for chunk in lane.blocks if -(-lane.head // CHUNK) <= chunk < lane.start // CHUNK}
        dropped = {chunk: lane.blocks.pop(chunk) for chunk in gone}
        self._free += [block for block in dropped.values() if block not in lane.borrowed]
        return []

    def read(self, jobs: list[Job]) -> list[Scores | None]:
        """Compute the next tokens of different lanes; of scored ones, what was said of all but the first."""
        joins, waiting = [], []
        for job in jobs:
            lane, first = job.lane, job.lane.seen
            lane.end += len(job.tokens)
            lane.text += job.tokens
            for chunk in range(lane.first_chunk, -(-lane.end // CHUNK)):
                if chunk not in lane.blocks:
                    lane.blocks[chunk] = self._free.pop()
            table, extents = lane.layout()
            self._streams += 1
            sampling = _SCORED if job.is_scored else _SILENT
            tokens, stop = pack_int32(job.tokens), first + len(job.tokens)
            joins.append(
                Join(self._streams, tokens, first, stop, pack_int32(table), sampling, pack_int32(extents))
            )
            waiting.append((self._streams, first, stop))
        streams = [stream for stream, _, _ in waiting]
        parts = self._prefill(joins, waiting)
        self._execute(leaves=pack_int32(streams), rows=b"", runs=b"")
        return [
            Scores(*(np.concatenate(column) for column in zip(*parts[stream], strict=True)))
            if job.is_scored and stream in parts
            else None
            for job, stream in zip(jobs, streams, strict=True)
        ]

    def _prefill(
        self, joins: list[Join], waiting: list[tuple[int, int, int]]
    ) -> dict[int, list[tuple[NDArray[np.float32], Int32Array]]]:
        """Pieces of all sequences side by side; log-probabilities and ranks by sequence, in order."""
        parts: dict[int, list[tuple[NDArray[np.float32], Int32Array]]] = {}
        while waiting:
            size = max(1, _STEP_TOKENS // len(waiting))
            entries = [(stream, at, min(size, stop - at), at, 0) for stream, at, stop in waiting]
            plan = pack_int32(np.array(entries, dtype=np.int32))
            for stream, found in self._execute(joins=joins, prefill=plan, rows=b"", runs=b"").items():
                parts.setdefault(stream, []).append(found)
            joins = []
            waiting = [(stream, at + size, stop) for stream, at, stop in waiting if at + size < stop]
        return parts

    def _execute(self, **fields: object) -> dict[int, tuple[NDArray[np.float32], Int32Array]]:
        plan = StepPlan(self._runner.steps + 1, self._epoch, **fields)  # type: ignore[arg-type]
        result = self._runner.execute(plan)
        assert result is not None
        reports = result.prompt_logprobs or {}
        return {
            stream: (np.frombuffer(report.token_logprobs, dtype="<f4"), unpack_int32(report.ranks))
            for stream, report in reports.items()
        }
