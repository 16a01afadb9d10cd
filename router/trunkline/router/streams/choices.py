"""The texts of one request, taken apart from the tokens of all its samples. Pure.

One sample is the usual case and takes the shortest way. Each of several has a detokeniser, stop strings and
an end of its own; the engine learns nothing of a stop string before the last sample is over, and tokens
that still come for one that is are dropped here.
"""

from __future__ import annotations

import numpy as np

from trunkline.controller.messages import TopLogprobs
from trunkline.router.jobs.job import Job
from trunkline.router.messages import Hypothesis
from trunkline.router.streams.streams import Batch
from trunkline.router.streams.text import Delta, TextAssembler
from trunkline.router.text.detokenizer import TokenVocabulary


class Choices:
    """All samples of one request, or all results of its beam search."""

    def __init__(self, job: Job, vocabulary: TokenVocabulary) -> None:
        self.output_tokens = 0
        """Tokens generated so far that count, over all samples."""
        self.all_over = False
        """Whether every text has had its delta with `finish`."""
        self._texts = [TextAssembler(job, vocabulary, index) for index in range(job.decoding.samples)]
        self._open = set(range(job.decoding.samples))
        self._searches = job.decoding.beam is not None
        self._only = self._texts[0] if job.decoding.samples == 1 and not self._searches else None

    def feed(self, batch: Batch, reason: str | None) -> list[Delta]:
        """What a batch adds, by sample in order.

        Args:
            reason: the regular end of the whole request, None if it goes on or failed.
        """
        if self._only is not None:
            delta = self._only.feed(batch.tokens, batch.logprobs, reason)
            self.output_tokens = self._only.output_tokens
            if delta.finish is not None:
                self.all_over = True
            return [delta]
        deltas = self._results(batch.hypotheses or []) if self._searches else self._samples(batch, reason)
        self.output_tokens = sum([text.output_tokens for text in self._texts])
        for delta in deltas:
            if delta.finish is not None:
                self._open.discard(delta.index)
        self.all_over = not self._open
        return deltas

    def _samples(self, batch: Batch, reason: str | None) -> list[Delta]:
        tokens: dict[int, list[int]] = {}
        logprobs: dict[int, list[TopLogprobs | None]] = {}
        for index, sample in enumerate(batch.samples or ()):
            tokens.setdefault(sample, []).append(batch.tokens[index])
            if batch.logprobs:
                logprobs.setdefault(sample, []).append(batch.logprobs[index])
        deltas = []
        for sample in sorted(self._open):
            end = (batch.ended or {}).get(sample, reason)
            if sample in tokens or end is not None:
                deltas.append(self._texts[sample].feed(tokens.get(sample, []), logprobs.get(sample, []), end))
        return deltas

    def _results(self, hypotheses: list[Hypothesis]) -> list[Delta]:
        deltas = []
        for text, found in zip(self._texts, hypotheses, strict=False):
            tokens = np.frombuffer(found.tokens, dtype="<i4").tolist()
            delta = text.feed(tokens, (), found.reason)
            delta.score, delta.cumulative_logprob = found.score, found.logprob
            deltas.append(delta)
        return deltas
