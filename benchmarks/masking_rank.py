"""Modules on a real rank, to see that it says what `masking_model` says (pml.md §3, theorem 4).

Each text is computed once, into blocks of its own, behind the texts that it sees; others then see it at any place.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trunkline.kvstore.chunks import OPEN_COUNT, blocks_for, pack_int32
from trunkline.worker.config import WorkerConfig
from trunkline.worker.loading import load_runner
from trunkline.worker.messages import Join, Sampling, StepPlan

CHUNK: Final = 64
_SCORED: Final = Sampling(temperature=0, prompt_logprobs=0)


class RankText(NamedTuple):
    """A text whose KV is on the rank."""

    blocks: list[int]
    tokens: int
    position: int
    """At which its first token was computed."""
    first: int = 0
    """Place of its first token in the first block."""

    def behind(self, count: int) -> RankText:
        """Return the KV of all tokens but the first `count`."""
        skipped, first = divmod(self.first + count, CHUNK)
        return RankText(self.blocks[skipped:], self.tokens - count, self.position + count, first)


class Rank:
    """Driven as its controller would, one text at a time."""

    def __init__(self, model: Path, *, blocks: int, threads: int) -> None:
        config = WorkerConfig(
            model=str(model),
            plan_endpoint="",
            report_endpoint="",
            chunk_size=CHUNK,
            pool_blocks=blocks,
            dtype="float32",
            threads=threads,
        )
        self._runner = load_runner(config, lambda *_: None)
        self._epoch = config.epoch
        self._all = list(range(blocks))
        self._free = list(self._all)
        self._streams = 0

    def close(self) -> None:
        self._runner.close()

    def forget(self) -> None:
        """All texts."""
        self._free = list(self._all)

    def read(
        self, tokens: list[int], position: int, seen: Sequence[tuple[RankText, int]] = ()
    ) -> tuple[RankText, NDArray[np.float64]]:
        """As `MaskedModel.read`; log-probabilities of all tokens but the first."""
        table: list[int] = []
        extents = []
        for text, at in seen:
            extents.append((len(table), text.first, text.tokens, text.position, at - text.position))
            table += text.blocks
        extents.append((len(table), 0, OPEN_COUNT, position, 0))
        own = [self._free.pop() for _ in range(blocks_for(len(tokens), CHUNK))]
        first = sum(text.tokens for text, _ in seen)
        stop = first + len(tokens)
        self._streams += 1
        packed = pack_int32(np.array(extents, dtype=np.int32))
        join = Join(self._streams, pack_int32(tokens), first, stop, pack_int32(table + own), _SCORED, packed)
        entry = np.array([(self._streams, first, len(tokens), first, 0)], dtype=np.int32)
        plan = StepPlan(
            self._runner.steps + 1, self._epoch, joins=[join], prefill=pack_int32(entry), rows=b"", runs=b""
        )
        result = self._runner.execute(plan)
        assert result is not None
        leave = StepPlan(
            self._runner.steps + 1, self._epoch, leaves=pack_int32([self._streams]), rows=b"", runs=b""
        )
        self._runner.execute(leave)
        report = (result.prompt_logprobs or {})[self._streams]
        logprobs = np.frombuffer(report.token_logprobs, dtype="<f4").astype(np.float64)
        return RankText(own, len(tokens), position), logprobs
