"""Pool final hidden states over prompts (`Sampling.pooling`), which may be computed in several pieces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from msgspec.structs import replace
from torch import Tensor

from trunkline.controller.reports import TopLogprobs
from trunkline.worker.batch.batch import PooledPiece


class Pooler:
    """The sums over prompts whose pieces have not all been computed, and the results of a step. Rank 0 has one."""

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}
        """Sum of the states so far, float64 `[hidden]`, by sequence."""
        self._done: dict[int, bytes] = {}
        """The results of this step, as in `TopLogprobs.pooled`, by index of the sample."""

    def take(self, pieces: Sequence[PooledPiece], states: Tensor) -> None:
        """Pool the pieces that a step has computed.

        Args:
            states: final hidden states `[rows, hidden]`, not changed.
        """
        for piece in pieces:
            total = states[piece.rows].sum(dim=0, dtype=torch.float64)
            if (before := self._sums.pop(piece.sequence, None)) is not None:
                total += before
            if piece.sample < 0:
                self._sums[piece.sequence] = total
            else:
                pooled = (total / piece.tokens).float()
                self._done[piece.sample] = pooled.cpu().numpy().astype("<f4").tobytes()

    def add_to(self, reports: dict[int, TopLogprobs] | None) -> dict[int, TopLogprobs] | None:
        """Return a step's reports with the results since the last call in them."""
        if not self._done:
            return reports
        done, self._done = self._done, {}
        reports = dict(reports or {})
        for sample, pooled in done.items():
            reports[sample] = replace(reports.get(sample, TopLogprobs(0.0, b"", b"")), pooled=pooled)
        return reports

    def forget(self, sequences: Iterable[int]) -> None:
        """Forget sequences that left the batch."""
        if self._sums:
            for sequence in sequences:
                self._sums.pop(sequence, None)
