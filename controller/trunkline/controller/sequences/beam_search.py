"""Beam search as `transformers` defines it: which hypotheses are finished, and when the search ends. Pure.

PagedAttention §4.4. The workers find the candidates of each step and move the beams
(`trunkline.kvstore.beams`). This file interprets the result of a step:

- of the best `width` candidates those that end (a stop token, or the last token allowed) become hypotheses;
  a hypothesis' score is its sum of log-probabilities over its length to the power of `length_penalty`;
- the best `width` hypotheses so far are kept;
- the search ends at the last token allowed, or with `width` hypotheses: at once with `early_stopping`, else as
  soon as the best beam can no longer be expected to beat the worst of them.

Scores are float32, as there: the same sums, so the same decisions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trunkline.controller.messages import BeamSearch
from trunkline.controller.reports import BeamStep
from trunkline.kvstore.beams import candidate_count, choose_beams
from trunkline.kvstore.chunks import Int32Array, pack_int32, unpack_int32
from trunkline.router.messages import FinishReason, Hypothesis

WIDTH_MAX: Final = 64
"""Largest width of a beam search: candidates per step grow with the width."""

Float32Array = NDArray[np.float32]


@dataclass(slots=True)
class _Finished:
    score: np.float32
    logprob: np.float32
    tokens: Int32Array
    """Output tokens of the hypothesis."""
    stopped: bool


class BeamHistory:
    """A search's beams and finished hypotheses. It survives preemption, which gives up only the blocks."""

    def __init__(self, spec: BeamSearch, n: int, stop_ids: list[int], output_limit: int) -> None:
        """
        Args:
            n: number of hypotheses to return.
            output_limit: largest number of output tokens of a hypothesis.
        """
        self.width = spec.width
        self.scores: Float32Array = np.zeros(spec.width, np.float32)
        """Scores of the beams, best first."""
        self.done = False
        self._spec = spec
        self._n = n
        self.output_limit = output_limit
        self._stop_ids = np.array(stop_ids, np.int32)
        self._parents: list[NDArray[np.intp]] = []
        self._tokens: list[Int32Array] = []
        self._finished: list[_Finished] = []

    @property
    def candidates(self) -> int:
        """Number of continuations that a step must report."""
        return candidate_count(self.width, len(self._stop_ids))

    @property
    def stop_ids(self) -> bytes:
        """Ids of the stop tokens as int32 bytes, as in messages."""
        return pack_int32(self._stop_ids)

    @property
    def length(self) -> int:
        """Number of output tokens that each beam has."""
        return len(self._tokens)

    def output(self, beam: int) -> Int32Array:
        """Return a beam's output so far."""
        tokens = np.empty(self.length, np.int32)
        for step in range(self.length - 1, -1, -1):
            tokens[step] = self._tokens[step][beam]
            beam = int(self._parents[step][beam])
        return tokens

    def advance(self, step: BeamStep) -> list[int]:
        """Choose the next beams from a step's candidates.

        Returns:
            for each new beam, the old beam that it continues; empty if no token may follow.

        Raises:
            ValueError: the candidates do not fit this search.
        """
        parents, tokens = unpack_int32(step.parents), unpack_int32(step.tokens)
        scores = np.frombuffer(step.scores, dtype="<f4")
        if not len(parents) == len(tokens) == len(scores) >= self.width:
            raise ValueError(f"{len(parents)}, {len(tokens)} and {len(scores)} candidates for {self.width} beams")
        if not (parents.min() >= 0 and parents.max() < self.width):
            raise ValueError(f"candidates continue beams {parents.min()} to {parents.max()} of {self.width}")
        last = self.length + 1 >= self.output_limit
        self._finish(parents, tokens, scores, last=last)
        if last:
            self.done = True
            return []
        chosen = choose_beams(tokens, self._stop_ids, self.width)
        self._parents.append(parents[chosen].astype(np.intp))
        self._tokens.append(tokens[chosen])
        self.scores = scores[chosen]
        self.done = self._is_over()
        return [int(parent) for parent in parents[chosen]]

    def _finish(self, parents: Int32Array, tokens: Int32Array, scores: Float32Array, *, last: bool) -> None:
        length = self.length + 1
        stops = np.isin(tokens[: self.width], self._stop_ids)
        ends = np.full(self.width, True) if last else stops
        for index in np.flatnonzero(ends).tolist():
            output = np.append(self.output(int(parents[index])), tokens[index]).astype(np.int32)
            logprob = scores[index]
            score = _penalised(logprob, length, self._spec.length_penalty)
            self._finished.append(_Finished(score, logprob, output, bool(stops[index])))
        self._finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self._finished[self.width :]

    def _is_over(self) -> bool:
        if len(self._finished) < self.width:
            return False
        if self._spec.early_stopping is True:
            return True
        penalty = self._spec.length_penalty
        reach = self.output_limit if self._spec.early_stopping is None and penalty > 0 else self.length
        best = _penalised(self.scores[0], reach, penalty)
        return bool(best <= self._finished[-1].score)

    def hypotheses(self) -> list[Hypothesis]:
        """Return the results, best first."""
        return [
            Hypothesis(
                tokens=pack_int32(found.tokens),
                score=float(found.score),
                logprob=float(found.logprob),
                reason=FinishReason.STOP if found.stopped else FinishReason.LENGTH,
            )
            for found in self._finished[: self._n]
        ]


def _penalised(logprob: np.float32, length: int, penalty: float) -> np.float32:
    """Return a hypothesis' score: the power in double, the division in single precision, as Python and torch
    do."""
    try:
        divisor = float(length**penalty)
    except OverflowError:
        divisor = math.inf
    with np.errstate(all="ignore"):
        return np.float32(logprob / np.float32(divisor))


_MASK: Final = (1 << 64) - 1


def sample_seed(seed: int, sample: int) -> int:
    """Return the seed of a sample: the request's own seed for sample 0, else 64 bits mixed from both.

    So the first of n samples equals the request's only one, and each sample can be drawn again by itself.
    The mixer is the finaliser of SplitMix64.
    """
    if sample == 0:
        return seed & _MASK
    x = (seed + sample * 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & _MASK
    return x ^ x >> 31
